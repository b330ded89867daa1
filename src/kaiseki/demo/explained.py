"""Finds a request whose life says something about the scheduling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kaiseki.demo.attainment import Targets, attained
from kaiseki.demo.client import Answer, Clients
from kaiseki.demo.prompts import BATCH

LOOKED_AT = 12


async def find_instructive(
    clients: Clients, answers: Sequence[Answer], targets: Mapping[str, Targets]
) -> dict[str, Any] | None:
    """The explain document of a batch request that was preempted, else of one that waited longest.

    Requests that made it in spite of that come first.
    """
    batch = [a for a in answers if a.prompt.cls == BATCH and a.request_id]
    batch.sort(
        key=lambda a: (not attained(a, targets[BATCH]), not a.finished, -a.ttft_ms if a.finished else 0)
    )
    documents = [await clients.explain(BATCH, answer.request_id) for answer in batch[:LOOKED_AT]]
    known = [document for document in documents if document is not None]
    return max(known, key=_interest, default=None)


def _interest(document: Mapping[str, Any]) -> tuple[bool, bool, float]:
    preempted = any(entry.get("event") == "preempted" for entry in document.get("timeline", ()))
    return bool(document.get("attained")), preempted, float(document.get("total_wait_ms") or 0.0)
