"""One step: the snapshot of a decision, and running it to a result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kaiseki.core.decision import I32, Decision, StepResult
from kaiseki.core.reasons import Finish
from kaiseki.engines.embedded.batch import BlockTables, lay_out
from kaiseki.engines.embedded.forward import ModelRunner
from kaiseki.engines.embedded.rows import RowState
from kaiseki.engines.embedded.sampling import Choice, choose_all
from kaiseki.engines.embedded.text import TextCodec
from kaiseki.engines.embedded.work import TokenOutput

log = logging.getLogger(__name__)

MAY_PASS = (RuntimeError, MemoryError, OSError)
"""Errors that another try may get around: Torch reports memory it can't get, and little else that is
not a bug, as RuntimeError. What is wrong with the request itself (IndexError, ValueError, ...) stays so."""
STAYS = (NotImplementedError, RecursionError)
"""Kinds of RuntimeError that no other try gets around."""


@dataclass(frozen=True, slots=True)
class Step:
    """Everything a step needs, copied when its decision was executed. Arrays as in `Decision`.

    Attributes:
        states: the rows' states; a row that is closed and opened again meanwhile has another one.
        tables: int32[n, max_blocks].
    """

    slot: int
    rows: I32
    tokens: I32
    starts: I32
    samples: tuple[bool, ...]
    epochs: I32
    swaps: I32
    copies: I32
    tables: I32
    states: tuple[RowState, ...]

    @classmethod
    def snapshot(cls, decision: Decision, states: Mapping[int, RowState], tables: BlockTables) -> Step:
        """Copy what a decision refers to."""
        rows, starts, tokens = decision.rows.copy(), decision.starts.copy(), decision.tokens.copy()
        found = np.empty((0, 0), np.int32)
        if rows.size:
            found = np.array(tables.tables(rows, starts + tokens), np.int32)
        return cls(
            slot=decision.slot,
            rows=rows,
            tokens=tokens,
            starts=starts,
            samples=tuple(decision.samples.tolist()),
            epochs=decision.epochs.copy(),
            swaps=decision.swaps.copy(),
            copies=decision.copies.copy(),
            tables=found,
            states=tuple(states[row] for row in rows.tolist()),
        )


@dataclass(slots=True)
class _Outcome:
    """What became of one row in a step."""

    token: int | None = None
    finish: Finish = Finish.NONE
    error: str = ""
    retryable: bool = False
    payload: tuple[TokenOutput, ...] | None = None


class StepRunner:
    """Runs steps, one after the other, on one thread."""

    def __init__(self, runner: ModelRunner, codec: TextCodec, clock: Callable[[], int]) -> None:
        """`clock` returns nanoseconds."""
        self._runner = runner
        self._codec = codec
        self._clock = clock

    def run(self, step: Step) -> StepResult:
        """Run a step. Rows that can't be computed come back as failed.

        Raises:
            Exception: moving KV to or from host memory failed, so that nobody knows what is where.
        """
        started = swapped = self._clock()
        if step.swaps.size:
            self._runner.backend.swap_blocks(step.swaps)
            swapped = self._clock()
        try:
            outcomes = self._outcomes(step)
        except Exception as error:
            log.exception("step %d failed as a whole", step.slot)
            outcomes = [_failed(error) for _ in step.states]
        for state, outcome, epoch in zip(step.states, outcomes, step.epochs.tolist(), strict=True):
            if outcome.error:
                state.failed_in = epoch
            elif outcome.finish != Finish.NONE:
                state.finished_in = epoch
        return _result(step, outcomes, started, self._clock(), swapped - started)

    def _outcomes(self, step: Step) -> list[_Outcome]:
        """Outcome of every row of the step, in order."""
        if step.copies.size:
            self._runner.backend.copy_blocks(step.copies)
        outcomes = [_Outcome() for _ in step.states]
        active = []
        for i, (state, epoch) in enumerate(zip(step.states, step.epochs.tolist(), strict=True)):
            if state.failed_in == epoch:
                outcomes[i].error = "the row's previous step failed"
            elif state.finished_in != epoch:
                active.append(i)
        self._compute(step, active, outcomes)
        return outcomes

    def _compute(self, step: Step, active: list[int], outcomes: list[_Outcome]) -> None:
        """Forward and sample the rows at these indices; if that fails, each alone."""
        if not active:
            return
        try:
            logits = self._forward(step, active)
        except Exception as error:
            if len(active) == 1:
                log.warning("row %d failed in slot %d: %s", step.rows[active[0]], step.slot, error)
                outcomes[active[0]] = _failed(error)
                return
            for i in active:
                self._compute(step, [i], outcomes)
            return
        self._sample(step, [i for i in active if step.samples[i]], logits, outcomes)

    def _forward(self, step: Step, active: list[int]) -> torch.Tensor:
        """float32[s, vocabulary] of those rows that sample; [0, ...] if none does."""
        chunks = [step.states[i].chunk(int(step.starts[i]), int(step.tokens[i])) for i in active]
        samples = [step.samples[i] for i in active]
        return self._runner.logits(
            lay_out(chunks, step.starts[active], step.tables[active], samples, self._runner.block_tokens)
        )

    def _sample(
        self, step: Step, sampling: list[int], logits: torch.Tensor, outcomes: list[_Outcome]
    ) -> None:
        """Choose, write down and put into words a token for each of these rows."""
        states = [step.states[i] for i in sampling]
        positions = [int(step.starts[i] + step.tokens[i]) for i in sampling]
        try:
            choices = choose_all(logits, states, positions, self._codec)
        except Exception as error:
            if len(sampling) == 1:
                outcomes[sampling[0]] = _failed(error)
            else:
                for j, i in enumerate(sampling):
                    self._sample(step, [i], logits[j : j + 1], outcomes)
            return
        for i, state, position, choice in zip(sampling, states, positions, choices, strict=True):
            outcomes[i] = _written(state, position, choice)


def _written(state: RowState, position: int, choice: Choice) -> _Outcome:
    """Write a chosen token into its row."""
    if choice.error:
        return _Outcome(error=choice.error)
    text, finish = state.put(position, choice.token)
    output = TokenOutput(choice.token, text, choice.chosen, choice.top)
    return _Outcome(choice.token, finish, payload=(output,))


def _result(step: Step, outcomes: list[_Outcome], started: int, ended: int, swap_ns: int) -> StepResult:
    """Outcomes as arrays."""
    failed = np.array([bool(o.error) for o in outcomes], bool)
    return StepResult(
        slot=step.slot,
        rows=step.rows,
        epochs=step.epochs,
        new_tokens=np.array([o.token is not None for o in outcomes], np.int32),
        token_ids=np.array([o.token for o in outcomes if o.token is not None], np.int32),
        finish=np.array([o.finish for o in outcomes], np.int8),
        failed=failed,
        retryable=np.array([o.retryable for o in outcomes], bool),
        started_ns=started,
        ended_ns=ended,
        message="; ".join(sorted({o.error for o in outcomes if o.error})),
        swap_ns=swap_ns if step.swaps.size else 0,
        payloads=[o.payload for o in outcomes],
    )


def _failed(error: Exception) -> _Outcome:
    """What an exception makes of a row."""
    again = isinstance(error, MAY_PASS) and not isinstance(error, STAYS)
    return _Outcome(error=_describe(error), retryable=again)


def _describe(error: Exception) -> str:
    """One line about an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
