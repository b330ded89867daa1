"""Entries: the running rows and waiting candidates of one slot, as offered a grant."""

from __future__ import annotations

import numpy as np

from kaiseki.core.costs import add_decode, predict_ns
from kaiseki.core.decision import F64, I32, I64
from kaiseki.core.jit import inlined, kernel
from kaiseki.core.limits import lacks_room
from kaiseki.core.protocols import F_DECODES
from kaiseki.core.requests import OnLate
from kaiseki.core.scan import (
    BOUND_DECODE,
    CONTEXT,
    DECODE,
    N_BOUND,
    N_DECODES,
    N_PREFILLS,
    PREFILL,
    latest_start_ns,
)
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
_KEEP = int(OnLate.KEEP)


def no_entries() -> Records:
    """An empty set."""
    return np.empty(0, ENTRY)


def joined(first: Records, second: Records) -> Records:
    """Both, one after the other (`np.concatenate` compares structured types field by field)."""
    out: Records = np.empty(first.size + second.size, ENTRY)
    out[: first.size] = first
    out[first.size :] = second
    return out


# Rows of the int32[N_SIFTED, n] that `sift` fills.
PLACES, ROWS, STARTS, ENDS, NEW_ROWS, NEW_STARTS, NEW_PLACES, TURNED, WARM = range(9)
N_SIFTED = 9


@kernel
def sift(records: Records, entries: Records, out: I32) -> tuple[int, int, int, int, int]:
    """Sort entries out: those with a chunk, waiting rows among them, and waiting rows without one.

    Fills `out`: places, rows and positions [start, end) of the first; rows, starts and places of the second;
    rows of the third, and of those among them whose cached prefix nobody holds. Returns how many of each, and
    how many of the second have no KV but what is cached.
    """
    n, n_new, n_turned, n_warm, plain = 0, 0, 0, 0, 0
    for i in range(entries.size):
        entry = entries[i]
        r = entry["row"]
        if entry["chunk"] > 0:
            out[PLACES, n] = i
            out[ROWS, n] = r
            out[STARTS, n] = entry["start"]
            out[ENDS, n] = entry["start"] + entry["chunk"]
            n += 1
            if entry["waiting"]:
                out[NEW_ROWS, n_new] = r
                out[NEW_STARTS, n_new] = entry["start"]
                out[NEW_PLACES, n_new] = i
                n_new += 1
                plain += entry["parent"] == NO_ROW and not records[r]["brought"]
        elif entry["waiting"]:
            out[TURNED, n_turned] = r
            n_turned += 1
            if entry["pins"] > 0:
                out[WARM, n_warm] = r
                n_warm += 1
    return n, n_new, n_turned, n_warm, plain


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


@kernel
def lay_out(
    records: Records,
    found: Records,
    counts: I64,
    block: int,
    new: Records,
    planes: F64,
    crowd: F64,
    out: Records,
) -> float:
    """Entries of running rows (see `fill_running`), and those of waiting ones behind them.

    `crowd`: float64[N_FEATURES] of zeros, filled for all decodes. Returns how long these would take, ns.
    """
    decodes = counts[N_DECODES]
    fill_running(records, found, block, counts[N_BOUND], decodes, out)
    at = decodes + counts[N_PREFILLS]
    for i in range(new.size):
        out[at + i] = new[i]
    if decodes > 0:
        add_decode(crowd, float(counts[CONTEXT] + decodes))
        crowd[F_DECODES] = decodes
    return predict_ns(planes, crowd)


@kernel
def fill_waiting(
    records: Records, rows: I32, cached: I32, block: int, max_passes: int,
    now: int, slot_ns: float, token_ns: float, decode_ns: float, out: Records,
) -> int:  # fmt: skip
    """Entries of waiting rows; `cached` is what `KVSpace.cached_tokens` says of them.

    Who was passed over `max_passes` times is overdue. Returns how many can't meet their SLO any more, though
    that is of consequence to them.
    """
    hopeless = 0
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
        late = latest_start_ns(row, known - start, slot_ns, token_ns, decode_ns) < now
        hopeless += late and not row["demoted"] and row["on_late"] != _KEEP
        if forks:
            records[parent]["shared_tail"] = True  # its next write may need a copy, too
            entry["parent"] = parent
            entry["copy"] = start % block != 0
        else:
            entry["pins"] = cached[i, 1]
        if row["brought"]:
            continue  # it holds what it needs
        entry["whole"] = (known + block - 1) // block - (start + block - 1) // block + entry["copy"]
    return hopeless


def waiting_entries(
    table: RequestTable, rows: I32, cached: I32, block: int, max_passes: int,
    now: int, rates: tuple[float, float, float],
) -> tuple[Records, int]:  # fmt: skip
    """ENTRY[n] of waiting candidates, and how many of these are hopeless; see `fill_waiting`."""
    out: Records = np.empty(rows.size, ENTRY)
    return out, fill_waiting(table.records, rows, cached, block, max_passes, now, *rates, out)
