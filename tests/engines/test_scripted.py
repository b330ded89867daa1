"""The scripted engine catches decisions that no engine could execute."""

from __future__ import annotations

import numpy as np
import pytest
from tests.harness import SMALL, START_NS

from kaiseki.core.decision import Decision
from kaiseki.core.protocols import Capabilities
from kaiseki.core.reasons import Finish
from kaiseki.engines.clock import VirtualClock
from kaiseki.engines.scripted import Script, ScriptedEngine, ScriptError


def engine(depth: int = 0, placeholders: bool = True, jitter: float = 1.0) -> ScriptedEngine:
    capabilities = Capabilities(depth=depth, placeholders=placeholders)
    made = ScriptedEngine(VirtualClock(START_NS), SMALL, capabilities, lambda: jitter)
    for row in range(3):
        made.open(row, Script(10, 3, 5, seed=row))
    return made


def decision(slot: int, *chunks: tuple[int, int, int, bool], epoch: int = 0) -> Decision:
    """From (row, start, tokens, samples)."""
    rows, starts, tokens = (np.array([c[k] for c in chunks], np.int32) for k in range(3))
    epochs = np.full(rows.size, epoch, np.int32)
    return Decision(slot, rows, tokens, starts, np.array([c[3] for c in chunks]), epochs)


def test_tokens_depend_on_request_and_position_only() -> None:
    e = engine()
    e.execute(decision(1, (0, 0, 10, True), (1, 0, 4, False)))
    first = e.collect()
    assert first.new_tokens.tolist() == [1, 0] and first.token_ids.tolist() == [Script(10, 3, 5, 0).token(0)]
    assert first.finish.tolist() == [Finish.NONE, Finish.NONE]
    e.execute(decision(2, (0, 10, 1, True), (1, 4, 6, True)))
    assert e.collect().token_ids.tolist() == [Script(10, 3, 5, s).token(1 - s) for s in (0, 1)]
    e.execute(decision(3, (0, 11, 1, True)))
    assert e.collect().finish.tolist() == [Finish.STOP]


def test_the_clock_moves_by_the_formula_times_the_jitter() -> None:
    e = engine(jitter=1.5)
    e.execute(decision(1, (0, 0, 10, True)))
    result = e.collect()
    lone = SMALL[0] + SMALL[3] * 10 + SMALL[5] * 55
    assert result.started_ns == START_NS and result.ended_ns - START_NS == int(lone * 1.5)


def test_what_cannot_be_executed_is_refused() -> None:
    with pytest.raises(ScriptError, match="twice"):
        engine().execute(decision(1, (0, 0, 1, False), (0, 1, 1, False)))
    with pytest.raises(ScriptError, match="empty chunk"):
        engine().execute(decision(1, (0, 0, 0, False)))
    with pytest.raises(TypeError, match="runs Scripts"):
        engine().open(7, "text")
    e = engine()
    e.execute(decision(1, (0, 0, 4, False)))
    with pytest.raises(ScriptError, match="more than depth"):
        e.execute(decision(2, (1, 0, 4, False)))
    e.collect()
    with pytest.raises(ScriptError, match="starts at 5, last one ended at 4"):
        e.execute(decision(2, (0, 5, 1, False)))
    e.execute(decision(3, (0, 0, 1, False), epoch=1))


def test_disjoint_rows_may_meet_again_only_under_a_new_epoch() -> None:
    e = engine(depth=2, placeholders=False)
    e.execute(decision(1, (0, 0, 4, False)))
    with pytest.raises(ScriptError, match="in flight"):
        e.execute(decision(2, (0, 4, 4, False)))
    e.execute(decision(2, (0, 0, 4, False), epoch=1))


def test_a_chunk_breaks_where_the_script_says_and_a_retry_succeeds() -> None:
    e = engine()
    e.open(0, Script(10, 3, 5, breaks_at=6, retryable=True))
    e.open(1, Script(10, 3, 5, breaks_at=6))
    for epoch in (0, 1):
        e.execute(decision(1 + epoch, (0, 0, 10, True), (1, 0, 10, True), (2, 0, 6, False), epoch=epoch))
        result = e.collect()
        assert result.failed.tolist() == [epoch == 0, True, False]
        assert result.retryable.tolist() == [epoch == 0, False, False] and result.message
        assert result.new_tokens.tolist() == [epoch, 0, 0]
