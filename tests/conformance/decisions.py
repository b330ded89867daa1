"""Decisions of a few hundred random small runs, as digests: run as a script, once compiled and once not."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from random import Random

from tests.conformance.workloads import CLASSES
from tests.harness import BUILT_IN, MS, START_NS, Bench, Job, hashes, job, prompt_ids

from kaiseki.core.settings import SchedulerSettings


def run(seed: int) -> tuple[str, int]:
    """(digest of every decision, number of decisions) of one random run."""
    r = Random(seed)
    page = r.choice((2, 4))
    depth, placeholders = r.choice(((0, True), (1, True), (3, False)))
    settings = SchedulerSettings(
        max_batch_size=r.randint(1, 5),
        fairness_window=r.choice((1, 3, 100)),
        watermark_ratio=r.choice((0.5, 0.9)),
        quantum_tokens=r.choice((1, 4)),
        slo_lambda=r.choice((0.1, 10.0)),
    )
    policy = BUILT_IN[seed % len(BUILT_IN)]
    bench = Bench(policy, depth, placeholders, r.randint(12, 30), page, settings)
    jobs: list[Job] = []
    at = START_NS
    for n in range(r.randint(2, 6)):
        at += r.choice((0, MS, 10 * MS))
        length, outputs = r.randint(1, 30), r.randint(1, 8)
        ids = prompt_ids(r.randint(0, 1), r.choice((0, 8)), n, length)
        names = [f"r{n}", f"r{n}.1"] if r.random() < 0.3 else [f"r{n}"]
        tenant, cls = r.choice("abc"), r.choice(CLASSES)
        for k, name in enumerate(names):
            bench.prompts[name] = ids
            jobs.append(
                job(
                    name,
                    length,
                    outputs,
                    at,
                    at + r.randint(1, 40) * MS if r.random() < 0.2 else None,
                    r.randint(1, outputs),
                    tenant=tenant,
                    cls=cls,
                    block_hashes=hashes(ids, page),
                    fork_of=names[0] if k else None,
                )
            )
    bench.run(jobs)
    digest = hashlib.sha256()
    for d in bench.engine.decisions:
        for part in (d.rows, d.tokens, d.starts, d.samples, d.epochs, d.preempted, d.copies):
            digest.update(part.tobytes())
        digest.update(f"{d.slot} {d.predicted_ns} {d.bound_ns}".encode())
    return digest.hexdigest(), len(bench.engine.decisions)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    json.dump([run(seed) for seed in range(int(sys.argv[1]))], sys.stdout)
