"""How long an iteration takes: the sum over its kernels of their rooflines."""

from __future__ import annotations

import math

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.core.jit import inlined, kernel, njit
from kaiseki.core.protocols import F_CHUNKS, F_DECODES, F_SLOT, F_TOKENS, N_FEATURES
from kaiseki.cost.deployment import Deployment, HostTime
from kaiseki.cost.kernels import EXPERTS, Block, Kernel, form, kernels
from kaiseki.cost.timing import IDEAL, N_PLANES, kernel_planes

_REACH = 1.5
"""The experts' curve is laid again when the decodes differ from where it was laid by this factor."""


@inlined
def experts_visited(experts: float, active: float, tokens: float) -> float:
    """Distinct experts of a layer that `tokens` tokens visit, each `active` of `experts` at random.

    Every expert is missed by one token with probability 1 - active/experts, so the expectation is
    experts * (1 - (1 - active/experts) ** tokens). Real routers are less even and visit fewer.
    """
    if active >= experts:
        return experts if tokens > 0 else 0.0
    return experts * (1.0 - math.exp(tokens * math.log(1.0 - active / experts)))


@inlined
def modelled_ns(terms: F64, routing: F64, features: F64) -> float:
    """Time of a chunk set, ns; for compiled callers.

    Args:
        terms: float64[K, N_PLANES, N_FORM], of `Roofline.terms` or `Roofline.stage_terms`.
        routing: float64[3], `Roofline.routing`: experts, active experts, tokens of a decode.
        features: float64[N_FEATURES].
    """
    visited = 0.0
    if routing[0] > 0:
        tokens = routing[2] * features[F_DECODES] + features[F_TOKENS]
        visited = experts_visited(routing[0], routing[1], tokens)
    total = 0.0
    for k in range(terms.shape[0]):
        best = 0.0
        for j in range(terms.shape[1]):
            value = 0.0
            for f in range(features.size):
                value += terms[k, j, f] * features[f]
            best = max(best, value + terms[k, j, features.size] * visited)
        total += best
    return total


@kernel
def one_modelled_ns(terms: F64, routing: F64, features: F64) -> float:
    """As `modelled_ns`, for callers that are not compiled."""
    return modelled_ns(terms, routing, features)


@njit
def all_modelled_ns(terms: F64, routing: F64, features: F64) -> F64:
    """As `modelled_ns`, for float64[n, N_FEATURES]: float64[n]."""
    result = np.empty(features.shape[0])
    for i in range(features.shape[0]):
        result[i] = modelled_ns(terms, routing, features[i])
    return result


class Roofline:
    """Iteration times of a deployment; a `CostModel`.

    For dense models the planes are the model, to the last bit. The number of experts a batch visits
    is concave in its tokens, which no maximum of planes is: there the planes take the tangent at the
    present number of decodes, and all experts as soon as there is a prefill chunk. So they are never
    below `iteration_ns`, and equal to it at that number of decodes.

    Args:
        headroom: what `headroom` returns. 1 if the engine is this same model, as in a simulation.

    Attributes:
        terms: float64[K, N_PLANES, N_FORM], ns: one pass through all stages, for `modelled_ns`.
        ideal_terms: as `terms`, with computing and moving at the datasheet's rates and nothing else; their
            time is what `busy_share` counts as busy.
        routing: float64[3] for `modelled_ns`.
    """

    def __init__(self, deployment: Deployment, headroom: float = 1.0) -> None:
        self.deployment = deployment
        self._headroom = headroom
        self._kernels = kernels(deployment)
        efficiency = deployment.card.efficiency
        self._each = np.stack([kernel_planes(k, deployment, efficiency) for k in self._kernels])
        self._counts = np.array(
            [[_count(k, deployment, s) for k in self._kernels] for s in range(deployment.pp)]
        )
        moe = deployment.model.moe
        routed = (moe.experts, moe.active) if moe else (0, 0)
        self.routing: F64 = np.array([*routed, 1 + deployment.draft_tokens], np.float64)
        self.terms: F64 = self._summed(self._counts.sum(0), self._each, host=True)
        self.ideal_terms: F64 = self._at_datasheet_rates()
        self._anchor = 1.0
        self._planes = self._tangent()

    def _summed(self, counts: F64, each: F64, host: bool) -> F64:
        """float64[K, N_PLANES, N_FORM] of the kernels that occur, and the host's part."""
        occurs = counts > 0
        terms = each[occurs] * counts[occurs, None, None]
        if host and self.deployment.host != HostTime():
            part = _host_form(self.deployment)
            terms = np.concatenate([terms, np.tile(part, (1, N_PLANES, 1))])
        return np.ascontiguousarray(terms)

    def _at_datasheet_rates(self) -> F64:
        each = np.stack([kernel_planes(k, self.deployment, IDEAL) for k in self._kernels])
        each[:, -1] = 0.0  # no launches
        each[[k.family in ("all_reduce", "send") for k in self._kernels]] = 0.0
        return self._summed(self._counts.sum(0), each, host=False)

    def stage_terms(self, stage: int) -> F64:
        """float64[K, N_PLANES, N_FORM] of one pipeline stage, for `modelled_ns`.

        The host's part belongs to the first stage, the send to the stage that sends. The stages' times add
        up to the pass; with the pipeline full, an iteration ends every time of the slowest stage.
        """
        return self._summed(self._counts[stage], self._each, host=stage == 0)

    def iteration_ns(self, features: F64) -> float:
        """Time of one pass through all stages, ns; 0 for an empty set. float64[N_FEATURES]."""
        return float(one_modelled_ns(self.terms, self.routing, features))

    def iterations_ns(self, features: F64) -> F64:
        """As `iteration_ns` for many sets: float64[n, N_FEATURES] to float64[n]."""
        return all_modelled_ns(self.terms, self.routing, features)

    def kernel_ns(self, features: F64) -> dict[str, float]:
        """Time of each kernel in a pass, ns, by `block.name`, and of the `host`."""
        result = {}
        counts = self._counts.sum(0)
        for k, one, count in zip(self._kernels, self._each, counts, strict=True):
            if count:
                terms = one[None] * count
                result[f"{k.block}.{k.name}"] = float(one_modelled_ns(terms, self.routing, features))
        result["host"] = self.iteration_ns(features) - sum(result.values())
        return result

    def busy_share(self, features: F64) -> float:
        """Share of the pass in which a card's units or memory are busy, in [0, 1].

        What computing and moving would take at the datasheet's rates, over the time of the pass.
        """
        time = self.iteration_ns(features)
        return float(one_modelled_ns(self.ideal_terms, self.routing, features)) / time if time > 0 else 0.0

    def energy_j(self, features: F64) -> float:
        """Energy of one pass, joules: time * (idle + busy_share * (peak - idle)) on the cards of a stage.

        A pass occupies one stage at a time; the other stages work on other passes, or idle, which is
        the caller's to count (`idle_watts` of the card).
        """
        card, seconds = self.deployment.card, self.iteration_ns(features) * 1e-9
        watts = card.idle_watts + self.busy_share(features) * (card.peak_watts - card.idle_watts)
        return self.deployment.tp * watts * seconds

    def planes(self) -> F64:
        """float64[K, N_PLANES, N_FEATURES], ns per unit of feature."""
        return self._planes

    def headroom(self) -> float:
        return self._headroom

    def observe(self, features: F64, measured_ns: int) -> None:
        """Lay the tangent to the experts' curve where the batch now is; nothing else is learnt."""
        decodes = features[F_DECODES]
        if self.routing[0] and decodes and not 1 / _REACH < decodes / self._anchor < _REACH:
            self._anchor = float(decodes)
            self._planes = self._tangent()

    def _tangent(self) -> F64:
        """The terms with the experts visited replaced by a linear form that is never below them.

        Without chunks, the tangent at the anchor to a concave curve. One chunk lifts it to all experts
        at no decodes, hence everywhere.
        """
        experts, active, queries = self.routing
        planes = self.terms[:, :, :N_FEATURES].copy()
        if not experts:
            return planes
        here = experts_visited(experts, active, self._anchor * queries)
        rate = -math.log(1.0 - active / experts) if active < experts else 0.0
        slope = (experts - here) * rate * queries
        weight = self.terms[:, :, EXPERTS]
        planes[:, :, F_SLOT] += weight * (here - slope * self._anchor)
        planes[:, :, F_DECODES] += weight * slope
        planes[:, :, F_CHUNKS] += weight * (experts - here + slope * self._anchor)
        return planes


def _count(k: Kernel, deployment: Deployment, stage: int) -> int:
    """How often a kernel occurs in a stage."""
    layers, dense = len(deployment.stage_layers(stage)), deployment.stage_dense_layers(stage)
    last = stage == deployment.pp - 1
    counts: dict[Block, int] = {
        "embedding": int(stage == 0),
        "attention": layers,
        "dense": dense,
        "moe": layers - dense,
        "head": int(last),
        "send": int(not last),
    }
    return counts[k.block]


def _host_form(deployment: Deployment) -> F64:
    """The host's part of an iteration, ns: float64[N_FORM]."""
    host = deployment.host
    token, sequence = host.per_token_us * 1e3, host.per_sequence_us * 1e3
    return form(
        slot=(host.base_us + host.per_card_us * deployment.tp) * 1e3,
        decodes=token * (1 + deployment.draft_tokens) + sequence,
        chunks=sequence,
        tokens=token,
        pairs=host.per_pair_ns,
    )
