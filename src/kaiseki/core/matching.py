"""Which card each chunk goes to: a generalised assignment where every card has two capacities.

Chunk i is worth value[i, j] on card j, where it takes time[i, j] of the card's time and kv[i, j] of its KV
blocks; a prefix cached on a card raises the first and lowers the others there. Each chunk goes to one card
or waits, and the total worth is to be large (requirement A4). The exact answer is too slow for a slot. So a
few greedies weigh time against KV differently, two kinds of exchange improve each, and the best is kept.

Prices per card, adjusted by subgradient to how full it is, were tried as starts: one costs about twice as
much as a greedy and gains no more than another greedy does; alone they were worse on large cases. `kaiseki
bench matching` measures the gap to the exact optimum.
"""

from __future__ import annotations

import numpy as np

from kaiseki.core.decision import F64, I32, I64
from kaiseki.core.jit import njit

SHARES = (0.5, 0.25, 0.75)
"""Of card time in the price of a chunk; KV has the rest. Prices are per whole capacity."""
POWERS = (1.0, 0.7, 0.3)
"""Of the price by which the worth is divided to get the order.

1 is the density greedy. Below 1 large chunks go earlier, which helps where a card holds only a few: what is
lost there is the gap that remains, not a place in the order.
"""
EFFORT = 16_384
"""Starts times free chunks squared, at most, as exchanges compare chunks with chunks."""
ROUNDS = 2
"""Exchanges after each start; what a third one gains is not worth its time."""


@njit
def assign(
    value: F64, time: F64, kv: F64, room_time: F64, room_kv: F64, sticky: I32, effort: int = EFFORT
) -> I32:
    """Card of each chunk.

    Sums are compared with the capacities exactly, so give whole numbers (ns, blocks). Rows are in order of
    sequence number: of two that are alike the earlier goes first.

    Args:
        value: float64[n, m], worth of a chunk on a card; 0 or less where it must not go.
        time: float64[n, m], card time that it takes there, ns.
        kv: float64[n, m], blocks that it takes there.
        room_time: float64[m], ns that each card has.
        room_kv: float64[m], blocks that each card has.
        sticky: int32[n], card that holds the KV of a running chunk, which stays there; -1 for the others.
            These are counted first, and a card that they overfill gets nothing else.
        effort: bounds the number of starts, see `EFFORT`; one is made in any case.

    Returns:
        int32[n]: the card, -1 for chunks that wait.
    """
    room_time, room_kv = room_time.copy(), room_kv.copy()
    for i in np.flatnonzero(sticky >= 0):
        room_time[sticky[i]] -= time[i, sticky[i]]
        room_kv[sticky[i]] -= kv[i, sticky[i]]
    free = np.flatnonzero(sticky < 0)
    starts = effort // max(free.size * free.size, 1)
    best, most = sticky.copy(), 0.0
    for start in range(max(min(starts, len(SHARES) * len(POWERS)), 1)):
        share, power = SHARES[start % len(SHARES)], POWERS[start // len(SHARES)]
        rank = _rank(value, time, kv, room_time, room_kv, share, power)
        order = free[np.argsort(-_best_of(rank, free), kind="mergesort")]
        out, left_time, left_kv = sticky.copy(), room_time.copy(), room_kv.copy()
        _fill(value, time, kv, left_time, left_kv, rank, order, out)
        for _ in range(ROUNDS):
            gained = _refill(value, time, kv, left_time, left_kv, order, out)
            gained |= _displace(value, time, kv, left_time, left_kv, order, out)
            if not gained:
                break
        # The last exchange may have left room where one that it put out, or another, still fits.
        _fill(value, time, kv, left_time, left_kv, rank, order, out)
        total = 0.0
        for i in order:
            if out[i] >= 0:
                total += value[i, out[i]]
        if total > most:
            best, most = out, total
    return best


@njit
def _rank(value: F64, time: F64, kv: F64, room_time: F64, room_kv: F64, share: float, power: float) -> F64:
    """float64[n, m]: worth over price to this power, 0 where it can't go, inf where it takes nothing."""
    rank = np.zeros(value.shape)
    for j in range(room_time.size):
        # Where nothing is left, only a need of 0 is divided by this.
        whole_time, whole_kv = max(room_time[j], 1.0), max(room_kv[j], 1.0)
        for i in range(value.shape[0]):
            if value[i, j] <= 0.0 or time[i, j] > room_time[j] or kv[i, j] > room_kv[j]:
                continue
            price = share * time[i, j] / whole_time + (1.0 - share) * kv[i, j] / whole_kv
            rank[i, j] = value[i, j] / price**power if price > 0.0 else np.inf
    return rank


@njit
def _best_of(rank: F64, rows: I64) -> F64:
    """float64[k]: the best rank of each of these rows on any card."""
    best = np.zeros(rows.size)
    for at in range(rows.size):
        for j in range(rank.shape[1]):
            best[at] = max(best[at], rank[rows[at], j])
    return best


@njit
def _fill(
    value: F64, time: F64, kv: F64, left_time: F64, left_kv: F64, rank: F64, order: I64, out: I32
) -> None:
    """Give each that waits, in order, the card that it ranks best of those it fits; alike, the emptiest."""
    whole_time, whole_kv = left_time.copy(), left_kv.copy()
    for i in order[out[order] < 0]:
        card, most_left = -1, 0.0
        for j in range(left_time.size):
            if value[i, j] <= 0.0 or time[i, j] > left_time[j] or kv[i, j] > left_kv[j]:
                continue
            left = left_time[j] / max(whole_time[j], 1.0) + left_kv[j] / max(whole_kv[j], 1.0)
            if card < 0 or rank[i, j] > rank[i, card] or (rank[i, j] == rank[i, card] and left > most_left):
                card, most_left = j, left
        if card >= 0:
            out[i] = card
            left_time[card] -= time[i, card]
            left_kv[card] -= kv[i, card]


@njit
def _refill(value: F64, time: F64, kv: F64, left_time: F64, left_kv: F64, order: I64, out: I32) -> bool:
    """Take out one chunk at a time, the least dense first, and fill its card with those that wait.

    It may go to another card that has room. Kept when worth is gained; says whether any was.
    """
    held, waiting, entered = order[out[order] >= 0], order[out[order] < 0], np.empty(order.size, np.int64)
    gained = False
    for mine in held[::-1]:
        card = out[mine]
        other = _elsewhere(value, time, kv, left_time, left_kv, mine, card)
        gain = (value[mine, other] if other >= 0 else 0.0) - value[mine, card]
        free_time, free_kv = left_time[card] + time[mine, card], left_kv[card] + kv[mine, card]
        count = 0
        for i in waiting:
            fits = time[i, card] <= free_time and kv[i, card] <= free_kv
            if fits and out[i] < 0 and value[i, card] > 0.0:
                free_time -= time[i, card]
                free_kv -= kv[i, card]
                gain += value[i, card]
                entered[count] = i
                count += 1
        if gain > 0.0:
            gained = True
            out[entered[:count]] = card
            left_time[card], left_kv[card] = free_time, free_kv
            out[mine] = other
            if other >= 0:
                left_time[other] -= time[mine, other]
                left_kv[other] -= kv[mine, other]
    return gained


@njit
def _elsewhere(value: F64, time: F64, kv: F64, left_time: F64, left_kv: F64, row: int, card: int) -> int:
    """Another card that has room for this row, of those the one where it is worth most, or -1."""
    other = -1
    for j in range(left_time.size):
        fits = j != card and time[row, j] <= left_time[j] and kv[row, j] <= left_kv[j]
        if fits and value[row, j] > 0.0 and (other < 0 or value[row, j] > value[row, other]):
            other = j
    return other


@njit
def _displace(value: F64, time: F64, kv: F64, left_time: F64, left_kv: F64, order: I64, out: I32) -> bool:
    """Put in one waiting chunk at a time, for which the least dense of a card go until it fits.

    On the card where that gains most, if anywhere; says whether any was gained.
    """
    held = order[out[order] >= 0][::-1]
    leave, most_leave = np.empty(order.size, np.int64), np.empty(order.size, np.int64)
    gained = False
    for i in order[out[order] < 0]:
        card, most, leavers = -1, 0.0, 0
        for j in range(left_time.size):
            gain, count = _make_room(value, time, kv, left_time[j], left_kv[j], held, out, i, j, leave)
            if gain > most:
                card, most, leavers = j, gain, count
                most_leave[:count] = leave[:count]
        if card < 0:
            continue
        gained = True
        for o in most_leave[:leavers]:
            out[o] = -1
            left_time[card] += time[o, card]
            left_kv[card] += kv[o, card]
        out[i] = card
        left_time[card] -= time[i, card]
        left_kv[card] -= kv[i, card]
    return gained


@njit
def _make_room(
    value: F64, time: F64, kv: F64, free_time: float, free_kv: float, held: I64, out: I32,
    row: int, card: int, leave: I64,
) -> tuple[float, int]:  # fmt: skip
    """What this row gains on this card after the first of those held there have left for it, and how many.

    Only those leave that bring back what is short. They are written to `leave`. Gain 0 when it does not pay.
    """
    gain, count = value[row, card], 0
    free_time -= time[row, card]
    free_kv -= kv[row, card]
    for o in held:
        if gain <= 0.0 or (free_time >= 0.0 and free_kv >= 0.0):
            break
        helps = (free_time < 0.0 and time[o, card] > 0.0) or (free_kv < 0.0 and kv[o, card] > 0.0)
        if out[o] == card and helps:
            gain -= value[o, card]
            free_time += time[o, card]
            free_kv += kv[o, card]
            leave[count] = o
            count += 1
    if free_time < 0.0 or free_kv < 0.0:
        return 0.0, 0
    return gain, count
