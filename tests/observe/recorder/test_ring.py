"""The ring: what is read is what was written, whole or not at all."""

from __future__ import annotations

import errno
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.observe.recorder.crash import watch_and_kill

from kaiseki.observe.recorder import layout, ring
from kaiseki.observe.recorder.layout import PAGE_BYTES, SECTIONS, VERSION, Kind
from kaiseki.observe.recorder.reading import Recording, UnreadableRecording, read
from kaiseki.observe.recorder.ring import Ring


def written(sizes: list[int], size_mb: float = 1 / 16) -> tuple[Ring, list[bytes]]:
    """A ring with one frame per size, and what is in them."""
    made = Ring.in_memory(size_mb, 0)
    texts = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    for i, text in enumerate(texts):
        assert made.append(Kind.CALLED, i, i, np.array([i], np.int32), b"", b"", text)
    return made, texts


SIZES = st.lists(st.integers(0, 9000), max_size=60)


@given(sizes=SIZES)
def test_the_newest_frames_are_read_as_they_were_written(sizes: list[int]) -> None:
    made, texts = written(sizes)
    frames = Recording(made.copy()).frames
    assert [f.slot for f in frames] == list(range(len(texts)))[len(texts) - len(frames) :]
    assert not any(f.gap for f in frames)
    for frame in frames:
        assert frame.sections()["text"].tobytes() == texts[frame.slot]
    if sum(sizes) + 200 * len(sizes) < (1 << 16):
        assert len(frames) == len(texts)
    if len(sizes) > 20:
        assert len(frames) >= 5


DAMAGE = st.lists(st.tuples(st.integers(0, (1 << 16) - 1), st.integers(1, 255)), max_size=9)


@given(sizes=SIZES, damage=DAMAGE)
def test_a_damaged_frame_is_not_read_and_leaves_a_gap(
    sizes: list[int], damage: list[tuple[int, int]]
) -> None:
    made, texts = written(sizes)
    data = made.copy()
    before = [f.slot for f in Recording(data.copy()).frames]
    for at, flip in damage:
        data[PAGE_BYTES + at] ^= flip
    frames = Recording(data).frames
    for frame in frames:
        assert frame.sections()["text"].tobytes() == texts[frame.slot]
    assert {f.slot for f in frames} <= set(before)
    for earlier, later in pairwise(frames):
        assert later.gap == (later.slot != earlier.slot + 1)


def test_a_frame_counts_once_its_checksum_is_there() -> None:
    """Which is written last, so a writer that is stopped before leaves what was there before."""
    made, _ = written([100, 100])
    data = made.copy()
    data[PAGE_BYTES : PAGE_BYTES + layout.COMMIT.size] = 0
    assert [f.slot for f in Recording(data).frames] == [1]


def test_a_frame_that_would_fill_the_ring_is_left_out() -> None:
    made, _ = written([10])
    assert not made.append(Kind.CALLED, 1, 1, np.array([1], np.int32), b"", b"", bytes(made.largest_bytes))
    assert [f.slot for f in Recording(made.copy()).frames] == [0]


@pytest.mark.parametrize("laps", [0, 3])
def test_a_killed_process_leaves_what_it_had_written(tmp_path: Path, laps: int) -> None:
    for _ in range(5):
        newest, told = watch_and_kill(tmp_path, 300 + 250 * laps, looks=0)
        assert newest >= told > 0


def test_a_reader_of_a_live_file_sees_only_whole_frames(tmp_path: Path) -> None:
    newest, _ = watch_and_kill(tmp_path, 1000, looks=30)
    assert newest > 1000


def test_the_recording_of_the_last_run_is_kept(tmp_path: Path) -> None:
    for run in (1, 2, 3):
        made = Ring.in_file(tmp_path / "r.ring", 1, 0)
        made.append(Kind.CALLED, run, 0, np.array([1], np.int32), b"", b"", b"")
        made.close()
    assert [(r.name, r.frames[0].slot) for r in read(tmp_path)] == [("r", 3), ("r.previous", 2)]


def test_two_processes_never_write_to_one_file(tmp_path: Path) -> None:
    made = Ring.in_file(tmp_path / "r.ring", 1, 0)
    with pytest.raises(BlockingIOError, match=r"r\.ring is being written by another process"):
        Ring.in_file(tmp_path / "r.ring", 1, 0)
    assert made.append(Kind.CALLED, 7, 0, np.array([1], np.int32), b"", b"", b"")
    assert [f.slot for f in read(tmp_path)[0].frames] == [7]


def test_a_full_disk_shows_when_the_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ring.os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Ring.in_file(tmp_path / "r.ring", 1, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a recording"),
        (b"GIF89a" * 1000, "not a recording"),
        (layout.FILE_MAGIC + bytes([VERSION + 1]) + bytes(8000), f"reads version {VERSION}"),
        (layout.FILE_MAGIC + bytes([VERSION, 0, 0, 0, 1, 1, 1, 1, 0, 0, 9]) + bytes(8000), "cut short"),
    ],
)
def test_what_is_no_recording_is_told(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "x.ring").write_bytes(data)
    with pytest.raises(UnreadableRecording, match=says):
        read(tmp_path)


def test_an_empty_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRecording, match="no recording"):
        read(tmp_path)


def test_a_change_of_the_format_is_a_new_version() -> None:
    """Recordings are read by other versions and by other people's tools: see docs/recorder.md."""
    told = {
        kind.name: " ".join(f"{name}:{dtype.itemsize}" for name, dtype in sections)
        for kind, sections in SECTIONS.items()
    }
    assert VERSION == 1
    assert told == {
        "KEYFRAME": "about:1 requests:57 texts:1 cutoffs:49 state:1",
        "OPENED": "requests:57 texts:1 digests:1",
        "REFUSED": "requests:57 texts:1",
        "DECIDED": "decision:56 rows:4 tokens:4 starts:4 samples:1 preempted:4 records:42 cutoffs:49",
        "APPLIED": "step:24 new_tokens:4 finish:1 failed:1 retryable:1",
        "NOTED": "records:42",
        "ENDED": "endings:93",
        "CALLED": "call:4 rows:4 values:8 text:1",
    }
