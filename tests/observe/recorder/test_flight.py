"""What is recorded: enough to explain every request as from memory, and to decide everything again."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.workloads import Workload, workloads
from tests.harness import MS, START_NS, Bench, Job, hashes, job

from kaiseki.core.settings import SchedulerSettings
from kaiseki.observe.explain import explain
from kaiseki.observe.recorder import state
from kaiseki.observe.recorder.flight import FlightRecorder
from kaiseki.observe.recorder.layout import Kind
from kaiseki.observe.recorder.past import history_of, submitted
from kaiseki.observe.recorder.reading import Recording, read
from kaiseki.observe.recorder.replay import NotReplayable, replay, starts


def recorded(bench: Bench, size_mb: float = 4) -> FlightRecorder:
    """Have a bench recorded from now on, in memory."""
    bench.audit = bench.engine.check = False
    recorder = FlightRecorder.in_memory(START_NS, size_mb, {}, bench.driver.scheduler, replayable=True)
    bench.driver.recorder = bench.driver._sessions._recorder = recorder
    return recorder


def recording_of(recorder: FlightRecorder) -> Recording:
    assert recorder.ring is not None
    return Recording(recorder.ring.copy())


def busy() -> Bench:
    """A bench with more to do than fits into its pool."""
    return Bench("kaiseki", 1, blocks=90, settings=SchedulerSettings(max_batch_size=16))


def jobs_of(bench: Bench, requests: int) -> list[Job]:
    """Prompts that share a prefix, cancels, failures that pass."""
    random, jobs = np.random.default_rng(7), []
    for i in range(requests):
        ids = list(range(96)) if i % 3 else list(range(i, i + 96))
        bench.prompts[f"r{i}"] = ids
        at = START_NS + i * 12 * MS
        jobs.append(
            job(
                f"r{i}", 96, int(random.integers(5, 60)), at, at + 200 * MS if i % 17 == 0 else None,
                block_hashes=hashes(ids, 16), retryable=True, breaks_at=50 if i % 23 == 0 else -1,
                tenant="ab"[i % 2],
            )
        )  # fmt: skip
    return jobs


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["kaiseki", "vtc"])
@given(work=workloads())
@settings(max_examples=8)
def test_the_recording_explains_as_memory_does_and_replays(policy: str, depth: int, work: Workload) -> None:
    bench = work.bench(policy, depth, True)
    recorder = recorded(bench)
    bench.run(work.jobs)
    recording = recording_of(recorder)
    history = history_of(recording)
    for name in bench.served:
        assert explain(history, name, 0) == explain(bench.driver.history, name, 0)
    again = replay(recording)
    assert again.mismatch is None and again.decisions == len(list(recording.of_kind(Kind.DECIDED)))


def test_a_replay_can_begin_in_the_middle() -> None:
    bench = busy()
    recorder = recorded(bench, 0.5)
    bench.run(jobs_of(bench, 200))
    recording = recording_of(recorder)
    assert recording.frames[0].offset > 0, "the beginning should have been overwritten"
    begins = list(starts(recording))
    assert len(begins) >= 2 and begins[0] > 0
    last = max(frame.slot for frame in recording.of_kind(Kind.DECIDED))
    for begin in begins:
        again = replay(recording, begin)
        assert again.mismatch is None
        assert (again.first_slot, again.last_slot) == (recording.frames[begin].slot, last)


def test_a_request_that_was_open_at_a_keyframe_is_known() -> None:
    bench = busy()
    recorder = recorded(bench, 0.5)
    bench.run([job("long", 20, 900, tenant="c"), *jobs_of(bench, 200)])
    recording = recording_of(recorder)
    opened = [s.request.id for f in recording.of_kind(Kind.OPENED) for s in submitted(f.sections())]
    assert "long" not in opened and "r199" in opened
    history = history_of(recording)
    assert explain(history, "r199", 0) == explain(bench.driver.history, "r199", 0)
    told = explain(history, "long", recording.last_ns)
    assert told is not None
    assert (told["tenant"], told["outcome"], told["output_tokens"]) == ("c", "completed", 900)


def test_another_decision_is_noticed() -> None:
    bench = busy()
    recorder = recorded(bench)
    bench.run(jobs_of(bench, 20))
    recording = recording_of(recorder)
    frame = list(recording.of_kind(Kind.DECIDED))[10]
    frame.sections()["tokens"][0] += 1
    again = replay(recording)
    assert again.mismatch == (frame.slot, "tokens") and again.last_slot == frame.slot


def test_what_was_overwritten_is_not_replayed_across() -> None:
    bench = busy()
    recorder = recorded(bench)
    bench.run(jobs_of(bench, 20))
    recording = recording_of(recorder)
    del recording.frames[20]
    recording.frames[20] = recording.frames[20].__class__(*_with_gap(recording.frames[20]))
    with pytest.raises(NotReplayable, match="damaged or overwritten after slot"):
        replay(recording)


def _with_gap(frame: object) -> list[object]:
    return [getattr(frame, name) if name != "gap" else True for name in frame.__slots__]  # type: ignore[attr-defined]


def test_nothing_of_a_prompt_is_recorded() -> None:
    """Its digests are: they are needed to decide again."""
    bench = Bench()
    recorder = recorded(bench)
    ids = [1_234_567] * 40
    bench.submit(job("secret", 40, 3, block_hashes=hashes(ids, 16)), ids)
    bench.run()
    assert recorder.ring is not None
    data = recorder.ring.copy().tobytes()
    assert hashes(ids, 16)[0] in data
    for width in ("<i4", "<i8"):
        assert np.array(ids[:2], width).tobytes() not in data


def test_a_folder_that_cannot_be_written_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        recorder = FlightRecorder.open(blocked, 0, 1)
    assert "nothing is recorded" in caplog.text and not recorder.on
    bench = Bench()
    bench.driver.recorder = bench.driver._sessions._recorder = recorder
    bench.run([job("r", 20, 3)])
    assert bench.driver.explain("r") is not None


def test_a_state_that_does_not_fit_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(blocks=50_000)
    with caplog.at_level(logging.WARNING):
        recorder = FlightRecorder.open(tmp_path, 0, 1, scheduler=bench.driver.scheduler)
    recorder.close()
    assert "too large for a recording of this size" in caplog.text
    (recording,) = read(tmp_path)
    assert [f.kind for f in recording.frames] == [Kind.KEYFRAME]
    with pytest.raises(NotReplayable, match="no keyframe holds"):
        replay(recording)


class Evil:
    def __reduce__(self) -> tuple:
        return (print, ("run from a file",))


@pytest.mark.parametrize("data", [pickle.dumps(Evil()), b"", b"\x80\x05garbage.", pickle.dumps([1])])
def test_a_state_from_elsewhere_runs_nothing(data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(state.UnreadableState):
        state.load(data)
    assert capsys.readouterr().out == ""


@given(at=st.integers(1, 40))
@settings(max_examples=5)
def test_a_scheduler_goes_on_from_its_state(at: int) -> None:
    bench = busy()
    bench.audit = bench.engine.check = False
    for j in jobs_of(bench, 30):
        bench.submit(j, bench.prompts[j.request.id])
    for _ in range(at):
        bench.driver.step()
    ours, theirs = bench.driver.scheduler, state.load(state.dump(bench.driver.scheduler))
    assert np.shares_memory(theirs.table.prompt, theirs.table.records)
    now = bench.driver.clock.now_ns()
    first, second = ours.decide(now), theirs.decide(now)
    assert first.rows.tolist() == second.rows.tolist() and first.tokens.tolist() == second.tokens.tolist()


def test_a_refused_request_may_have_asked_for_any_number() -> None:
    bench = Bench("fcfs")
    recorder = recorded(bench)
    bench.submit(job("r", 40, 2**70), list(range(40)))
    bench.driver.step()
    assert len(list(recording_of(recorder).of_kind(Kind.REFUSED))) == 1
