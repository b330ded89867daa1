"""A scripted engine: no model, a virtual clock, step times from a formula, failures on demand.

It checks as it goes what a real engine relies on: chunks that continue where the last valid one
ended and whose adapter is loaded, at most `depth + 1` decisions outstanding, rows not reused while in
flight where that is forbidden. The token it samples at position p of a request is a function of
(request, p) alone, so any schedule must give the same output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kaiseki.core.costs import add_decode, add_prefill, predict_ns
from kaiseki.core.decision import F64, Decision, StepResult
from kaiseki.core.filling import no_features
from kaiseki.core.protocols import Capabilities
from kaiseki.core.reasons import Finish
from kaiseki.engines.clock import VirtualClock


@dataclass(frozen=True, slots=True)
class Script:
    """What one request will do.

    Attributes:
        prompt_tokens: prompt length.
        output_tokens: the output ends with a stop after this many tokens, unless max_tokens comes first.
        max_tokens: as in the request.
        seed: distinguishes the outputs of requests.
        breaks_at: position whose computation fails, or -1.
        retryable: whether that failure may be retried (it then succeeds).
        adapter: name of the LoRA adapter that it must run with, or None.
    """

    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    seed: int = 0
    breaks_at: int = -1
    retryable: bool = False
    adapter: str | None = None

    def token(self, index: int) -> int:
        """The output token with this index."""
        return (self.seed * 7919 + index * 104729) % 50_000


class ScriptError(AssertionError):
    """A decision that no engine could execute."""


class ScriptedEngine:
    """An `Engine` on a virtual clock.

    Args:
        clock: advanced by each step's duration as its result is collected.
        weights: float64[N_FEATURES], true ns per unit of feature.
        capabilities: what to claim; depth and placeholders are enforced.
        jitter: float in [0, 1) or a callable giving each step's time factor.
        adapters: names of adapters by the index under which decisions load them; may grow.
    """

    def __init__(
        self,
        clock: VirtualClock,
        weights: F64,
        capabilities: Capabilities | None = None,
        jitter: Callable[[], float] | None = None,
        adapters: Sequence[str] = (),
    ) -> None:
        self._clock = clock
        self._planes = np.asarray(weights, np.float64).reshape(1, 1, -1)
        self._capabilities = capabilities or Capabilities()
        self._jitter = jitter or (lambda: 1.0)
        self._scripts: dict[int, Script] = {}
        self._reached: dict[int, tuple[int, int]] = {}  # row -> (epoch, next position)
        self._failed_once: set[int] = set()
        self._outstanding: deque[tuple[Decision, list[Script | None]]] = deque()
        self._free_at_ns = 0
        self._adapters = adapters
        self._loaded: dict[int, str] = {}  # by adapter slot

    @property
    def capabilities(self) -> Capabilities:
        """As given."""
        return self._capabilities

    def open(self, row: int, work: object) -> None:
        """Take a request's script."""
        if not isinstance(work, Script):
            raise TypeError(f"a scripted engine runs Scripts, not {type(work).__name__}")
        self._scripts[row] = work
        self._failed_once.discard(row)

    def close(self, row: int) -> None:
        """Forget the row."""
        del self._scripts[row]
        self._reached.pop(row, None)

    def execute(self, decision: Decision) -> None:
        """Queue a decision after checking that it can be executed."""
        if len(self._outstanding) > self._capabilities.depth:
            raise ScriptError(f"slot {decision.slot}: more than depth + 1 decisions outstanding")
        rows = decision.rows.tolist()
        if len(set(rows)) != len(rows):
            raise ScriptError(f"slot {decision.slot}: a row twice in one decision")
        if not self._capabilities.placeholders:
            # A row that was stopped meanwhile, and perhaps given to another request, has a newer epoch.
            busy = {pair for d, _ in self._outstanding for pair in _pairs(d)}
            if busy & _pairs(decision):
                raise ScriptError(f"slot {decision.slot}: {busy & _pairs(decision)} are in flight")
        for row, start, tokens, epoch in zip(
            rows, decision.starts.tolist(), decision.tokens.tolist(), decision.epochs.tolist(), strict=True
        ):
            before = self._reached.get(row)
            if before is not None and before[0] == epoch and before[1] != start:
                raise ScriptError(f"row {row}: chunk starts at {start}, last one ended at {before[1]}")
            if tokens < 1:
                raise ScriptError(f"row {row}: empty chunk")
            self._reached[row] = (epoch, start + tokens)
        scripts = [self._scripts.get(r) for r in rows]
        self._load(decision)
        for row, script in zip(rows, scripts, strict=True):
            needs = script.adapter if script is not None else None
            if needs is not None and needs not in self._loaded.values():
                raise ScriptError(f"row {row}: its adapter {needs} is not loaded")
        self._outstanding.append((decision, scripts))

    def _load(self, decision: Decision) -> None:
        """Load adapters, each into a slot whose last adapter no outstanding decision uses."""
        used = {
            script.adapter for _, scripts in self._outstanding for script in scripts if script is not None
        }
        for adapter, slot in decision.loads.tolist():
            if not 0 <= slot < self._capabilities.adapter_slots:
                raise ScriptError(f"slot {decision.slot}: there is no adapter slot {slot}")
            if self._loaded.get(slot) in used - {None}:
                raise ScriptError(f"slot {decision.slot}: adapter {self._loaded[slot]} is in use")
            name = self._adapters[adapter]
            if name in self._loaded.values():
                raise ScriptError(f"slot {decision.slot}: adapter {name} is loaded already")
            self._loaded[slot] = name

    def collect(self) -> StepResult:
        """Finish the oldest decision and move the clock to its end."""
        d, scripts = self._outstanding.popleft()
        started = max(self._clock.now_ns(), self._free_at_ns)
        loading = float(d.loads.shape[0] * self._capabilities.adapter_load_ns)
        swapping = len(d.swaps) * self._capabilities.swap_block_ns
        ns = predict_ns(self._planes, self._features(d, scripts)) + loading + swapping
        ended = started + int(ns * self._jitter())
        self._free_at_ns = ended
        self._clock.advance_to(ended)
        n = d.rows.size
        result = StepResult(
            slot=d.slot,
            rows=d.rows,
            epochs=d.epochs,
            new_tokens=np.zeros(n, np.int32),
            token_ids=np.empty(0, np.int32),
            finish=np.zeros(n, np.int8),
            failed=np.zeros(n, np.bool_),
            retryable=np.zeros(n, np.bool_),
            started_ns=started,
            ended_ns=ended,
            swap_ns=swapping,
        )
        ids = [self._run(i, d, script, result) for i, script in enumerate(scripts) if script is not None]
        result.token_ids = np.array([t for t in ids if t is not None], np.int32)
        return result

    def _run(self, i: int, d: Decision, script: Script, result: StepResult) -> int | None:
        row, start, end = int(d.rows[i]), int(d.starts[i]), int(d.starts[i] + d.tokens[i])
        if start <= script.breaks_at < end and row not in self._failed_once:
            if script.retryable and self._scripts.get(row) is script:  # else the row has a new owner
                self._failed_once.add(row)
            result.failed[i], result.retryable[i] = True, script.retryable
            result.message = "scripted failure"
            return None
        if not d.samples[i]:
            return None
        index = end - script.prompt_tokens
        result.new_tokens[i] = 1
        if index + 1 >= script.max_tokens:
            result.finish[i] = Finish.LENGTH
        if index + 1 >= script.output_tokens:
            result.finish[i] = Finish.STOP
        return script.token(index)

    def _features(self, d: Decision, scripts: list[Script | None]) -> F64:
        features = no_features()
        for start, tokens, script in zip(d.starts.tolist(), d.tokens.tolist(), scripts, strict=True):
            if script is not None and start >= script.prompt_tokens and tokens == 1:
                add_decode(features, float(start + 1))
            else:
                add_prefill(features, float(start), float(tokens))
        return features


def _pairs(d: Decision) -> set[tuple[int, int]]:
    """The (row, epoch) pairs of a decision."""
    return set(zip(d.rows.tolist(), d.epochs.tolist(), strict=True))
