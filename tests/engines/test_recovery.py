"""An engine that fails is given pauses, and one that fails on everything gets no more work until it works."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from tests.harness import MS, START_NS, Bench, Named, job, naming

from kaiseki.core.decision import StepResult
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.core.requests import Request
from kaiseki.engines.recovery import Breaker, Recovery
from kaiseki.engines.scripted import Script

S = 1000 * MS
SLACK = 20 * MS
"""More than a step of the scripted engine takes with these requests."""


class Broken:
    """Fails chunks that `hits` chooses by request id, and notes when each such try began."""

    def __init__(self, bench: Bench, hits: Callable[[str], bool], retryable: bool = True) -> None:
        self.tries: dict[str, list[int]] = {}
        self.hits, self.retryable = hits, retryable
        self.bench = bench
        self.collect = bench.engine.collect
        bench.engine.collect = self.step  # type: ignore[method-assign]

    def step(self) -> StepResult:
        result = self.collect()
        life, table = self.bench.scheduler.life, self.bench.scheduler.table
        for i, row in enumerate(result.rows.tolist()):
            name = life.names.get(row, "")
            if not self.hits(name):
                continue
            if table.epoch[row] == result.epochs[i]:  # else it was in flight when the chunk before it failed
                self.tries.setdefault(name, []).append(result.started_ns)
            if result.new_tokens[i]:
                result.token_ids = np.delete(result.token_ids, int(result.new_tokens[:i].sum()))
            result.new_tokens[i], result.finish[i] = 0, 0
            result.failed[i], result.retryable[i] = True, self.retryable
            result.message = "RuntimeError: out of order"
        return result


def probe() -> tuple[Request, Named]:
    script = Script(1, 2, 1)
    return Request("probe", 1, 1, tenant="probe"), Named(script, naming([0], script))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


# ---------------------------------------------------------------- back-off


def test_the_pause_doubles_up_to_its_cap() -> None:
    recovery = Recovery(backoff_ms=50, backoff_max_ms=300)
    assert [recovery.backoff_ns(n) // MS for n in (1, 2, 3, 4, 5, 100)] == [50, 100, 200, 300, 300, 300]
    assert Recovery(backoff_ms=0).backoff_ns(3) == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "kaiseki"])
def test_no_retry_comes_before_its_time_and_others_go_on_meanwhile(policy: str, depth: int) -> None:
    recovery = Recovery(max_retries=4, backoff_ms=100, backoff_max_ms=300)
    bench = Bench(policy, depth, recovery=recovery, audit=True)
    broken = Broken(bench, lambda name: name == "flaky" and len(broken.tries.get(name, ())) < 4)
    steady = [job(f"steady{i}", 40, 300) for i in range(3)]
    bench.run([job("flaky", 40, 6), *steady])
    bench.check_end()  # which also compares every output with its script
    assert all(s.outcome == Outcome.COMPLETED for s in bench.served.values())
    tries = [*broken.tries["flaky"], bench.served["flaky"].times_ns[0]]
    pauses = [b - a for a, b in pairwise(tries)]
    for pause, least in zip(pauses, (100, 200, 300, 300), strict=True):
        assert least * MS <= pause <= least * MS + SLACK
    for served in (bench.served[j.request.id] for j in steady):
        assert max(served.gaps_ns) <= SLACK, "somebody else waited for the pauses of one"


def test_a_lone_request_gets_its_retry_at_the_end_of_the_pause() -> None:
    """Nothing else runs that could wake the driver up."""
    bench = Bench("fcfs", recovery=Recovery(backoff_ms=400))
    broken = Broken(bench, lambda name: not broken.tries)
    served = bench.submit(job("alone", 40, 3))
    bench.driver.run_until_idle()
    assert served.outcome == Outcome.COMPLETED
    assert 400 * MS <= served.times_ns[0] - broken.tries["alone"][0] <= 400 * MS + SLACK
    bench.check_end()


def test_without_a_pause_the_retry_is_in_the_next_slot() -> None:
    bench = Bench("fcfs", recovery=Recovery(backoff_ms=0))
    broken = Broken(bench, lambda name: not broken.tries)
    bench.run([job("alone", 40, 3)])
    assert bench.served["alone"].times_ns[0] - broken.tries["alone"][0] <= SLACK
    bench.check_end()


def test_who_leaves_during_the_pause_is_gone_and_its_row_has_a_new_owner() -> None:
    bench = Bench("fcfs", recovery=Recovery(backoff_ms=100), audit=True)
    broken = Broken(bench, lambda name: name == "leaves")
    leaves = bench.submit(job("leaves", 40, 6))
    bench.driver.step()
    assert broken.tries and bench.driver.resting_until_ns is not None
    assert (bench.pool.live_blocks(), len(bench.scheduler.waiting)) == (0, 0)
    row = bench.scheduler.life.ids["leaves"]
    bench.driver.cancel("leaves")
    heir = bench.submit(job("heir", 40, 60))
    bench.driver.step()
    assert leaves.outcome == Outcome.CANCELLED and bench.scheduler.life.ids["heir"] == row
    assert bench.driver.resting_until_ns is None
    bench.run()
    assert heir.outcome == Outcome.COMPLETED and len(broken.tries["leaves"]) == 1
    bench.check_end()


def test_a_fork_that_backs_off_stays_out_though_its_sibling_has_the_prompt() -> None:
    bench = Bench("fcfs", recovery=Recovery(backoff_ms=200), audit=True)
    broken = Broken(bench, lambda name: name == "fork" and not broken.tries)
    ids = list(range(40))
    for made in (job("first", 40, 80), job("fork", 40, 6, fork_of="first")):
        bench.submit(made, ids)
    bench.run()
    bench.check_end()
    assert bench.served["fork"].outcome == Outcome.COMPLETED
    assert bench.served["fork"].times_ns[0] - broken.tries["fork"][0] >= 200 * MS


def test_the_pause_is_explained() -> None:
    bench = Bench("fcfs", recovery=Recovery(backoff_ms=100))
    broken = Broken(bench, lambda name: name == "flaky" and len(broken.tries.get(name, ())) < 2)
    bench.run([job("flaky", 40, 6), job("steady", 40, 300)])
    told = bench.driver.explain("flaky")
    waits = {w["reason"]: w["ms"] for w in told["waits"]}
    assert 300 <= waits["back_off"] <= 300 + SLACK / MS
    assert sum(waits.values()) == pytest.approx(told["total_wait_ms"], abs=0.01)
    events = [(e["event"], e["reason"]) for e in told["timeline"]]
    assert events.count(("passed_over", "back_off")) == 2
    assert "for 100 ms" in next(e["detail"] for e in told["timeline"] if e["reason"] == "back_off")
    assert Reason.BACK_OFF.sentence in told["summary"]


# ---------------------------------------------------------------- an engine that fails on everything


def failing(bench: Bench, requests: int = 5) -> Broken:
    """An engine that fails on all; so many requests one after the other find that out."""
    broken = Broken(bench, lambda name: True, retryable=False)
    for i in range(requests):
        bench.submit(job(f"victim{i}", 40, 6))
        bench.run()
    return broken


@pytest.mark.parametrize("depth", [0, 1])
def test_after_so_many_failed_steps_new_requests_are_refused_and_health_says_so(depth: int) -> None:
    bench = Bench("fcfs", depth, recovery=Recovery(failing_steps=5, probe_s=2.0), probe=probe)
    broken = failing(bench, 4)
    assert bench.driver.health().ok, "four are not five"
    failing_now = bench.submit(job("fifth", 40, 6))
    bench.run()
    assert failing_now.outcome == Outcome.FAILED and sum(map(len, broken.tries.values())) == 5
    refused = bench.submit(job("sixth", 40, 6))
    bench.run()
    assert (refused.outcome, refused.end.reason) == (Outcome.REFUSED, Reason.ENGINE_FAILING)
    assert refused.end.retry_after_s == 2.0
    assert "sixth" not in broken.tries, "the engine was bothered"
    health = bench.driver.health()
    assert (health.ok, health.code, health.retry_after_s) == (False, "engine_failing", 2.0)
    assert "the last 5 steps of the engine failed for every request" in health.reason
    assert "RuntimeError: out of order" in health.reason
    metrics = bench.driver.metrics
    assert metrics.errors.tolist() == [0, 5] and metrics.failed_steps == 5 and metrics.load.engine_failing
    assert bench.driver.explain("sixth")["timeline"][0]["reason"] == "engine_failing"


def test_it_recovers_by_itself_with_the_first_probe_that_works() -> None:
    bench = Bench("fcfs", recovery=Recovery(failing_steps=5, probe_s=2.0), probe=probe, audit=True)
    broken = failing(bench)
    since = bench.clock.now_ns()
    for seconds in (1.9, 2.1, 3.9, 4.3):  # nobody asks for anything
        bench.clock.advance_to(since + int(seconds * S))
        bench.driver.step()
        bench.driver.step()
    assert len(broken.tries["probe"]) == 2 and not bench.driver.health().ok
    broken.hits = lambda name: False
    bench.clock.advance_to(since + int(6.5 * S))
    bench.driver.step()
    bench.driver.step()
    assert bench.driver.health().ok and not bench.driver.metrics.load.engine_failing
    served = bench.submit(job("again", 40, 6))
    bench.run()
    assert served.outcome == Outcome.COMPLETED
    bench.clock.advance_to(since + 60 * S)
    bench.driver.step()
    assert bench.driver.recent(1)[0]["request"] == "again", "a healthy engine is not asked"
    bench.check_end()
    assert len(bench.driver.history._by_seq) == len(bench.driver.history._stories), "probes pile up"


def test_requests_that_are_open_tell_as_well_that_it_works() -> None:
    recovery = Recovery(max_retries=9, backoff_ms=10, failing_steps=3, probe_s=1000.0)
    bench = Bench("fcfs", recovery=recovery, probe=probe)
    broken = Broken(bench, lambda name: sum(map(len, broken.tries.values())) < 4)
    bench.run([job("patient", 40, 6)])
    assert bench.served["patient"].outcome == Outcome.COMPLETED
    assert len(broken.tries["patient"]) == 4 and bench.driver.health().ok


def test_one_request_that_breaks_its_steps_does_not_close_the_engine_to_others() -> None:
    recovery = Recovery(max_retries=50, backoff_ms=1, failing_steps=5)
    bench = Bench("fcfs", recovery=recovery, probe=probe)
    Broken(bench, lambda name: name == "poison")
    bench.each_slot = lambda b: health.append(b.driver.health().ok)
    health: list[bool] = []
    bench.run([job("poison", 40, 6), job("fine", 40, 300)])
    assert all(health[: len(bench.served["fine"].tokens)])
    assert bench.served["fine"].outcome == Outcome.COMPLETED


@pytest.mark.parametrize("why", ["no probe", "not wanted"])
def test_without_a_way_back_nobody_is_shut_out(why: str) -> None:
    settings = Recovery(failing_steps=0) if why == "not wanted" else Recovery(failing_steps=2)
    bench = Bench("fcfs", recovery=settings, probe=None if why == "no probe" else probe)
    broken = failing(bench, 8)
    assert len(broken.tries) == 8 and bench.driver.health().ok


def test_no_probes_while_the_server_shuts_down() -> None:
    bench = Bench("fcfs", recovery=Recovery(failing_steps=2), probe=probe)
    broken = failing(bench, 2)
    assert bench.driver.drain(0.0)
    bench.clock.advance_to(bench.clock.now_ns() + 60 * S)
    bench.driver.step()
    assert "probe" not in broken.tries


def test_a_breaker_counts_steps_in_a_row() -> None:
    breaker = Breaker(Recovery(failing_steps=2, probe_s=1.0))
    breaker.failed("a", START_NS)
    breaker.worked()
    breaker.failed("b", START_NS)
    assert not breaker.open and not breaker.reason and breaker.until_probe_ns(START_NS) is None
    breaker.failed("c", START_NS)
    assert breaker.open and breaker.reason.endswith("with c")
    assert breaker.until_probe_ns(START_NS + S // 4) == S * 3 // 4
    assert breaker.until_probe_ns(START_NS + 5 * S) == 0
    breaker.probed(START_NS + 5 * S)
    assert breaker.until_probe_ns(START_NS + 5 * S) == S
