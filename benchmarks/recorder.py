"""What the flight recorder costs, and whether it survives being killed.

    python -m benchmarks.recorder [--kills N] [--slots N] [--folder DIR]

Cost: thread CPU time of all recorder calls of a slot, with 256 requests running, 4,096 waiting and 4 arriving
and ending per slot, against the 1 ms that a slot lasts at 1,000 slots per second. Keyframes are stated apart:
what they take is spread over the slots between two of them. Kills: a process that does nothing but record is
killed at random moments; everything that it had told of must be readable, and every frame whole.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from tests.observe.recorder.crash import watch_and_kill

from kaiseki.bench.replica import CLOCK, Replica
from kaiseki.observe.recorder.flight import FlightRecorder
from kaiseki.policies.registry import load

SLOT_US = 1000.0
"""At 1,000 slots per second."""
CALLS = ("opened", "decided", "applied", "noted", "ended")


def cost(folder: Path, slots: int, running: int = 256, waiting: int = 4096, churn: int = 4) -> dict[str, Any]:
    replica = Replica(load("kaiseki"), running, slots + 400)
    replica.fill(running)
    replica.wait(waiting)
    for _ in range(200):
        replica.slot(churn)
    recorder = FlightRecorder.open(folder, replica.now, 256, {}, replica.scheduler)
    spent = dict.fromkeys(CALLS, 0)
    for name in CALLS:
        setattr(recorder, name, _timed(getattr(recorder, name), name, spent))
    replica.recorder = recorder
    each, whole, keyframes = [], [], []
    assert recorder.ring is not None
    begin = recorder.ring.offset
    for _ in range(slots):
        before = sum(spent.values())
        took = replica.slot(churn).total
        each.append((sum(spent.values()) - before) / 1e3)
        whole.append(took / 1e3)
        if recorder.due:
            now = CLOCK()
            recorder.keyframe(replica.now, replica.scheduler.life.slot)
            keyframes.append((CLOCK() - now) / 1e3)
    now = CLOCK()
    recorder.keyframe(replica.now, replica.scheduler.life.slot)
    keyframes.append((CLOCK() - now) / 1e3)
    slot_bytes = (recorder.ring.offset - begin) / slots
    between = recorder.ring.largest_bytes / slot_bytes
    recorder.close()
    p50 = float(np.percentile(each, 50))
    return {
        "running": running, "waiting": waiting, "churn": churn, "slots": slots,
        "us_per_slot": {"p50": p50, "p99": float(np.percentile(each, 99)), "mean": float(np.mean(each))},
        "us_by_call": {name: ns / 1e3 / slots for name, ns in spent.items()},
        "scheduler_us_per_slot_p50": float(np.percentile(whole, 50)),
        "bytes_per_slot": slot_bytes,
        "keyframe_us": {"p50": float(np.percentile(keyframes, 50)), "max": max(keyframes)},
        "keyframe_us_per_slot": float(np.mean(keyframes)) / between,
        "share_of_1_ms": (float(np.mean(each)) + float(np.mean(keyframes)) / between) / SLOT_US,
    }  # fmt: skip


def _timed(call: Callable[..., None], name: str, spent: dict[str, int]) -> Callable[..., None]:
    @wraps(call)
    def timed(*args: Any, **named: Any) -> None:
        begin = CLOCK()
        call(*args, **named)
        spent[name] += CLOCK() - begin

    return timed


def kills(folder: Path, many: int) -> dict[str, Any]:
    draw, newest, reads, began = random.Random(0), [], 0, time.monotonic()
    for i in range(many):
        looks = 3 if i % 10 == 0 else 0
        found, told = watch_and_kill(folder, draw.randint(1, 3000), looks)
        assert found >= told, f"killed at slot {told}, and only {found} can be read"
        newest.append(found)
        reads += looks
    return {
        "kills": many, "unreadable": 0, "torn": 0, "reads_while_written": reads,
        "slots_at_kill": {"min": min(newest), "max": max(newest)},
        "s": time.monotonic() - began,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=3000)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder when not given")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kaiseki-recorder-"))
    try:
        found = {"cost": cost(folder, options.slots)}
        if options.kills:
            found["crash"] = kills(folder, options.kills)
        print(json.dumps(found, indent=2))
    finally:
        if options.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
