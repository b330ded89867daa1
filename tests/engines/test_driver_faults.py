"""One request's trouble stays its own; what is wrong with the core ends everything and says so."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.harness import Bench, Named, job, naming

from kaiseki.core.decision import StepResult
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.engines.recovery import Recovery
from kaiseki.engines.updates import Update

GENEROUS_S = 60.0


def post(bench: Bench, name: str, sink: Callable[[Update], None], work: Any = None) -> None:
    """Submit a job with a sink of our own."""
    made = job(name, 40, 6)
    bench.driver.submit(made.request, work or Named(made.script, naming([0] * 40, made.script)), sink)


def test_an_id_that_is_open_already_fails_the_second_and_leaves_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench("fcfs", audit=True)
    first = bench.submit(job("twin", 40, 6))
    second: list[Update] = []
    post(bench, "twin", second.append)
    other = bench.submit(job("other", 40, 6))
    bench.run()
    assert [u.outcome for u in second] == [Outcome.FAILED]
    assert first.outcome == other.outcome == Outcome.COMPLETED
    assert "request twin could not be submitted" in caplog.text
    recent = {r["request"]: r["outcome"] for r in bench.driver.recent(9)}
    assert recent == {"twin": "completed", "other": "completed"}, "the first one's story was overwritten"
    bench.check_end()


def test_work_that_the_engine_cannot_open_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench("fcfs", audit=True)
    told: list[Update] = []
    broken = job("broken", 40, 6)
    before = bench.submit(job("before", 40, 6))
    bench.driver.submit(broken.request, "no script", told.append)
    after = bench.submit(job("after", 40, 6))
    bench.run()
    assert [(u.outcome, u.reason) for u in told] == [(Outcome.FAILED, Reason.ENGINE_ERROR)]
    assert before.outcome == after.outcome == Outcome.COMPLETED
    assert "request broken could not be opened" in caplog.text
    assert bench.driver.health().ok
    bench.check_end()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("last", [0, 3, 5], ids=["first token", "in the middle", "last token"])
def test_an_owner_who_cannot_be_told_ends_alone(
    depth: int, last: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench("fcfs", depth, audit=True)
    told: list[Update] = []

    def sink(update: Update) -> None:
        told.append(update)
        if len(told) == last + 1:
            raise KeyError("the owner's own bug")

    post(bench, "deaf", sink)
    others = [bench.submit(job(f"r{i}", 40, 6)) for i in range(3)]
    bench.run()
    assert all(o.outcome == Outcome.COMPLETED for o in others)
    assert "request deaf: its owner could not be told" in caplog.text
    ended = bench.driver.history.story("deaf").ending
    # Who is told the last token but can't take it has been served all the same.
    assert ended.outcome == (Outcome.COMPLETED if last == 5 else Outcome.FAILED)
    assert told[-1].outcome == ended.outcome
    bench.check_end()


def test_owners_who_fail_at_every_word(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench("fcfs", audit=True)
    caplog.set_level(logging.CRITICAL)

    def deaf(update: Update) -> None:
        raise RuntimeError("never")

    for i in range(5):
        post(bench, f"deaf{i}", deaf)
    bench.driver.step()
    post(bench, "deaf0", deaf)  # an id that is free again by now
    bench.driver.cancel("deaf1")
    fine = bench.submit(job("fine", 40, 6))
    bench.run()
    assert fine.outcome == Outcome.COMPLETED
    bench.check_end()


def test_a_row_that_the_engine_cannot_close_has_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench("fcfs")
    close = bench.engine.close

    def sticky(row: int) -> None:
        close(row)
        raise OSError("stuck")

    monkeypatch.setattr(bench.engine, "close", sticky)
    served = [bench.submit(job(f"r{i}", 40, 6)) for i in range(2)]
    bench.run()
    assert all(s.outcome == Outcome.COMPLETED for s in served)
    assert "request r0 could not be closed" in caplog.text


class Flaky:
    """Fails the chunks of one request for a number of times, in a way that may be retried."""

    def __init__(self, bench: Bench, name: str, times: int) -> None:
        self.left, self.tried = times, 0
        collect = bench.engine.collect

        def flaky() -> StepResult:
            result = collect()
            row = bench.scheduler.life.ids.get(name)
            for i in range(result.rows.size):
                valid = result.rows[i] == row and bench.scheduler.table.epoch[row] == result.epochs[i]
                if valid and self.left:
                    self.left -= 1
                    self.tried += 1
                    self._fail(result, i)
            return result

        bench.engine.collect = flaky  # type: ignore[method-assign]

    def _fail(self, result: StepResult, i: int) -> None:
        if result.new_tokens[i]:
            result.token_ids = np.delete(result.token_ids, int(result.new_tokens[:i].sum()))
        result.new_tokens[i], result.finish[i] = 0, 0
        result.failed[i], result.retryable[i] = True, True
        result.message = "a passing trouble"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("times", [1, 2])
def test_errors_that_may_pass_are_retried_and_nobody_notices(depth: int, times: int) -> None:
    bench = Bench("fcfs", depth)
    flaky = Flaky(bench, "flaky", times)
    jobs = [job("flaky", 40, 6), job("fine", 40, 6)]
    bench.run(jobs)
    bench.check_end()  # also compares every output with what was scripted
    assert flaky.tried == times
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("retries", [0, 1, 3])
def test_what_keeps_failing_ends_after_so_many_retries(
    depth: int, retries: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench("fcfs", depth, recovery=Recovery(max_retries=retries))
    flaky = Flaky(bench, "flaky", 1000)
    bench.run([job("flaky", 40, 6), job("fine", 40, 6)])
    bench.check_end()
    end = bench.served["flaky"].end
    assert (end.outcome, end.reason) == (Outcome.FAILED, Reason.ENGINE_ERROR)
    assert end.numbers == {"attempts": retries + 1} and flaky.tried == retries + 1
    assert bench.served["fine"].outcome == Outcome.COMPLETED
    assert caplog.text.count("request flaky failed") == retries + 1
    assert caplog.text.count("it is tried again") == retries
    assert caplog.text.count("a passing trouble") == retries + 1
    events = [e["event"] for e in bench.driver.explain("flaky")["timeline"]]
    assert events.count("retried") == retries and events[-1] == "failed"


def test_what_cannot_pass_fails_at_once() -> None:
    bench = Bench("fcfs", audit=True)
    bench.run([job("fails", 40, 5, breaks_at=42), job("fine", 40, 5)])
    assert bench.served["fails"].end.numbers == {"attempts": 1}
    bench.check_end()


def test_a_fault_of_the_core_ends_everything_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("fcfs")
    told: dict[str, list[Update]] = {}
    done = threading.Event()

    def sink(update: Update) -> None:
        told.setdefault(update.request_id, []).append(update)
        if update.outcome != Outcome.OPEN and len(told) == 3:
            done.set()

    def deaf(update: Update) -> None:
        raise RuntimeError("not even this")

    def broken(now: int, limit: int | None) -> None:
        raise ZeroDivisionError("in the core")

    monkeypatch.setattr(bench.scheduler, "decide", broken)
    post(bench, "deaf", deaf)  # must not keep the others from hearing of it
    for name in "abc":
        post(bench, name, sink)
    bench.driver.start()
    assert done.wait(GENEROUS_S)
    assert bench.driver.drain(GENEROUS_S), "drain waits for what will never end"
    health = bench.driver.health()
    assert not health.ok and health.reason == "ZeroDivisionError: in the core"
    assert {n: [u.outcome for u in us] for n, us in told.items()} == {n: [Outcome.FAILED] for n in "abc"}
    # Whoever comes later is answered, and whoever leaves later hurts nobody.
    bench.driver.cancel("a")
    post(bench, "late", sink)
    assert [u.outcome for u in told["late"]] == [Outcome.REFUSED]
    bench.driver.stop()


def test_a_request_that_breaks_the_core_half_way_is_a_fault_of_the_system() -> None:
    bench = Bench("fcfs")
    bad = job("bad", 40, 6)
    bench.driver.submit(
        replace(bad.request, arrival_ns=2**70), Named(bad.script, lambda p: p), lambda u: None
    )
    with pytest.raises(OverflowError):
        bench.driver.step()


def test_what_nobody_has_looked_at_yet_counts_as_waiting() -> None:
    bench = Bench("fcfs")
    for i in range(3):
        bench.submit(job(f"r{i}", 40, 6))
    assert bench.driver.backlog() == (3, 120)
    assert bench.driver.health().waiting == 3 and bench.driver.snapshot()["posted"] == 3
    bench.driver.cancel("r0")  # no request
    assert bench.driver.backlog() == (3, 120)
    bench.driver.step()
    assert bench.driver.backlog() == (0, 0) and bench.driver.health().waiting == 0
    bench.submit(job("late", 60, 6))
    assert bench.driver.backlog() == (1, 60)
    bench.run()
    assert bench.driver.backlog() == (0, 0)
    bench.check_end()


def test_a_stopped_driver_answers_those_who_come_late() -> None:
    bench = Bench("fcfs")
    told: list[Update] = []
    bench.driver.start()
    bench.driver.stop()
    post(bench, "late", told.append)
    assert [u.outcome for u in told] == [Outcome.REFUSED]


def test_a_fault_noticed_elsewhere_ends_everything_even_while_nothing_runs() -> None:
    bench = Bench("fcfs")
    bench.driver.start()
    bench.driver.break_off(RuntimeError("the machine is on fire"))
    assert bench.driver.drain(GENEROUS_S)
    bench.driver.stop()
    assert bench.driver.health().reason == "RuntimeError: the machine is on fire"
    bench.driver.break_off(RuntimeError("told twice"))
    assert bench.driver.health().reason == "RuntimeError: the machine is on fire"


def test_a_fault_noticed_while_another_ends_everything_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench("fcfs")
    told: list[Update] = []

    def broken() -> StepResult:
        bench.driver.break_off(RuntimeError("the same"))
        post(bench, "late", told.append)
        raise RuntimeError("gone")

    monkeypatch.setattr(bench.engine, "collect", broken)
    post(bench, "early", told.append)
    bench.driver.start()
    with bench.driver._wake:
        assert bench.driver._wake.wait_for(lambda: len(told) == 2, GENEROUS_S)
    bench.driver.stop()
    assert {u.request_id: u.outcome for u in told} == {"early": Outcome.FAILED, "late": Outcome.REFUSED}
    assert bench.driver.health().reason == "RuntimeError: gone"
    assert "could not say so" not in caplog.text
