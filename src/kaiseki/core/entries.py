"""Entries: the running rows and waiting candidates of one slot, as offered a grant."""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import I32
from kaiseki.core.jit import inlined, kernel
from kaiseki.core.limits import lacks_room
from kaiseki.core.scan import BOUND_DECODE, DECODE, N_BOUND, N_DECODES, N_PREFILLS, PREFILL, Scan
from kaiseki.core.table import NO_ROW, Record, Records, RequestTable, State

ENTRY = np.dtype(
    [
        ("row", np.int32),
        ("tenant", np.int32),
        ("group", np.int32),  # tenant * LANES + lane
        ("start", np.int32),  # position of the next token to compute, cached prefix included
        ("need", np.int32),  # tokens that could be computed now
        ("pins", np.int32),  # idle cached blocks that admitting it takes out of the free ones
        ("copy", np.int32),  # 1 when its next write may need one more block (copy-on-write)
        ("whole", np.int32),  # blocks its known text will need beyond those it holds (admission check)
        ("parent", np.int32),  # running row whose prompt it shares, or NO_ROW
        ("adapter", np.int32),  # of a waiting row, -1 for none
        ("chunk", np.int32),  # result: granted tokens
        ("reason", np.int32),  # result: why, a value of `Reason`
        ("short", np.float64),  # result: by how much it missed, in the reason's unit
        ("decode", np.bool_),  # it computes one token after its prompt
        ("bound", np.bool_),  # a decode whose TBT bounds the slot
        ("waiting", np.bool_),  # it does not run yet
        ("overdue", np.bool_),  # it waits, and was passed over too often
        ("load", np.bool_),  # result: its adapter is loaded for it
        ("open", np.bool_),  # no final answer yet (used while filling)
    ],
    align=True,
)

_RUNNING = int(State.RUNNING)


def no_entries() -> Records:
    """An empty set."""
    return np.empty(0, ENTRY)


def joined(first: Records, second: Records) -> Records:
    """Both, one after the other (`np.concatenate` compares structured types field by field)."""
    out: Records = np.empty(first.size + second.size, ENTRY)
    out[: first.size] = first
    out[first.size :] = second
    return out


@kernel
def sift(entries: Records, granted: Records, admitted: I32, turned: I32) -> tuple[int, int, int]:
    """Sort entries out: those with a chunk, waiting rows among them, and waiting rows without one.

    Returns how many of each.
    """
    n, n_new, n_turned = 0, 0, 0
    for i in range(entries.size):
        if entries[i]["chunk"] > 0:
            granted[n] = entries[i]
            n += 1
            if entries[i]["waiting"]:
                admitted[n_new] = n - 1
                n_new += 1
        elif entries[i]["waiting"]:
            turned[n_turned] = entries[i]["row"]
            n_turned += 1
    return n, n_new, n_turned


@kernel
def shut_out(entries: Records, out: I32) -> int:
    """Places of waiting entries that found no row or no room, in order. Returns how many."""
    n = 0
    for i in range(entries.size):
        entry = entries[i]
        if entry["waiting"] and entry["chunk"] == 0 and lacks_room(entry["reason"]):
            out[n] = i
            n += 1
    return n


@inlined
def _blank(entry: Record) -> None:
    entry["pins"] = 0
    entry["copy"] = 0
    entry["whole"] = 0
    entry["parent"] = NO_ROW
    entry["adapter"] = -1
    entry["chunk"] = 0
    entry["reason"] = 0
    entry["short"] = 0.0
    entry["decode"] = False
    entry["bound"] = False
    entry["waiting"] = False
    entry["overdue"] = False
    entry["load"] = False
    entry["open"] = True


@kernel
def fill_running(
    records: Records, found: Records, block: int, decode_at: int, prefill_at: int, out: Records
) -> None:
    """Entries of running rows that can do something: bound decodes, other decodes, prefills.

    `decode_at`, `prefill_at`: where the second and third kind begin in `out`.
    """
    bound_at = 0
    for i in range(found.size):
        kind = found[i]["kind"]
        if kind == BOUND_DECODE:
            at, bound_at = bound_at, bound_at + 1
        elif kind == DECODE:
            at, decode_at = decode_at, decode_at + 1
        elif kind == PREFILL:
            at, prefill_at = prefill_at, prefill_at + 1
        else:
            continue
        r = found[i]["row"]
        row, entry = records[r], out[at]
        _blank(entry)
        entry["row"] = r
        entry["tenant"] = row["tenant"]
        entry["group"] = row["group"]
        entry["start"] = row["computed"]
        entry["need"] = found[i]["need"]
        entry["copy"] = row["shared_tail"] and row["computed"] % block != 0
        entry["decode"] = kind != PREFILL
        entry["bound"] = kind == BOUND_DECODE


def running_entries(table: RequestTable, found: Scan, block: int) -> Records:
    """ENTRY[n] of running rows that can do something: bound decodes, other decodes, prefills."""
    counts = found.counts
    decodes = int(counts[N_DECODES])
    out: Records = np.empty(decodes + int(counts[N_PREFILLS]), ENTRY)
    fill_running(table.records, found.found, block, int(counts[N_BOUND]), decodes, out)
    return out


@kernel
def fill_waiting(records: Records, rows: I32, cached: I32, block: int, max_passes: int, out: Records) -> None:
    """Entries of waiting rows; `cached` is what `KVSpace.cached_tokens` says of them.

    Who was passed over `max_passes` times is overdue.
    """
    for i in range(rows.size):
        r = rows[i]
        row, entry = records[r], out[i]
        known = row["prompt"] + row["outputs"]
        parent = row["fork_of"]
        forks = False
        if parent != NO_ROW and row["outputs"] == 0:
            sibling = records[parent]
            forks = sibling["state"] == _RUNNING and sibling["confirmed"] >= row["prompt"]
        start = row["prompt"] - 1 if forks else cached[i, 0]
        _blank(entry)
        entry["row"] = r
        entry["tenant"] = row["tenant"]
        entry["group"] = row["group"]
        entry["start"] = start
        entry["need"] = known - start
        entry["adapter"] = row["adapter"]
        entry["waiting"] = True
        entry["overdue"] = row["passes"] >= max_passes
        if forks:
            records[parent]["shared_tail"] = True  # its next write may need a copy, too
            entry["parent"] = parent
            entry["copy"] = start % block != 0
        else:
            entry["pins"] = cached[i, 1]
        if row["brought"]:
            continue  # it holds what it needs
        entry["whole"] = (known + block - 1) // block - (start + block - 1) // block + entry["copy"]


def waiting_entries(table: RequestTable, rows: I32, cached: I32, block: int, max_passes: int) -> Records:
    """ENTRY[n] of waiting candidates; see `fill_waiting`."""
    out: Records = np.empty(rows.size, ENTRY)
    fill_waiting(table.records, rows, cached, block, max_passes, out)
    return out
