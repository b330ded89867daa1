"""KV between nodes: what a cap on transfers and head-room are good for."""

from __future__ import annotations

from collections.abc import Iterator

from kaiseki.policies.registry import load as policy
from kaiseki.sim import cluster as clusters
from kaiseki.sim.experiments.rows import Experiment, Row, change, percent
from kaiseki.sim.experiments.setting import CHATS, case_on, of_lengths, with_links
from kaiseki.sim.run import simulate
from kaiseki.work.lengths import LogNormal

PROMPT, OUTPUT = LogNormal(2_000, 1.0, 50, 30_000), LogNormal(150, 0.8, 5, 1_000)
RPS = 5.0
GB_S = 10.0
"""Of the link: little enough that prompts that end together are in each other's way."""


def rows(requests: int) -> Iterator[Row]:
    """As many transfers as like, against a few at a time."""
    described = with_links(clusters.load("70b-4p-4d-h100"), gb_s=GB_S)
    load = of_lengths(PROMPT, OUTPUT, RPS)
    kinds = {
        "uncapped": with_links(described, max_active=64, headroom=0.0),
        "at most 4": with_links(described, max_active=4, headroom=0.0),
        "one at a time": with_links(described, max_active=1, headroom=0.0),
        "at most 4, 30 % head-room": described,
    }
    found = {
        name: simulate(case_on(one, load, CHATS, requests), policy("kaiseki")) for name, one in kinds.items()
    }
    for name, run in found.items():
        link = next(iter(run["links"].values()))
        sent = link["transfer_ms"]
        yield Row(f"{name}: transfer P50, ms", None if sent is None else sent["p50"], 1.0)
        yield Row(f"{name}: transfer P99, ms", None if sent is None else sent["p99"])
        yield Row(f"{name}: gap P99, ms", run["tbt_ms"]["p99"])
        yield Row(f"{name}: most transfers at once", link["most_active"])
        yield Row(f"{name}: attained, %", percent(run["attainment"]))
    first, last = (found[name]["tbt_ms"]["max"] for name in ("one at a time", "uncapped"))
    yield Row("longest gap without a cap, change in %", change(last, first))


EXPERIMENT = Experiment(
    title="Prefill elsewhere: what happens when transfers are not capped?",
    setting=f"`70b-4p-4d-h100` with links of {GB_S:g} GB/s, {RPS:g} requests/s; feedback is 100 us old.",
    differs=(
        "The report's alarm at 1 ms is for a few blocks; the whole KV of a 2K prompt of this model is 0.65 "
        "GB and takes 65 ms. Transfers that share a link all end late, and "
        "hold blocks at both ends meanwhile."
    ),
    rows=rows,
)
