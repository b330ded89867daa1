"""Random workloads: everything that clients and engines may do to a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st
from tests.harness import MS, START_NS, Bench, Job, hashes, job, prompt_ids

from kaiseki.core.requests import OnLate, ServiceClass
from kaiseki.core.settings import SchedulerSettings

CLASSES = (
    ServiceClass(),
    ServiceClass("chat", ttft_ns=40 * MS, tbt_ns=6 * MS, weight=4.0, tier=0),
    ServiceClass("strict", ttft_ns=25 * MS, tbt_ns=4 * MS, weight=8.0, tier=-1, on_late=OnLate.EXPIRE),
    ServiceClass("batch", deadline_ns=300 * MS, weight=1.0, tier=2, on_late=OnLate.EXPIRE),
    ServiceClass("loose", ttft_ns=400 * MS, tbt_ns=50 * MS, weight=1.0, tier=1, on_late=OnLate.KEEP),
)


@dataclass(slots=True)
class Workload:
    """Jobs with their prompts, and the sizes of everything."""

    jobs: list[Job]
    prompts: dict[str, list[int]]
    blocks: int
    block_tokens: int
    settings: SchedulerSettings

    def bench(self, policy: str, depth: int, placeholders: bool) -> Bench:
        """A bench for this workload, audited after every slot."""
        bench = Bench(
            policy,
            depth,
            placeholders,
            self.blocks,
            self.block_tokens,
            self.settings,
            audit=True,
        )
        bench.prompts = self.prompts
        return bench


@st.composite
def workloads(draw: st.DrawFn, most_jobs: int = 12) -> Workload:
    """Prompts, outputs, tenants, classes, forks, shared prefixes, cancels and failures, in a tiny pool."""
    page = draw(st.sampled_from((2, 4)))
    blocks = draw(st.integers(5, 40))
    settings = SchedulerSettings(
        max_batch_size=draw(st.integers(1, 6)),
        fairness_window=draw(st.sampled_from((1, 3, 100))),
        watermark_ratio=draw(st.sampled_from((0.5, 0.8, 1.0))),
        quantum_tokens=draw(st.sampled_from((1, 4, 8))),
        window=draw(st.sampled_from((1, 2, 64))),
        max_passes=draw(st.sampled_from((1, 64))),
        max_waiting=draw(st.sampled_from((0, 0, 0, 4))),
        slo_lambda=draw(st.sampled_from((0.1, 10.0))),
    )
    jobs: list[Job] = []
    prompts: dict[str, list[int]] = {}
    at = START_NS
    while len(jobs) < draw(st.integers(1, most_jobs)):
        n = len(jobs)
        at += draw(st.sampled_from((0, 0, MS, 5 * MS, 30 * MS)))
        length, outputs = draw(st.integers(1, 60)), draw(st.integers(1, 16))
        stops_at = draw(st.none() | st.integers(1, outputs))
        cancel_ns = draw(st.none() | st.none() | st.integers(0, 120 * MS).map(lambda d, at=at: at + d))
        breaks_at = draw(st.just(-1) | st.just(-1) | st.integers(0, length + outputs - 1))
        shared = draw(st.sampled_from((0, 8, 40)))
        ids = prompt_ids(draw(st.integers(0, 1)), shared, n, length)
        first = job(
            f"r{n}",
            length,
            outputs,
            at,
            cancel_ns,
            stops_at,
            seed=n,
            breaks_at=breaks_at,
            retryable=draw(st.booleans()),
            tenant=draw(st.sampled_from("abc")),
            cls=draw(st.sampled_from(CLASSES)),
            priority=draw(st.integers(-1, 1)),
            block_hashes=hashes(ids, page) if draw(st.booleans()) else (),
        )
        prompts[first.request.id] = ids
        jobs.append(first)
        for fork in range(draw(st.sampled_from((0, 0, 0, 1, 2)))):
            name = f"r{n}.{fork}"
            sibling = job(
                name,
                length,
                outputs,
                at + draw(st.sampled_from((0, 0, 8 * MS))),
                draw(st.none() | st.integers(at, at + 120 * MS)),
                draw(st.none() | st.integers(1, outputs)),
                seed=100 + 10 * n + fork,
            )
            request = replace(
                first.request,
                id=name,
                fork_of=first.request.id,
                arrival_ns=sibling.request.arrival_ns,
                min_tokens=sibling.request.min_tokens,
            )
            jobs.append(replace(sibling, request=request))
            prompts[name] = ids
    return Workload(jobs, prompts, blocks, page, settings)
