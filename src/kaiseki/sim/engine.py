"""An `Engine` that computes nothing: steps take what the cost model says, on a virtual clock.

With pipeline stages several decisions are under way at once, each in another stage; a stage begins the next
when it has passed the last one on. An engine that takes decisions ahead begins each when the one before it
has ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from kaiseki.core.costs import add_decode, add_prefill
from kaiseki.core.decision import F64, I8, I32, I64, Bool, Decision, StepResult
from kaiseki.core.jit import kernel
from kaiseki.core.protocols import N_FEATURES, Capabilities
from kaiseki.core.reasons import Finish
from kaiseki.cost.profiled import Spread
from kaiseki.cost.roofline import Roofline, one_modelled_ns
from kaiseki.engines.clock import VirtualClock

_STOP = int(Finish.STOP)


@dataclass(frozen=True, slots=True)
class Work:
    """What one request will do: lengths in tokens."""

    prompt_tokens: int
    output_tokens: int


@kernel
def run_rows(
    rows: I32, tokens: I32, starts: I32, samples: Bool, prompts: I32, left: I32, finish: I8, features: F64
) -> None:
    """Count what the rows compute, and take their new tokens off what they have `left`."""
    for i in range(rows.size):
        r, n, start = rows[i], float(tokens[i]), float(starts[i])
        if n == 1.0 and start >= prompts[r]:
            add_decode(features, start + 1.0)
        else:
            add_prefill(features, start, n)
        finish[i] = 0
        if samples[i]:
            left[r] -= 1
            if left[r] <= 0:
                finish[i] = _STOP


class SimulatedEngine:
    """See the module's text.

    Args:
        roofline: how long steps take.
        clock: moved on by whoever drives the simulation, never by the engine.
        max_context_tokens, max_step_tokens, adapter_slots, adapter_load_ns, swap_block_ns: see
            `Capabilities`.
        ahead: decisions taken before the one under way has ended, of the same rows too; one stage only.
        spread: how much longer than `roofline` says steps take.
    """

    def __init__(
        self,
        roofline: Roofline,
        clock: VirtualClock,
        max_context_tokens: int = 1 << 20,
        max_step_tokens: int = 8192,
        ahead: int = 0,
        spread: Spread | None = None,
        adapter_slots: int = 0,
        adapter_load_ns: int = 0,
        swap_block_ns: int = 0,
    ) -> None:
        self._roofline = roofline
        self._clock = clock
        self._spread = spread
        stages = roofline.deployment.pp
        self._capabilities = Capabilities(
            depth=ahead or stages - 1,
            placeholders=ahead > 0,
            max_context_tokens=max_context_tokens,
            max_step_tokens=max_step_tokens,
            adapter_slots=adapter_slots,
            adapter_load_ns=adapter_load_ns,
            swap_block_ns=swap_block_ns,
        )
        self._stages = [roofline.stage_terms(stage) for stage in range(stages)]
        self._busy_until: I64 = np.zeros(stages, np.int64)
        self._prompts, self._left = np.zeros((2, 256), np.int32)
        self._owner: I32 = np.zeros(256, np.int32)  # rises with every request that gets the row
        self._outstanding: deque[tuple[StepResult, I32]] = deque()
        self._collected: I32 = np.empty(0, np.int32)
        self.iterations = 0
        self.busy_ns = 0
        self.energy_j = 0.0

    @property
    def capabilities(self) -> Capabilities:
        """One decision per pipeline stage, of disjoint rows, or some ahead."""
        return self._capabilities

    @property
    def free_ns(self) -> int:
        """When the engine takes a decision: as soon as the first stage can begin it, or ahead of that."""
        return 0 if self._capabilities.placeholders else int(self._busy_until[0])

    def open(self, row: int, work: Work) -> None:
        """Learn how long the request is."""
        if row >= self._left.size:
            self._prompts = np.concatenate([self._prompts, np.zeros_like(self._prompts)])
            self._left = np.concatenate([self._left, np.zeros_like(self._left)])
            self._owner = np.concatenate([self._owner, np.zeros_like(self._owner)])
            self.open(row, work)
            return
        self._prompts[row], self._left[row] = work.prompt_tokens, work.output_tokens
        self._owner[row] += 1

    def close(self, row: int) -> None:
        """Forget the row."""
        self._left[row] = 0

    def execute(self, decision: Decision) -> None:
        """Begin a step now; its end follows from the stages it has to pass."""
        n, features = decision.rows.size, np.zeros(N_FEATURES)
        finish = np.empty(n, np.int8)
        run_rows(
            decision.rows, decision.tokens, decision.starts, decision.samples,
            self._prompts, self._left, finish, features,
        )  # fmt: skip
        started = at = max(self._clock.now_ns(), int(self._busy_until[0]))
        swapping = len(decision.swaps) * self._capabilities.swap_block_ns
        at += decision.loads.shape[0] * self._capabilities.adapter_load_ns + swapping
        longer = 1.0 if self._spread is None else self._spread.draw()
        for stage, terms in enumerate(self._stages):
            took = int(one_modelled_ns(terms, self._roofline.routing, features) * longer)
            at = max(at, int(self._busy_until[stage])) + took
            self._busy_until[stage] = at
            self.busy_ns += took
        self.iterations += 1
        self.energy_j += self._roofline.energy_j(features)
        none = np.zeros(n, np.bool_)
        result = StepResult(
            slot=decision.slot,
            rows=decision.rows,
            epochs=decision.epochs,
            new_tokens=decision.samples.astype(np.int32),
            token_ids=np.zeros(int(decision.samples.sum()), np.int32),
            finish=finish,
            failed=none,
            retryable=none,
            started_ns=started,
            ended_ns=at,
            swap_ns=swapping,
        )
        self._outstanding.append((result, self._owner[decision.rows]))

    def next_end_ns(self) -> int | None:
        """When the oldest step under way ends; None without any."""
        return self._outstanding[0][0].ended_ns if self._outstanding else None

    def collect(self) -> StepResult:
        """The oldest step, which must have ended by now."""
        result, self._collected = self._outstanding.popleft()
        return result

    def stop(self, now: int) -> None:
        """It has failed: steps under way come to nothing, and the cards stand still."""
        self.busy_ns -= int(np.maximum(self._busy_until - now, 0).sum())
        self._busy_until[:] = now
        self._outstanding.clear()

    def take_back(self, result: StepResult, emitted: Bool) -> None:
        """Tokens of the step collected last that nobody wanted, as their rows were stopped, come again.

        `emitted`: bool[n], rows whose tokens counted.
        """
        rows = result.rows[(result.new_tokens > 0) & ~emitted & (self._owner[result.rows] == self._collected)]
        self._left[rows] += 1
