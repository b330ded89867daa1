"""Prefill in one cluster, decode in another, 5 to 50 ms apart."""

from __future__ import annotations

from collections.abc import Iterator

from kaiseki.policies.registry import load as policy
from kaiseki.sim import cluster as clusters
from kaiseki.sim.experiments.rows import Experiment, Row, percent
from kaiseki.sim.experiments.setting import CHATS, case_on, of_lengths, with_links, with_pools
from kaiseki.sim.run import simulate
from kaiseki.work.lengths import LogNormal

PROMPT, OUTPUT = LogNormal(1_000, 1.0, 50, 16_000), LogNormal(150, 0.8, 5, 1_000)
RPS = 4.0
GB_S = 12.5
"""100 Gb/s."""
DISTANCES_MS = (0.01, 5.0, 20.0, 50.0)
SLOTS_MS = (0.0, 10.0, 50.0)
"""What a slot lasts at least: 0 is as long as its step."""


def rows(requests: int) -> Iterator[Row]:
    """Distance alone, then with slots that are longer by themselves."""
    described, load = clusters.load("70b-4p-4d-h100"), of_lengths(PROMPT, OUTPUT, RPS)
    for distance_ms in DISTANCES_MS:
        far = with_links(described, gb_s=GB_S, latency_us=distance_ms * 1e3, feedback_us=distance_ms * 1e3)
        run = simulate(case_on(far, load, CHATS, requests), policy("kaiseki"))
        yield Row(f"{distance_ms:g} ms apart: attained, %", percent(run["attainment"]))
        yield Row(f"{distance_ms:g} ms apart: longest gap, ms", run["tbt_ms"]["max"])
        if distance_ms != DISTANCES_MS[-1]:
            continue
        for slot_ms in SLOTS_MS[1:]:
            slow = simulate(
                case_on(with_pools(far, host_ms=slot_ms), load, CHATS, requests), policy("kaiseki")
            )
            yield Row(
                f"{distance_ms:g} ms apart, {slot_ms:g} ms more per slot: attained, %",
                percent(slow["attainment"]),
            )
            yield Row(
                f"{distance_ms:g} ms apart, {slot_ms:g} ms more per slot: gap P50, ms", slow["tbt_ms"]["p50"]
            )


EXPERIMENT = Experiment(
    title="Clusters 5 to 50 ms apart: should slots be longer?",
    setting=(
        f"`70b-4p-4d-h100` with links of {GB_S:g} GB/s whose latency, and the age of what is known of "
        f"them, is the distance; {RPS:g} requests/s, `kaiseki`."
    ),
    differs=(
        "Nothing is reported: that slots of 10 to 50 ms suit such distances is a conjecture. Here replicas "
        "decide for themselves, so distance enters once per request, with its KV, and the length of a slot "
        "with every token."
    ),
    rows=rows,
    requests=200,
)
