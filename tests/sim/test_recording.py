"""Recorded simulations: explained, decided again, tried otherwise, and given to other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sim.loads import PLAN, load
from typer.testing import CliRunner, Result

from kaiseki.cli import app
from kaiseki.observe.recorder.layout import Kind
from kaiseki.observe.recorder.past import submitted
from kaiseki.observe.recorder.reading import Recording, read
from kaiseki.observe.recorder.share import steps
from kaiseki.observe.recorder.when import clock_of, moment_ns
from kaiseki.sim.whatif import Recorded, features_of

CLUSTER = """
model: llama-3-8b
pools:
  - {name: main, card: a100-80, cards: 1, kv_blocks: 600, max_batch_size: 8}
"""


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of 60 requests that wait for one another."""
    where = tmp_path_factory.mktemp("recorded")
    batch = load(60, rate_rps=30.0)
    (where / "cluster.yaml").write_text(CLUSTER)
    (where / "classes.yaml").write_text(PLAN)
    columns = batch.arrival_ns, batch.prompt_tokens, batch.output_tokens
    lines = [
        f'{{"timestamp": {at // 1_000_000}, "input_length": {n}, "output_length": {out}}}'
        for at, n, out in zip(*(c.tolist() for c in columns), strict=True)
    ]
    (where / "trace.jsonl").write_text("\n".join(lines) + "\n")
    done = run(
        "sim", where / "trace.jsonl", "--cluster", where / "cluster.yaml",
        "--classes", where / "classes.yaml", "--policy", "kaiseki", "--recorder", where, "--recorder-mb", 16,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return where


@pytest.fixture(scope="module")
def recording(folder: Path) -> Recording:
    return read(folder)[0]


def test_a_request_is_explained_from_the_recording(folder: Path) -> None:
    told = json.loads(run("explain", "30", "--recorder", folder, "--json").stdout)
    assert (told["request"], told["outcome"]) == ("30", "completed")
    assert told["timeline"][0]["event"] == "submitted" and told["timeline"][-1]["event"] == "finished"
    assert sum(w["ms"] for w in told["waits"]) == pytest.approx(told["total_wait_ms"], abs=0.01)
    shown = run("explain", "chatcmpl-30", "--recorder", folder).stdout
    assert shown.splitlines()[0] == told["summary"]


def test_a_slot_is_explained(folder: Path, recording: Recording) -> None:
    waiting = {f.slot: f.sections()["decision"][0]["waiting"] for f in recording.of_kind(Kind.DECIDED)}
    step = max(steps(recording.frames), key=lambda s: waiting[s.slot])
    told = json.loads(run("explain", "--slot", step.slot, "--recorder", folder, "--json").stdout)
    assert [c["tokens"] for c in told["chunks"]] == step.tokens.tolist()
    assert [c["kind"] == "decode" for c in told["chunks"]] == step.decodes.tolist()
    assert all(c["request"] is not None and c["tenant"] in ("acme", "labs") for c in told["chunks"])
    assert told["measured_ms"] == pytest.approx(step.took_ns / 1e6, abs=0.001)
    assert f"slot {step.slot} ran {int(step.decodes.sum())} decodes" in told["summary"]
    assert told["running"] == 8 and told["waiting"] > 0 and told["cutoffs"]
    assert told["summary"] in run("explain", "--slot", step.slot, "--recorder", folder).stdout


def test_who_used_a_tenants_share_is_told(folder: Path, recording: Recording) -> None:
    told = json.loads(run("explain", "--tenant", "labs", "--recorder", folder, "--json").stdout)
    shares = {s["tenant"]: s for s in told["shares"]}
    assert set(shares) == {"acme", "labs"}
    assert sum(s["share"] for s in shares.values()) == pytest.approx(1.0, abs=1e-3)
    assert (shares["acme"]["entitled"], shares["labs"]["entitled"]) == (0.75, 0.25)
    took = sum(s.took_ns for s in steps(recording.frames)) / 1e6
    assert told["card_ms"] == pytest.approx(took, rel=1e-6)
    assert shares["acme"]["requests"] + shares["labs"]["requests"] == 60
    # Charged by the scheduler itself, which splits by its own model.
    charged = {"acme": 0.0, "labs": 0.0}
    opened = [s for f in recording.of_kind(Kind.OPENED) for s in submitted(f.sections())]
    names = {s.seq: s.request.tenant for s in opened}
    for frame in recording.of_kind(Kind.ENDED):
        for ending in frame.sections()["endings"]:
            charged[names[int(ending["seq"])]] += float(ending["service_ns"]) / 1e6
    for name, ms in charged.items():
        assert shares[name]["card_ms"] == pytest.approx(ms, rel=0.15)


def test_a_span_of_time_is_respected(folder: Path, recording: Recording) -> None:
    middle = (recording.first_ns + recording.last_ns) // 2
    halves = []
    for option in ("--to", "--from"):
        found = run(
            "explain", "--tenant", "acme", option, clock_of(recording, middle), "--recorder", folder, "--json"
        )
        halves.append(json.loads(found.stdout)["slots"])
    assert min(halves) > 0 and sum(halves) == len(list(steps(recording.frames)))
    assert moment_ns(clock_of(recording, middle), recording) == pytest.approx(middle, abs=1e6)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["nobody"], 1, "nothing is recorded of nobody"),
        (["--slot", "99999"], 1, "nothing is recorded of slot 99999"),
        (["--tenant", "nobody"], 1, "nothing is recorded of tenant nobody"),
        ([], 2, "give one of REQUEST_ID, --tenant and --slot"),
        (["30", "--slot", "3"], 2, "give one of"),
        (["30", "--from", "02:10"], 2, "--from and --to go with --tenant"),
        (["--tenant", "acme", "--from", "noon"], 2, "--from 'noon': must be a time of day"),
        (["30", "--url", "http://x"], 2, "either --url or --recorder"),
    ],
)
def test_what_cannot_be_told_is_said(folder: Path, args: list[str], code: int, says: str) -> None:
    result = run("explain", *args, "--recorder", folder)
    assert (result.exit_code, result.stdout) == (code, "") and says in result.stderr


def test_a_folder_without_a_recording_is_told(tmp_path: Path) -> None:
    for args in (("explain", "1", "--recorder"), ("replay",), ("record", "export", "--to", "perfetto")):
        result = run(*args, tmp_path)
        assert result.exit_code == 2 and "no recording" in result.stderr, args


def test_only_one_run_is_recorded(folder: Path, tmp_path: Path) -> None:
    result = run("sim", folder / "trace.jsonl", "--recorder", tmp_path)
    assert result.exit_code == 2 and "give one --policy" in result.stderr


def test_unchanged_it_comes_out_the_same(folder: Path) -> None:
    result = run("replay", folder, "--json")
    told = json.loads(result.stdout)
    assert result.exit_code == 0 and told["mismatches"] == [] and told["decisions"] > 100
    figures = told["policies"]["recorded"]
    assert figures["requests"] == figures["completed"] == 60
    assert set(figures["classes"]) == {"chat", "batch"} and set(figures["tenants"]) == {"acme", "labs"}
    assert "all the same again" in result.stderr


def test_the_same_policy_on_the_simulated_engine_fares_the_same(folder: Path, recording: Recording) -> None:
    """The step times follow from the recorded cost model, which is that of the recorded engine here."""
    recorded = Recorded(recording)
    again = recorded.under(recorded.policy, recorded.settings)
    assert again.endings.keys() == recorded.fared.endings.keys()
    for name, before in recorded.fared.endings.items():
        after = again.endings[name]
        assert (after.outcome, after.outputs) == (before.outcome, before.outputs)
        assert after.first_token_ns == pytest.approx(before.first_token_ns, abs=2e6)
        assert after.ended_ns == pytest.approx(before.ended_ns, abs=2e6)


def test_another_policy_and_setting_fare_otherwise(folder: Path) -> None:
    told = json.loads(run("replay", folder, "--policy", "fcfs", "--set", "max_batch_size=2", "--json").stdout)
    before, after = told["policies"]["recorded"], told["policies"]["fcfs"]
    assert after["requests"] == before["requests"] and after["attainment"] < before["attainment"]
    assert after["ttft_ms"]["p50"] > 2 * before["ttft_ms"]["p50"]
    missed = [c for c in told["changes"] if c["before"]["attained"] and not c["after"]["attained"]]
    gained = [c for c in told["changes"] if c["after"]["attained"] and not c["before"]["attained"]]
    lost = round((before["attainment"] - after["attainment"]) * 60)
    assert len(missed) - len(gained) == lost and all(c["policy"] == "fcfs" for c in told["changes"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("max_batch_size", "must be KEY=VALUE"),
        ("max_batch_size=many", "must be a number; it is 8 now"),
        ("fair=perhaps", "must be true or false"),
        ("speed=9", "there is no setting 'speed'"),
    ],
)
def test_a_wrong_setting_is_told(folder: Path, change: str, says: str) -> None:
    result = run("replay", folder, "--set", change)
    assert result.exit_code == 2 and says in result.stderr


def test_an_unknown_policy_is_told(folder: Path) -> None:
    result = run("replay", folder, "--policy", "fastest")
    assert result.exit_code == 2 and "'fastest' is not installed" in result.stderr


def test_features_are_counted_as_the_core_counts_them(recording: Recording) -> None:
    recorded = Recorded(recording)
    for step, (_, _, features) in zip(steps(recording.frames), recorded.replayed.steps, strict=True):
        assert features_of(step.starts, step.tokens, step.decodes) == pytest.approx(features)


def test_a_picture_for_perfetto(folder: Path, tmp_path: Path) -> None:
    told = json.loads(run("record", "export", folder, "--to", "perfetto", "--out", tmp_path, "--json").stdout)
    (path,) = told["files"]
    events: list[dict[str, Any]] = json.loads(Path(path).read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] in "be"]
    assert {e["id"] for e in spans} == {str(i) for i in range(60)}
    depth: dict[str, int] = {}
    for event in spans:  # each ends before the next begins
        depth[event["id"]] = depth.get(event["id"], 0) + (1 if event["ph"] == "b" else -1)
        assert depth[event["id"]] in (0, 1)
    assert not any(depth.values())
    assert {e["name"] for e in spans} >= {"waits", "prefill", "decode"}
    drawn = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] > 0 for e in drawn) and len(drawn) == len({e["name"] for e in drawn})


def test_tables_for_parquet(folder: Path, tmp_path: Path, recording: Recording) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    told = json.loads(run("record", "export", folder, "--to", "parquet", "--out", tmp_path, "--json").stdout)
    tables = {Path(path).name.split(".")[1]: pq.read_table(path).to_pydict() for path in told["files"]}
    assert set(tables) == {"requests", "slots", "chunks", "events", "cutoffs"}
    requests, chunks = tables["requests"], tables["chunks"]
    assert sorted(requests["request"], key=int) == [str(i) for i in range(60)]
    assert set(requests["outcome"]) == {"completed"}
    assert sum(tables["slots"]["tokens"]) == sum(chunks["tokens"])
    # Every prompt token that was not found in the cache, and every output token but the last, is computed.
    assert np.sum(chunks["tokens"]) == np.sum(requests["prompt"]) + np.sum(requests["outputs"]) - 60 - np.sum(
        requests["cached"]
    ) + np.sum(requests["recomputed"])
