"""Whether the waits that are told add up to the waits there were, for many simulated requests.

    python -m benchmarks.waits [--requests N] [--policy P] [--rate-scale X]

One card serves the first so many requests of the generated Azure conversations, recorded. How long each
waited is taken from the recorded batches alone: from its arrival, or from a decision that gave it nothing,
to the next that gave it something, or to its end. What `explain` tells is made from records and cutoffs.
The two may differ by one slot.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kaiseki.observe.explain import Kept, explain_story
from kaiseki.observe.recorder.layout import Kind
from kaiseki.observe.recorder.past import history_of, submitted
from kaiseki.observe.recorder.reading import Recording, read
from kaiseki.observe.recorder.share import steps
from kaiseki.policies.registry import load
from kaiseki.sim import cluster
from kaiseki.sim.run import Case, RecordTo, simulate
from kaiseki.work import classes
from kaiseki.work.catalogue import CATALOGUE
from kaiseki.work.shaping import Shape

CLUSTER = """
model: llama-3-8b
pools:
  - {name: main, card: a100-80, cards: 1, max_batch_size: 64, kv_blocks: 8000}
"""


def measured(recording: Recording) -> dict[int, int]:
    """Ns that each request waited, by arrival sequence, seen from the batches."""
    batches = {s.slot: set(s.seqs.tolist()) for s in steps(recording.frames)}
    since: dict[int, int] = {}
    total: dict[int, int] = {}
    before: set[int] = set()
    for frame in recording.frames:
        if frame.kind == Kind.OPENED:
            since.update((s.seq, s.request.arrival_ns) for s in submitted(frame.sections()))
        elif frame.kind == Kind.DECIDED:
            now = batches.get(frame.slot, set())
            for seq in now & since.keys():
                total[seq] = total.get(seq, 0) + frame.t_ns - since.pop(seq)
            since.update((seq, frame.t_ns) for seq in before - now)
            before = now
        elif frame.kind == Kind.ENDED:
            for ending in frame.sections()["endings"]:
                seq = int(ending["seq"])
                before.discard(seq)
                total.setdefault(seq, 0)
                if seq in since:
                    total[seq] += int(ending["ended_ns"]) - since.pop(seq)
    return total


def check(recording: Recording) -> dict[str, Any]:
    history, truth = history_of(recording), measured(recording)
    kept = Kept(history, of_many=True)
    longest_ms = max(s.took_ns for s in steps(recording.frames)) / 1e6
    worst, apart, waited, over = 0.0, 0.0, 0.0, 0
    for story in history.stories():
        if story.refusal is not None:
            continue
        told = explain_story(history, kept, story, recording.last_ns)
        parts = sum(w["ms"] for w in told["waits"])
        off = abs(told["total_wait_ms"] - truth[story.seq] / 1e6)
        worst, apart = max(worst, off), max(apart, abs(parts - told["total_wait_ms"]))
        over += off > longest_ms + 0.001
        waited += told["total_wait_ms"]
    return {
        "requests": len(truth), "slots": len(list(recording.of_kind(Kind.DECIDED))), "waited_s": waited / 1e3,
        "longest_slot_ms": longest_ms, "most_off_ms": worst, "off_by_more_than_a_slot": over,
        "parts_off_ms": apart,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--policy", default="kaiseki")
    parser.add_argument("--rate-scale", type=float, default=1.0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kaiseki-waits-"))
    workload = CATALOGUE["azure-conversation"]()
    case = Case(
        lambda shape: shape.apply(workload.stream(seed=1)),
        classes.load("mixed"),
        cluster.fleet(cluster.parse(CLUSTER)),
        Shape(rate_scale=options.rate_scale, requests=options.requests),
        record=RecordTo(folder, max(64.0, options.requests * 0.1)),
    )
    try:
        simulate(case, load(options.policy))
        found = check(read(folder)[0])
        print(json.dumps(found, indent=2))
        if found["off_by_more_than_a_slot"] or found["requests"] != options.requests:
            raise SystemExit(1)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
