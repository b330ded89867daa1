"""Filling a slot: walk ordered entries and give each as much as time, tokens, rows, KV and fairness allow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kaiseki.core.costs import add_decode, add_prefill, fit_prefill, predict_ns
from kaiseki.core.decision import F64, I32, Bool
from kaiseki.core.jit import njit
from kaiseki.core.protocols import N_FEATURES
from kaiseki.core.reasons import Reason

_SELECTED = int(Reason.SELECTED)
_NO_ROW = int(Reason.NO_ROW)
_NO_KV = int(Reason.NO_KV)
_WATERMARK = int(Reason.WATERMARK)
_NO_TIME = int(Reason.NO_TIME)
_NO_TOKENS = int(Reason.NO_TOKENS)
_FAIR_SHARE = int(Reason.FAIR_SHARE)
_BEHIND = int(Reason.BEHIND)
_DECODE_BOUND = int(Reason.DECODE_BOUND)
_NONE = int(Reason.NONE)

# Places in the float64 vector of limits that the kernel uses up.
L_TOKENS, L_ROWS, L_BLOCKS, L_ADMISSION, L_STARVING, L_SOLE = range(6)
N_LIMITS = 6


@dataclass(slots=True)
class Entries:
    """Candidates for a slot, in the order in which they are offered a grant; arrays of length n.

    Attributes:
        rows: request rows.
        decode: the entry computes one token after its prompt.
        waiting: the entry does not run yet.
        start: position of the next token to compute (cached prefix included).
        need: tokens that could be computed now.
        pins: idle cached blocks that admitting it takes out of the free ones.
        copy: 1 when its next write may need one extra block (copy-on-write).
        whole: blocks that its whole known text will need beyond those it holds (admission check).
        tenant: tenant index.
        chunk: granted tokens (result).
        reason: why it got what it got (result), values of `Reason`.
        short: by how much it missed, in the reason's unit (result).
    """

    rows: I32
    decode: Bool
    waiting: Bool
    start: I32
    need: I32
    pins: I32
    copy: I32
    whole: I32
    tenant: I32
    chunk: I32
    reason: I32
    short: F64


@njit
def _blocks_between(start: int, end: int, block: int) -> int:
    return (end + block - 1) // block - (start + block - 1) // block


@njit
def _least_counter(counter: F64, more: I32) -> float:
    least = np.inf
    for t in range(counter.size):
        if more[t] > 0:
            least = min(least, counter[t])
    return least


@njit
def _grant(  # noqa: PLR0911 - one return per constraint, in the order in which they bind
    decode: bool,
    waiting: bool,
    start: int,
    need: int,
    pins: int,
    copy: int,
    whole: int,
    features: F64,
    planes: F64,
    headroom: float,
    bound_ns: float,
    limits: F64,
    quantum: int,
    block: int,
    chunked: bool,
) -> tuple[int, int, float]:
    """Tokens this entry gets now, the reason that bound and by how much. Nothing is changed."""
    alone = features[0] == 0.0
    if waiting:
        if limits[L_ROWS] < 1:
            return 0, _NO_ROW, 1.0
        if pins + whole > limits[L_ADMISSION] and limits[L_SOLE] == 0.0:
            return 0, _WATERMARK, pins + whole - limits[L_ADMISSION]
    if limits[L_TOKENS] < 1:
        return 0, _NO_TOKENS, float(need)
    most = int(min(float(need), limits[L_TOKENS]))
    reason = _SELECTED if most == need else _NO_TOKENS
    if decode:
        trial = features.copy()
        add_decode(trial, float(start + 1))
        over = predict_ns(planes, trial) * headroom - bound_ns
        if not alone and over > 0.0:
            return 0, _DECODE_BOUND, over
    elif bound_ns < np.inf:
        fits = fit_prefill(planes, features, float(start), most, bound_ns / headroom)
        if fits < most:
            most, reason = fits, _NO_TIME
    room = limits[L_BLOCKS] - pins - copy
    if _blocks_between(start, start + most, block) > room:
        most, reason = int((start + block - 1) // block + max(room, 0.0)) * block - start, _NO_KV
        if room < 0:
            return 0, reason, -room
    if most < need:
        if not chunked:
            most = 0
        # A slot that holds few quanta would lose much by rounding: there the grid is a quarter as fine.
        grid = quantum if most >= 4 * quantum else max(quantum // 4, 1)
        most = (most // grid) * grid
    if most <= 0 and not decode and (alone or limits[L_STARVING] > 0) and reason == _NO_TIME:
        # Nothing else runs, or prefill has starved: one quantum goes whatever the bound says.
        most = min(need, quantum)
        if _blocks_between(start, start + most, block) > room:
            return 0, _NO_KV, 1.0
    if most > 0:
        return most, _SELECTED, 0.0
    if reason == _NO_KV:
        return 0, reason, _blocks_between(start, start + need, block) - room
    return 0, reason, float(need)


@njit
def fill(
    decode: Bool,
    waiting: Bool,
    start: I32,
    need: I32,
    pins: I32,
    copy: I32,
    whole: I32,
    tenant: I32,
    chunk: I32,
    reason: I32,
    short: F64,
    features: F64,
    planes: F64,
    headroom: float,
    bound_ns: float,
    limits: F64,
    quantum: int,
    block: int,
    chunked: bool,
    strict: bool,
    counter: F64,
    weight: F64,
    lag: float,
) -> None:
    """Offer every entry a grant, in order; results go to `chunk`, `reason` and `short`.

    `features`, `limits` and `counter` (float64[tenants], charged ns / weight) are used up in place.
    A tenant whose counter is more than `lag` ahead of the least among those that can still take a
    grant is put off, and offered again once that least has moved; lag = inf switches it off.
    """
    n = decode.size
    more = np.zeros(counter.size, np.int32)
    done = np.zeros(n, np.bool_)
    for i in range(n):
        reason[i] = _NONE
        chunk[i] = 0
        if not decode[i]:
            more[tenant[i]] += 1
    moved = True
    closed = False
    while moved:
        moved = False
        for i in range(n):
            if done[i]:
                continue
            t = tenant[i]
            if closed and waiting[i]:
                reason[i] = _BEHIND
                done[i] = True
                more[t] -= 1
                continue
            if not decode[i] and lag < np.inf:
                ahead = counter[t] - _least_counter(counter, more) - lag
                if ahead > 0.0:
                    reason[i], short[i] = _FAIR_SHARE, ahead
                    continue
            before = predict_ns(planes, features)
            chunk[i], reason[i], short[i] = _grant(
                decode[i], waiting[i], start[i], need[i], pins[i], copy[i], whole[i],
                features, planes, headroom, bound_ns, limits, quantum, block, chunked,
            )  # fmt: skip
            done[i] = True
            moved = True
            if not decode[i]:
                more[t] -= 1
            if chunk[i] == 0:
                closed |= strict and waiting[i]
                continue
            if decode[i]:
                add_decode(features, float(start[i] + 1))
            else:
                add_prefill(features, float(start[i]), float(chunk[i]))
                limits[L_STARVING] = 0.0
            blocks = _blocks_between(start[i], start[i] + chunk[i], block) + copy[i] + pins[i]
            limits[L_TOKENS] -= chunk[i]
            limits[L_BLOCKS] -= blocks
            limits[L_SOLE] = 0.0
            if waiting[i]:
                limits[L_ROWS] -= 1
                limits[L_ADMISSION] -= pins[i] + whole[i]
            counter[t] += (predict_ns(planes, features) - before) / weight[t]


def no_features() -> F64:
    """Features of an empty chunk set."""
    return np.zeros(N_FEATURES)
