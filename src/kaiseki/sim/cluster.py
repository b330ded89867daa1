"""The cluster file: which model runs on which cards, in how many replicas, and what joins them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, ValidationError

from kaiseki.core.protocols import CostModel
from kaiseki.cost.calibrated import Profile
from kaiseki.cost.capacity import DoesNotFit, kv_blocks
from kaiseki.cost.cards import load_card
from kaiseki.cost.catalogue import UnknownName
from kaiseki.cost.deployment import Deployment, HostTime
from kaiseki.cost.hf_config import load_model
from kaiseki.cost.online import OnlineLinear
from kaiseki.cost.profiled import Profiled
from kaiseki.cost.roofline import Roofline
from kaiseki.sections import (
    ConfigError,
    Name,
    Positive,
    Problem,
    Section,
    Shipped,
    keys,
    problem_of,
    read_mapping,
)

SHIPPED = Shipped(resources.files("kaiseki.sim") / "clusters")
Count = Annotated[int, Field(ge=1, le=100_000)]
Limit = Annotated[int, Field(ge=0)]
BLOCK_TOKENS = 16


class Scale(Section):
    """How a pool grows and shrinks with its load.

    Load is the part of its rows or of its KV that is wanted, whichever is more, on average over its replicas.

    Attributes:
        least, most: replicas that it may have; it begins with the pool's `replicas`.
        out_above: one more is started where the load is above this.
        in_below: one is taken out where the load of those that are left would still be below this.
        every_s: how often it is looked at.
        start_s: until a replica that was started takes requests.
    """

    least: Count = 1
    most: Count
    out_above: Positive = 0.9
    in_below: Positive = 0.6
    every_s: Positive = 10.0
    start_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0


class Pool(Section):
    """Replicas that are alike: each takes whole requests, only their prompts, or all but these."""

    name: Name
    role: Literal["mixed", "prefill", "decode"] = "mixed"
    card: str
    cards: Count | None = None
    tp: Count = 1
    pp: Count = 1
    replicas: Count | None = None
    host_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    block_tokens: Count = BLOCK_TOKENS
    kv_blocks: Count | None = None
    host_kv_blocks: Annotated[int, Field(ge=0)] = 0
    max_batch_size: Count = 256
    max_step_tokens: Count = 8192
    max_waiting: Limit = 0
    max_waiting_tokens: Limit = 0
    profile: Annotated[str | None, Field(min_length=1)] = None
    lora_slots: Annotated[int, Field(ge=0, le=1024)] = 0
    lora_rank: Count = 16
    scale: Scale | None = None


class Links(Section):
    """What joins each prefill pool with each decode pool: one link, of the same kind everywhere.

    Attributes:
        gb_s: bandwidth, GB/s (1e9 bytes), that transfers under way share evenly.
        latency_us: from the last byte sent to its arrival.
        max_active: most transfers under way at once on a link.
        feedback_us: how long it takes until the scheduler knows that a transfer has been sent.
        headroom: the part of the bandwidth that the scheduler leaves free.
    """

    gb_s: Positive
    latency_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_active: Count = 4
    feedback_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    headroom: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0.0


class Routers(Section):
    """What stands before the replicas: so many routers, each of which gets its part of the requests.

    Attributes:
        count: how many.
        refresh_ms: how often replicas say how loaded they are; 0 if routers always know.
    """

    count: Count = 1
    refresh_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class Happens(Section):
    """Something that happens to a replica.

    Attributes:
        at_s: when, seconds of simulated time.
        what: it fails and what it held is lost, it takes no new requests and is switched off when it has
            none, or it is (back) there.
        pool, replica: which, counted from 0 in its pool.
    """

    at_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    what: Literal["fail", "drain", "recover"]
    pool: Name
    replica: Annotated[int, Field(ge=0)] = 0


class Training(Section):
    """Training that shares the cards of a pool.

    Attributes:
        pool: which; every replica of it takes part.
        tokens: a step on a replica takes as long as a prompt of so many tokens.
        steps_per_s: what it is promised, on each replica.
        tenant, weight: whom its card time is charged to, and that one's share.
    """

    pool: Name
    tokens: Count
    steps_per_s: Positive
    tenant: Name = "training"
    weight: Positive = 1.0


class Site(Section):
    """One of several clusters.

    Attributes:
        name: of the cluster.
        share: part of all requests that come here, in relation to the other clusters'.
        pools: its replicas; KV never leaves it.
    """

    name: Name
    share: Positive = 1.0
    pools: Annotated[list[Pool], Field(min_length=1)]


class Wan(Section):
    """What lies between clusters.

    Attributes:
        latency_ms: one way between any two.
        slot_ms: how often requests that came in the meantime are placed.
    """

    latency_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    slot_ms: Positive = 20.0


class Cluster(Section):
    """A cluster file: one cluster's pools, or several clusters."""

    model: str
    pools: Annotated[list[Pool], Field(min_length=1)] | None = None
    clusters: Annotated[list[Site], Field(min_length=1)] | None = None
    wan: Wan | None = None
    links: Links | None = None
    routers: Routers = Routers()
    events: list[Happens] = Field(default_factory=list)
    training: Training | None = None

    def sites(self) -> list[tuple[str, list[Pool]]]:
        """The pools of each cluster, and where in the file they are."""
        if self.clusters is None:
            return [("", self.pools or [])]
        return [(f"clusters[{i}].", site.pools) for i, site in enumerate(self.clusters)]

    def shares(self) -> list[float]:
        """Part of the requests that come in each cluster."""
        return [1.0] if self.clusters is None else [site.share for site in self.clusters]


class Replica:
    """What the fleet is made of: a deployment, with room for KV.

    Attributes:
        pool: whose replica it is.
        deployment: model, card and split.
        profile: measured step times, in place of the deployment's roofline.
        timing: how long its steps take.
        site: which cluster it is in, from 0.
        number: in its pool, from 0.
        spare: it is there only when the pool grows.
        blocks: KV blocks of its pool.

    Raises:
        DoesNotFit: the model leaves no room for KV.
        ValueError: there is a profile, and several stages.
    """

    def __init__(
        self, pool: Pool, deployment: Deployment, site: int = 0, profile: Profile | None = None
    ) -> None:
        self.pool = pool
        self.deployment = deployment
        self.site = site
        self.number = 0
        self.spare = False
        self.profile = profile
        self.timing = Roofline(deployment) if profile is None else Profiled(deployment, profile)
        self.blocks = pool.kv_blocks or kv_blocks(
            deployment, pool.block_tokens, pool.max_step_tokens, pool.max_batch_size
        )

    def cost_model(self) -> CostModel:
        """What the scheduler believes of step times: all of the roofline, or what it learns as it goes."""
        return self.timing if self.profile is None else OnlineLinear(np.array(self.profile.linear))

    def another(self, number: int, spare: bool) -> Replica:
        """One more of the same kind."""
        one = copy(self)
        one.number, one.spare = number, spare
        return one


def shipped() -> list[str]:
    """Names of the files that come with Kaiseki."""
    return SHIPPED.names()


def load(path_or_name: str | Path) -> Cluster:
    """Read a cluster file, or one that comes with Kaiseki by its name.

    Raises:
        OSError: it can't be read.
        ConfigError: it has problems.
    """
    return parse(SHIPPED.read(path_or_name))


def parse(text: str | bytes) -> Cluster:
    """A cluster file from YAML text.

    Raises:
        ConfigError: with every problem found.
    """
    raw, problems = read_mapping(Cluster, text)
    cluster = None
    try:
        cluster = Cluster.model_validate(raw)
    except ValidationError as error:
        problems += [problem_of(Cluster, item) for item in error.errors(include_url=False)]
    if cluster is not None:
        problems += _parts_missing(cluster)
    if problems or cluster is None:
        raise ConfigError(problems)
    return cluster


def _parts_missing(cluster: Cluster) -> Iterator[Problem]:
    """Roles that need one another, pools that can't be told apart, links that join nothing."""
    if (cluster.pools is None) == (cluster.clusters is None):
        yield Problem("pools", None, "either pools or clusters are needed, and not both")
        return
    if cluster.clusters is not None and len(cluster.clusters) > 1 and cluster.wan is None:
        yield Problem("wan", None, f"clusters need what lies between: a mapping with {', '.join(keys(Wan))}")
    if cluster.wan is not None and len(cluster.clusters or ()) < 2:
        yield Problem("wan", cluster.wan.latency_ms, "there is only one cluster")
    names: list[str] = []
    split = False
    for where, pools in cluster.sites():
        for i, pool in enumerate(pools):
            if pool.name in names:
                text = "another pool has this name; each must have its own"
                yield Problem(f"{where}pools[{i}].name", pool.name, text)
            names.append(pool.name)
        roles = {pool.role for pool in pools}
        for one, other in (("prefill", "decode"), ("decode", "prefill")):
            if one in roles and other not in roles:
                text = f"{one} pools need a pool with role: {other} beside them"
                yield Problem(f"{where}pools", ", ".join(sorted(roles)), text)
        split = split or {"prefill", "decode"} <= roles
    if split and cluster.links is None:
        text = f"prefill and decode pools need links: a mapping with {', '.join(keys(Links))}"
        yield Problem("links", None, text)
    if not split and cluster.links is not None:
        yield Problem("links", cluster.links.gb_s, "only prefill and decode pools are joined by links")


def fleet(cluster: Cluster) -> list[Replica]:
    """The replicas of all pools, in order.

    Raises:
        ConfigError: a card or model is unknown, cards don't make up whole replicas, the model does not fit.
    """
    problems: list[Problem] = []
    replicas: list[Replica] = []
    for site, (where, pools) in enumerate(cluster.sites()):
        for i, pool in enumerate(pools):
            try:
                replicas += _replicas(cluster.model, pool, site)
            except ConfigError as error:
                at = f"{where}pools[{i}]"
                problems += [Problem(f"{at}.{p.path}", p.value, p.message) for p in error.problems]
    problems += _without_place(cluster, replicas)
    if problems:
        raise ConfigError(problems)
    return replicas


def _without_place(cluster: Cluster, replicas: list[Replica]) -> Iterator[Problem]:
    """Events that happen to nobody, training that finds no place."""
    counts: dict[str, int] = {}
    for replica in replicas:
        counts[replica.pool.name] = counts.get(replica.pool.name, 0) + 1
    training = cluster.training
    if training is not None and counts:
        if training.pool not in counts:
            yield Problem("training.pool", training.pool, f"must be one of {', '.join(counts)}")
        room = min(
            (r.blocks * r.pool.block_tokens for r in replicas if r.pool.name == training.pool), default=0
        )
        if 0 < room <= training.tokens:
            yield Problem("training.tokens", training.tokens, f"must fit the pool's {room} tokens of KV")
    for i, event in enumerate(cluster.events if counts else []):
        if event.pool not in counts:
            yield Problem(f"events[{i}].pool", event.pool, f"must be one of {', '.join(counts)}")
        elif event.replica >= counts[event.pool]:
            text = f"the pool has {counts[event.pool]} replicas, counted from 0"
            yield Problem(f"events[{i}].replica", event.replica, text)


def _replicas(model: str, pool: Pool, site: int) -> Iterator[Replica]:
    each = pool.tp * pool.pp
    count = pool.replicas or max((pool.cards or each) // each, 1)
    if pool.cards is not None and pool.cards != count * each:
        text = f"must be replicas x tp x pp = {count} x {pool.tp} x {pool.pp}"
        raise ConfigError([Problem("cards", pool.cards, text)])
    scale = pool.scale
    if scale is not None:
        if not scale.least <= count <= scale.most:
            text = f"must hold the pool's {count} replicas: least <= {count} <= most"
            raise ConfigError([Problem("scale", f"{scale.least} to {scale.most}", text)])
        if scale.in_below > scale.out_above:
            text = f"must not be above out_above, {scale.out_above:g}, or the pool would swing to and fro"
            raise ConfigError([Problem("scale.in_below", scale.in_below, text)])
    try:
        card = load_card(pool.card)
    except UnknownName as error:
        raise ConfigError([Problem("card", pool.card, str(error))]) from None
    try:
        shape = load_model(model)
    except (UnknownName, OSError, ValueError) as error:
        raise ConfigError([Problem("model", model, str(error))]) from None
    profile = _profile(pool)
    try:
        host = HostTime(base_us=pool.host_ms * 1e3)
        replica = Replica(pool, Deployment(shape, card, pool.tp, pool.pp, host), site, profile)
    except DoesNotFit as error:
        raise ConfigError([Problem("card", pool.card, str(error))]) from None
    except ValueError as error:
        raise ConfigError([Problem("tp", pool.tp, str(error))]) from None
    most = count if scale is None else scale.most
    return (replica.another(n, spare=n >= count) for n in range(most))


def _profile(pool: Pool) -> Profile | None:
    if pool.profile is None:
        return None
    wrong = ""
    if pool.pp > 1:
        wrong = f"is of one pass through the model, so pp must be 1, not {pool.pp}"
    if pool.host_ms:
        wrong = "has the host's time in it, so host_ms must be left out"
    if wrong:
        raise ConfigError([Problem("profile", pool.profile, wrong)])
    try:
        return Profile.load(Path(pool.profile))
    except OSError as error:
        text = f"{error.strerror}; `kaiseki calibrate` writes one"
        raise ConfigError([Problem("profile", pool.profile, text)]) from None
    except ValueError as error:
        raise ConfigError([Problem("profile", pool.profile, str(error))]) from None
