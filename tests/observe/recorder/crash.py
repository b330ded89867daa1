"""A process that records and is killed, and what must be readable afterwards and meanwhile."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from kaiseki.observe.recorder.layout import Kind
from kaiseki.observe.recorder.reading import Frame, Recording, read
from kaiseki.observe.recorder.ring import Ring

SIZE_MB = 1
_FORK = multiprocessing.get_context("fork")


def record(path: Path, told: Connection) -> None:
    """Write slots whose numbers all follow from the slot, as fast as possible; tell every hundredth."""
    ring = Ring.in_file(path, SIZE_MB, 0)
    slot = 0
    while True:
        n = slot * 7919 % 600
        rows = np.full(n, slot, np.int32)
        ring.append(
            Kind.DECIDED, slot, 1000 * slot,
            b"", rows, rows, rows, np.zeros(n, np.bool_), b"", b"", b"",
        )  # fmt: skip
        if slot % 100 == 0:
            told.send(slot)
        slot += 1


def check(recording: Recording, live: bool = False) -> int:
    """Every frame is as it was written, and where one is missing this is told. The newest.

    A writer that does nothing else may fill the ring while it is copied: only `live` ones miss any.
    """
    slots = [frame.slot for frame in recording.frames]
    for before, slot, frame in zip([-1, *slots], slots, recording.frames, strict=False):
        _check(frame)
        assert frame.gap == (slot != before + 1 and before >= 0)
        assert live or not frame.gap
    return slots[-1] if slots else -1


def _check(frame: Frame) -> None:
    found = frame.sections()
    assert frame.t_ns == 1000 * frame.slot
    for name in ("rows", "tokens", "starts"):
        assert found[name].size == frame.slot * 7919 % 600
        assert (found[name] == frame.slot).all()


def watch_and_kill(folder: Path, slots: int, looks: int) -> tuple[int, int]:
    """Let a process record at least `slots`, read `looks` times meanwhile, kill it, and read again.

    Returns the newest slot that was read, and the last one that it told of before it was killed.
    """
    path = folder / "killed.ring"
    path.unlink(missing_ok=True)
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=record, args=(path, theirs), daemon=True)
    process.start()
    theirs.close()
    told, seen = -1, -1
    try:
        while told < slots:
            told = ours.recv()
        for _ in range(looks):
            now = check(read(path)[0], live=True)
            assert now >= seen, "what was there before is gone"
            seen = now
    finally:
        process.kill()
        process.join()
    try:
        while ours.poll():
            told = ours.recv()
    except (EOFError, OSError):  # it was killed while it told
        pass
    return check(read(path)[0]), told
