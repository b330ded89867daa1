"""Filling a slot: walk ordered entries and give each as much as time, tokens, rows, KV and fairness allow."""

from __future__ import annotations

import numpy as np

from kaiseki.core.adapters import ABSENT, HELD, IDLE, KEPT, OUT
from kaiseki.core.costs import add_decode, add_prefill, fit_prefill, predict_ns
from kaiseki.core.decision import F64, I32, I64
from kaiseki.core.fairness import HARD_LAG, charge
from kaiseki.core.jit import inlined, kernel
from kaiseki.core.lanes import LANES
from kaiseki.core.limits import (
    L_ADAPTERS,
    L_ADMISSION,
    L_BLOCKS,
    L_LOADING,
    L_ROWS,
    L_SOLE,
    L_STARVING,
    L_TOKENS,
    is_blocked,
)
from kaiseki.core.protocols import F_CONTEXT, F_DECODES, F_SLOT, N_FEATURES
from kaiseki.core.reasons import Reason
from kaiseki.core.reserving import reserve_for
from kaiseki.core.table import Record, Records

_SELECTED = int(Reason.SELECTED)
_NO_ROW = int(Reason.NO_ROW)
_NO_KV = int(Reason.NO_KV)
_WATERMARK = int(Reason.WATERMARK)
_NO_TIME = int(Reason.NO_TIME)
_NO_TOKENS = int(Reason.NO_TOKENS)
_FAIR_SHARE = int(Reason.FAIR_SHARE)
_LANE_SHARE = int(Reason.LANE_SHARE)
_BEHIND = int(Reason.BEHIND)
_DECODE_BOUND = int(Reason.DECODE_BOUND)
_NONE = int(Reason.NONE)
_ADAPTER = int(Reason.ADAPTER)

# Places in the float64 vector of rules.
R_HEADROOM, R_BOUND_NS, R_DECODES_NS, R_QUANTUM, R_BLOCK, R_CHUNKED = range(6)
R_STRICT, R_LAG, R_HARD_LAG, R_EXEMPT, R_LOAD_NS = range(6, 11)
N_RULES = 11


@inlined
def _blocks_between(start: int, end: int, block: int) -> int:
    return (end + block - 1) // block - (start + block - 1) // block


@inlined
def _least(counter: F64, more: I32, deep: I64, rows_left: bool, first: int, last: int) -> float:
    """The least of counter[first:last] among those that can still take a grant in this slot."""
    least = np.inf
    for t in range(first, last):
        if more[t] > 0 or (rows_left and deep[t] > 0):
            least = min(least, counter[t])
    return least


@inlined
def _decode_fits(entry: Record, features: F64, planes: F64, rules: F64, limits: F64) -> float:
    """Grant a decode its token, or leave it with the reason. A granted one is in `features`.

    Returns what the chunk set then takes, ns, or -1 where it does not fit.

    One whose TBT bounds the slot pauses only where the bare prediction says that its token would be late:
    the headroom guards against what might happen, and pausing makes the gap late for certain.
    """
    context = float(entry["start"] + 1)
    if limits[L_TOKENS] < 1:
        entry["reason"] = _NO_TOKENS
        entry["short"] = 1.0
        return -1.0
    room = limits[L_BLOCKS] - entry["copy"]
    if _blocks_between(entry["start"], entry["start"] + 1, int(rules[R_BLOCK])) > room:
        entry["reason"] = _NO_KV
        entry["short"] = 1.0 - min(room, 0.0)
        return -1.0
    alone = features[F_SLOT] == 0.0
    add_decode(features, context)
    ns = predict_ns(planes, features)
    if entry["bound"]:
        over = ns + limits[L_LOADING] - rules[R_DECODES_NS]
    else:
        over = ns * rules[R_HEADROOM] + limits[L_LOADING] - rules[R_BOUND_NS]
    if alone or over <= 0.0:
        entry["chunk"] = 1
        entry["reason"] = _SELECTED
        return ns
    features[F_DECODES] -= 1.0
    features[F_CONTEXT] -= context
    entry["reason"] = _DECODE_BOUND
    entry["short"] = over
    return -1.0


@inlined
def _load_ns(entry: Record, adapters: Records, rules: F64) -> float:
    """How long loading its adapter takes, if that is necessary."""
    if entry["adapter"] < 0:
        return 0.0
    standing = adapters[entry["adapter"]]["standing"]
    return float(rules[R_LOAD_NS]) if standing in (ABSENT, KEPT) else 0.0


@inlined
def _use_adapter(entry: Record, adapters: Records, rules: F64, limits: F64) -> None:
    """A granted waiting entry has its adapter from now on; if it has to be loaded, that takes time."""
    if entry["adapter"] < 0:
        return
    one = adapters[entry["adapter"]]
    if one["standing"] in (ABSENT, KEPT):
        entry["load"] = True
        limits[L_LOADING] += rules[R_LOAD_NS]
    if one["standing"] in (ABSENT, IDLE):
        limits[L_ADAPTERS] -= 1
    one["standing"] = HELD


@inlined
def _lacks_adapter(entry: Record, adapters: Records, limits: F64) -> bool:
    """Whether its adapter can't be had in this slot."""
    if entry["adapter"] < 0:
        return False
    standing = adapters[entry["adapter"]]["standing"]
    if standing == OUT:
        return True
    return bool(standing in (ABSENT, IDLE) and limits[L_ADAPTERS] < 1)


@inlined
def _admissible(entry: Record, adapters: Records, limits: F64) -> bool:
    """Whether a waiting entry may become a running one; the reason is noted where not."""
    if _lacks_adapter(entry, adapters, limits):
        entry["reason"] = _ADAPTER
        entry["short"] = 1.0
        return False
    if limits[L_ROWS] < 1:
        entry["reason"] = _NO_ROW
        entry["short"] = 1.0
        return False
    needs = entry["pins"] + entry["whole"]
    if needs > 0 and needs > limits[L_ADMISSION] and limits[L_SOLE] == 0.0:
        entry["reason"] = _WATERMARK
        entry["short"] = needs - limits[L_ADMISSION]
        return False
    return True


@inlined
def _on_grid(most: int, need: int, quantum: int, chunked: bool) -> int:
    """A chunk that does not complete its prompt, rounded down to the quantum."""
    if most >= need:
        return most
    if not chunked:
        return 0
    # A slot that holds few quanta would lose much by rounding: there the grid is a quarter as fine.
    grid = quantum if most >= 4 * quantum else max(quantum // 4, 1)
    return (most // grid) * grid


@inlined
def _prefill_chunk(
    entry: Record, features: F64, trial: F64, planes: F64, rules: F64, limits: F64, adapters: Records
) -> int:
    """Tokens that a prefill gets now; with 0 the reason and by how much it missed are noted."""
    alone = features[F_SLOT] == 0.0
    start, need = int(entry["start"]), int(entry["need"])
    quantum, block = int(rules[R_QUANTUM]), int(rules[R_BLOCK])
    if entry["waiting"] and not _admissible(entry, adapters, limits):
        return 0
    whole_alone = alone and rules[R_CHUNKED] == 0.0  # it would never run, were it held to the limits
    most = need if whole_alone else int(max(0.0, min(float(need), limits[L_TOKENS])))
    reason = _SELECTED if most == need else _NO_TOKENS
    if rules[R_BOUND_NS] < np.inf and not whole_alone:
        # Who was passed over too often may exceed the bound by a load, or a long one would never fit.
        loading = limits[L_LOADING] + (0.0 if entry["overdue"] else _load_ns(entry, adapters, rules))
        within = rules[R_BOUND_NS] / rules[R_HEADROOM] - loading
        fits = fit_prefill(planes, features, trial, start, most, within)
        if fits < most:
            most, reason = fits, _NO_TIME
    room = limits[L_BLOCKS] - entry["pins"] - entry["copy"]
    if _blocks_between(start, start + most, block) > room:
        most, reason = int((start + block - 1) // block + max(room, 0.0)) * block - start, _NO_KV
    if room >= 0:
        fitting = _on_grid(most, need, quantum, rules[R_CHUNKED] > 0.0)
        # A slot smaller than the grid would never give anything to anybody.
        most = most if fitting == 0 and alone and rules[R_CHUNKED] > 0.0 else fitting
    if most <= 0 and reason == _NO_TIME and rules[R_CHUNKED] > 0.0 and (alone or limits[L_STARVING] > 0):
        # Nothing else runs, or prefill has starved: one quantum goes whatever the bound says.
        most = min(need, quantum)
        if _blocks_between(start, start + most, block) > room:
            most, reason = 0, _NO_KV
    if most > 0 and room >= 0:
        entry["reason"] = _SELECTED
        return most
    entry["reason"] = reason
    entry["short"] = float(need)
    if reason == _NO_KV:
        entry["short"] = _blocks_between(start, start + need, block) - room
    return 0


@inlined
def _use_up(entry: Record, limits: F64, block: int) -> None:
    """Take what a granted entry uses out of the limits."""
    start, chunk = entry["start"], entry["chunk"]
    limits[L_TOKENS] -= chunk
    limits[L_BLOCKS] -= _blocks_between(start, start + chunk, block) + entry["copy"] + entry["pins"]
    limits[L_SOLE] = 0.0
    if not entry["decode"]:
        limits[L_STARVING] = 0.0
    if entry["waiting"]:
        limits[L_ROWS] -= 1
        limits[L_ADMISSION] -= entry["pins"] + entry["whole"]


@inlined
def _gated(
    entry: Record,
    rules: F64,
    rows_left: bool,
    floor: float,
    counter: F64,
    more: I32,
    deep: I64,
    lane_counter: F64,
    lane_more: I32,
    lane_deep: I64,
) -> bool:
    """Whether the entry's tenant, or its lane, is further ahead than it may be; the reason is noted.

    `floor` is no more than the least of the tenants' counters: while even that allows the grant, no
    tenants are compared.
    """
    lag = rules[R_HARD_LAG] if entry["decode"] else rules[R_LAG]
    if not lag < np.inf or entry["row"] == int(rules[R_EXEMPT]):
        return False
    tenant, group = entry["tenant"], entry["group"]
    if counter[tenant] - floor > lag:
        ahead = counter[tenant] - _least(counter, more, deep, rows_left, 0, counter.size) - lag
        if ahead > 0.0:
            entry["reason"] = _FAIR_SHARE
            entry["short"] = ahead
            return True
    if entry["decode"]:
        return False
    first = group // LANES * LANES
    least = _least(lane_counter, lane_more, lane_deep, rows_left, first, first + LANES)
    ahead = lane_counter[group] - least - lag
    if ahead > 0.0:
        entry["reason"] = _LANE_SHARE
        entry["short"] = ahead
        return True
    return False


@kernel
def fill(
    entries: Records,
    features: F64,
    trial: F64,
    planes: F64,
    rules: F64,
    limits: F64,
    counter: F64,
    weight: F64,
    more: I32,
    deep: I64,
    lane_counter: F64,
    lane_more: I32,
    lane_deep: I64,
    adapters: Records,
) -> int:
    """Offer every open entry a grant, in order; results go into `chunk`, `reason` and `short`.

    A tenant whose counter is further ahead than L (for decodes: H) of the least among those that can
    still take a grant is put off, and offered again once that least has moved; so is, inside a tenant, a
    lane. Infinite lags switch that off. May be called again with more entries behind the first ones.

    Args:
        entries: ENTRY[n].
        features, limits: of what was granted so far, and what is left; used up in place.
        trial: float64[N_FEATURES], scratch.
        planes, rules: constant in a slot.
        counter: float64[tenants], ns per weight; what is granted is added as predicted.
        weight: float64[tenants].
        more: int32[tenants]; afterwards how many entries of each could use more time than they got.
        deep: int64[tenants], waiting requests that are not among the entries.
        lane_counter, lane_more, lane_deep: the same by tenant * LANES + lane.
        adapters: ADAPTER[n], whose standing is up to date, and is kept so.

    Returns:
        How many entries are still open, put off.
    """
    block = int(rules[R_BLOCK])
    for t in range(more.size):
        more[t] = 0
    for g in range(lane_more.size):
        lane_more[g] = 0
    for i in range(entries.size):
        entry = entries[i]
        if entry["open"] or (entry["chunk"] < entry["need"] and not is_blocked(entry, limits)):
            more[entries[i]["tenant"]] += 1
            lane_more[entries[i]["group"]] += 1
    floor = _least(counter, more, deep, True, 0, counter.size)
    before = predict_ns(planes, features)
    moved, closed, put_off, after = True, False, 0, before
    while moved:
        moved, put_off = False, 0
        for i in range(entries.size):
            entry = entries[i]
            if not entry["open"]:
                continue
            tenant, group = entry["tenant"], entry["group"]
            if not (closed and entry["waiting"]) and _gated(
                entry, rules, limits[L_ROWS] >= 1, floor,
                counter, more, deep, lane_counter, lane_more, lane_deep,
            ):  # fmt: skip
                put_off += 1
                continue
            entry["open"] = False
            moved = True
            if closed and entry["waiting"]:
                entry["reason"] = _BEHIND
                continue
            if entry["decode"]:
                after = _decode_fits(entry, features, planes, rules, limits)
                granted = after >= 0.0
            else:
                entry["chunk"] = _prefill_chunk(entry, features, trial, planes, rules, limits, adapters)
                granted = entry["chunk"] > 0
                if granted:
                    add_prefill(features, float(entry["start"]), float(entry["chunk"]))
                    after = predict_ns(planes, features)
            if granted:
                loading = limits[L_LOADING]
                _use_adapter(entry, adapters, rules, limits)
                _use_up(entry, limits, block)
                ns = after - before + limits[L_LOADING] - loading
                charge(group, ns, counter, weight, lane_counter)
                before = after
            else:
                reserve_for(entry, limits, lane_counter, HARD_LAG * rules[R_LAG])
                closed = closed or (rules[R_STRICT] > 0.0 and entry["waiting"])
            # Who wants more time stays among those that others are compared with, though there is none left.
            if entry["chunk"] == entry["need"] or is_blocked(entry, limits):
                more[tenant] -= 1
                lane_more[group] -= 1
    return put_off


def no_features() -> F64:
    """Features of an empty chunk set."""
    return np.zeros(N_FEATURES)
