"""Decodes of an engine with pipeline stages: each slot takes its part of them, so that no stage idles."""

from __future__ import annotations

import numpy as np

from kaiseki.core.scan import BLOCKED, BOUND_DECODE, CONTEXT, DECODE, GROWTH, IDLE, N_BOUND, N_DECODES, Scan
from kaiseki.core.table import RequestTable


def leave_to_later_slots(found: Scan, table: RequestTable, depth: int, block: int) -> None:
    """Take out of a scan the decodes that are more than a slot's part of all.

    Where decisions in flight have disjoint rows, one that takes all decodes leaves nothing to those after it:
    the rows go through the pipeline together, and all stages but one idle. So a slot takes a
    (depth + 1)-th, those whose last token is oldest.

    Args:
        found: what running rows can do; changed in place.
        table: the request table.
        depth: how many decisions may be in flight beyond the one being executed.
        block: tokens per KV block.
    """
    kind, counts = found.found["kind"], found.counts
    decodes = np.flatnonzero((kind == DECODE) | (kind == BOUND_DECODE))
    flying = found.rows[kind == BLOCKED]
    everybody = decodes.size + int((table.outputs[flying] > 0).sum())
    most = -(-everybody // (depth + 1))
    if decodes.size <= most:
        return
    rows = found.rows[decodes]
    later = decodes[np.lexsort((table.seq[rows], table.last_token_ns[rows]))[most:]]
    rows = found.rows[later]
    computed = table.computed[rows]
    counts[N_DECODES] -= later.size
    counts[N_BOUND] -= int((kind[later] == BOUND_DECODE).sum())
    counts[CONTEXT] -= int(computed.sum())
    counts[GROWTH] -= int(((computed % block == 0) | table.shared_tail[rows]).sum())
    kind[later] = IDLE
