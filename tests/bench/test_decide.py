"""What a slot costs: the load is what it says, everything is included, targets are judged."""

from __future__ import annotations

import json
import sys
import textwrap
from types import FrameType

import numpy as np
import pytest
from typer.testing import CliRunner

from kaiseki.bench import decide as bench
from kaiseki.bench import scheduler_peer
from kaiseki.bench.decide import Sizes, run
from kaiseki.bench.peer import PeerFailed
from kaiseki.bench.profiling import profile_slots
from kaiseki.bench.replica import BATCH, OLDEST_NS, TENANTS, Replica
from kaiseki.cli import app
from kaiseki.core.reasons import Event, Outcome
from kaiseki.core.table import State
from kaiseki.memory.layout import COUNT
from kaiseki.observe.explain import MOST_TOLD
from kaiseki.policies.registry import load

SIZES = Sizes(
    (2, 8), running=8, waiting=40, churn=2, queues=(20, 60), replicas=2, each=4, slots=10, warm_up=3
)
PERCENTILES = {"p50", "p90", "p99", "mean", "max"}


def replica(running: int = 8, waiting: int = 40) -> Replica:
    made = Replica(load("kaiseki"), running, 50)
    made.fill(running)
    made.wait(waiting)
    return made


def test_the_load_stays_what_it_is() -> None:
    made = replica()
    open_before = made.scheduler.table.open_rows
    for _ in range(20):
        cost = made.slot(2)
        assert cost.arrivals == 2 and cost.chunks == 8
        assert min(cost.submit, cost.decide, cost.apply) > 0
        assert made.scheduler.table.open_rows == open_before
    made.scheduler.kv.check()


def test_a_slot_includes_all_that_a_server_does() -> None:
    made = replica()
    bins, history, pool = made.bins, made.history, made.scheduler.kv
    before = pool.stats().allocations
    events = history.records.read().size
    for _ in range(20):
        made.slot(2)
    assert pool.stats().allocations > before
    with bins.reading():
        assert bins.ended.sum() == 40
    assert bins.slot.counts.sum() == bins.decide.counts.sum() >= 20
    assert bins.ttft.counts.sum() > 8 and bins.gap.counts.sum() > 100
    kinds = set(history.records.read()["event"][events:].tolist())
    assert {int(Event.SUBMITTED), int(Event.ADMITTED), int(Event.FIRST_TOKEN), int(Event.FINISHED)} <= kinds
    assert history.cutoffs.read().size and history.slots.read().size >= 20
    stories = list(history._stories.values())
    rows = made.scheduler.table.running_rows()
    assert (pool._chains.requests[rows, COUNT] >= 4).all(), "prompts come with the digests of their blocks"
    ended = [story.ending for story in stories if story.ending is not None]
    assert len(ended) == 40 and {e.outcome for e in ended} == {Outcome.COMPLETED}


def test_a_crowd_is_queued_as_if_it_had_been_submitted() -> None:
    made = replica(waiting=0)
    made.crowd(50)
    s, t = made.scheduler, made.scheduler.table
    rows = np.flatnonzero(t.state == State.WAITING)
    assert len(s.waiting) == rows.size == 50 and s.waiting.tokens == 50 * 64
    assert t.open_rows == len(s.life.ids) == 58
    assert len(set(t.seq[rows].tolist())) == 50
    counted = np.bincount(t.tenant[t.state != State.FREE], minlength=TENANTS)
    assert s.fairness.open_requests.tolist() == counted.tolist()
    one = made.arrivals(1, OLDEST_NS)[0]._replace(cls=BATCH)
    made.submit([one])
    row = s.life.ids[f"r{s.life._next_seq - 1}"]
    queued = [r for r in rows if t.tenant[r] == t.tenant[row]]
    keys = s.waiting.keys(np.array([row, *queued], np.int32))
    due = t.arrival_ns[[row, *queued]].argsort()
    assert keys.argsort().tolist() == due.tolist(), "keys are those that submit gives"
    for _ in range(20):
        made.slot(2)
    s.kv.check()


def calls_to_explain(waiting: int, slots: int) -> int:
    made = replica(waiting=0)
    made.crowd(waiting)
    one = made.wait_among_them()
    for _ in range(slots):
        made.slot(2)
    calls = 0

    def count(frame: FrameType, event: str, of: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        told, took_ns = made.explain(one)
    finally:
        sys.setprofile(None)
    assert took_ns > 0 and told["outcome"] == "open" and told["total_wait_ms"] > 0
    assert {w["reason"] for w in told["waits"]} <= {"slot_running", "no_row", "behind", "lane_share"}
    return calls


def test_explaining_one_takes_the_same_work_however_many_wait_and_however_long() -> None:
    assert calls_to_explain(20_000, 30) <= calls_to_explain(50, 30) + 20
    assert calls_to_explain(2_000, 400) <= 25 * MOST_TOLD


def test_all_cases_are_measured() -> None:
    document = run(sizes=SIZES)
    shapes = [(c["replicas"], c["running"], c["churn"]) for c in document["cases"]]
    assert shapes == [(1, 2, 0), (1, 8, 0), (1, 8, 2), (1, 8, 2), (1, 8, 2), (2, 4, 1)]
    waiting = [c["waiting"] for c in document["cases"]]
    assert waiting[:2] == [0, 0] and waiting[4] - waiting[3] == 40
    for case in document["cases"]:
        for key in ("decide_us", "apply_us", "slot_us", "total_us"):
            assert set(case[key]) == PERCENTILES and case[key]["p50"] > 0
        assert (case["submit_us"] is None) == (case["churn"] == 0)
        assert case["total_us"]["mean"] >= case["slot_us"]["mean"]
    assert set(document["explain_ms"]) == PERCENTILES
    assert document["targets"][-1]["found"] == document["explain_ms"]["max"] > 0
    assert document["queue_growth_1k_to_1m"] > 0 and document["peer"] is None and document["profile"] == []
    assert [t["ok"] for t in document["targets"]] == [
        t["found"] >= t["target"] if "decisions" in t["name"] else t["found"] <= t["target"]
        for t in document["targets"]
    ]


def test_the_profile_has_what_is_measured_and_not_the_load() -> None:
    rows = profile_slots(replica(), 2, slots=10, top=1000)
    named = {row["function"].split(" ")[-1]: row for row in rows}
    assert named["chain_hashes"]["calls"] == 2 and named["decide"]["us"] >= named["decide"]["own_us"]
    assert {"apply", "report_slot", "drain"} <= set(named)
    load = [row for row in rows if row["function"].startswith("bench/")]
    assert not any(row["function"].endswith((" step", " arrivals")) for row in load)
    assert [row["own_us"] for row in rows] == sorted((row["own_us"] for row in rows), reverse=True)


PEER = """
    import json, sys
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        n = json.loads(line)["slots"]
        answer = {"schedule_us": [6e6] * n, "update_us": [4e6] * n, "submit_us": [1e6] * n}
        print(json.dumps(answer | {"name": "slow", "running": 8, "waiting": 40}), flush=True)
"""


def test_a_peer_takes_turns_and_its_ratio_is_told(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "peer.py"
    script.write_text(textwrap.dedent(PEER))
    monkeypatch.setattr(scheduler_peer, "SCRIPTS", {"slow": script})
    main, peer, _ = bench.measure_main(load("kaiseki"), f"slow:{sys.executable}", False, SIZES)
    assert peer is not None and peer["slots"] == bench.ROUNDS
    assert peer["total_us"]["p50"] == 12e6
    assert peer["ratio"] == pytest.approx(10e6 / main["slot_us"]["p50"])
    assert peer["ratio_total"] == pytest.approx(12e6 / main["total_us"]["p50"])
    script.write_text("raise SystemExit('no such scheduler')")
    with pytest.raises(PeerFailed, match="no such scheduler"):
        bench.measure_main(load("kaiseki"), f"slow:{sys.executable}", False, SIZES)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "Sizes", lambda slots: SIZES)


def test_the_command_prints_json_and_nothing_else(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TARGET_P50_US", 1e9)
    monkeypatch.setattr(bench, "TARGET_P99_US", 1e9)
    monkeypatch.setattr(bench, "TARGET_GROWTH", 1e9)
    monkeypatch.setattr(bench, "TARGET_DECISIONS_PER_S", 0.0)
    monkeypatch.setattr(bench, "TARGET_EXPLAIN_MS", 1e9)
    result = CliRunner().invoke(app, ["bench", "decide", "--policy", "fcfs", "--profile", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["policy"] == "fcfs" and document["profile"]


def test_a_missed_target_is_a_finding(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TARGET_P50_US", 0.0)
    result = CliRunner().invoke(app, ["bench", "decide"])
    assert result.exit_code == 1
    assert "missed" in result.stdout


@pytest.mark.parametrize("wrong", [["--policy", "nonesuch"], ["--peer", "abacus:x"]])
def test_wrong_usage(wrong: list[str], small: None) -> None:
    assert CliRunner().invoke(app, ["bench", "decide", *wrong]).exit_code == 2
