"""Carrying out grants: KV is taken, the table moves on, and the decision's arrays are made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kaiseki.core.costs import add_decode, add_prefill, gradient_ns, predict_ns, share_ns
from kaiseki.core.decision import F64, I32, Bool, Decision
from kaiseki.core.fairness import Fairness, charge
from kaiseki.core.jit import kernel
from kaiseki.core.lifecycle import Lifecycle
from kaiseki.core.protocols import N_FEATURES, KVSpace, OutOfBlocks
from kaiseki.core.table import NO_ROW, Records

_ROWS, _TOKENS, _STARTS, _EPOCHS, _GROUPS = range(5)
N_NUMBERS = 5
"""What the int32 arrays of a decision are about, as they lie one behind the other."""


@dataclass(slots=True)
class InFlight:
    """A decision whose result has not come yet.

    Attributes:
        decision: the decision.
        features: float64[N_FEATURES] of its chunk set.
        groups: int32[n], tenant * LANES + lane that is charged for each chunk.
        charged: float64[n], ns charged so far: predicted marginal costs, scaled to the predicted total, and
            what loading an adapter takes for whom it is loaded.
    """

    decision: Decision
    features: F64
    groups: I32
    charged: F64


def attach(life: Lifecycle, entries: Records, rows: I32, starts: I32, all_plain: bool, now: int) -> None:
    """Give newly admitted rows the KV they can share, and mark them as running.

    Args:
        life: of the scheduler.
        entries: ENTRY[n] of the rows.
        rows, starts: int32[n], and where each begins to compute.
        all_plain: none of them is a fork, or has brought its KV.
        now: the time, ns.
    """
    if all_plain:
        life.kv.attach(rows, starts)
    else:
        parents = entries["parent"]
        for i in np.flatnonzero(parents != NO_ROW).tolist():
            life.kv.fork(int(parents[i]), int(rows[i]), int(starts[i]))
            life.table.shared_tail[[rows[i], parents[i]]] = True
        plain = (parents == NO_ROW) & ~life.table.brought[rows]
        if plain.any():
            life.kv.attach(rows[plain], starts[plain])
    life.start(rows, starts, now)


def reserve(kv: KVSpace, places: I32, rows: I32, starts: I32, ends: I32) -> tuple[I32, I32]:
    """Take blocks for chunks [start, end) of rows; what does not fit after all is left out.

    Returns the `places` of the others, and the copies to make.
    """
    try:
        return places, kv.reserve(rows, starts, ends)
    except OutOfBlocks:
        fits = np.cumsum(kv.growth_need(rows, starts, ends)) <= kv.free_blocks()
        return places[fits], kv.reserve(rows[fits], starts[fits], ends[fits])


@kernel
def add_chunks(entries: Records, features: F64) -> None:
    """Add what the chunks of entries compute to `features`."""
    for i in range(entries.size):
        entry = entries[i]
        if entry["chunk"] > 0 and entry["decode"]:
            add_decode(features, float(entry["start"] + 1))
        elif entry["chunk"] > 0:
            add_prefill(features, float(entry["start"]), float(entry["chunk"]))


@kernel
def start_chunks(
    records: Records,
    entries: Records,
    places: I32,
    champion: int,
    slot: int,
    planes: F64,
    features: F64,
    slope: F64,
    predicted_ns: float,
    load_ns: float,
    counter: F64,
    weight: F64,
    lane_counter: F64,
    samples: Bool,
    numbers: I32,
    charged: F64,
) -> tuple[int, bool]:
    """Put the chunks of the entries at `places` in flight, and charge tenants.

    They are predicted to take `predicted_ns`, and each load `load_ns` more. Fills, parallel to `places`,
    `samples`, `charged` and, by what they are, `numbers`. Returns how many are prefills, and whether the
    champion is among the rows.
    """
    gradient_ns(planes, features, slope)
    total, prefills, served = 0.0, 0, False
    for i in range(places.size):
        entry = entries[places[i]]
        r = entry["row"]
        row = records[r]
        end = entry["start"] + entry["chunk"]
        sampled = end == row["prompt"] + row["outputs"] + row["pending"]
        numbers[_ROWS, i] = r
        numbers[_TOKENS, i] = entry["chunk"]
        numbers[_STARTS, i] = entry["start"]
        numbers[_EPOCHS, i] = row["epoch"]
        numbers[_GROUPS, i] = entry["group"]
        samples[i] = sampled
        charged[i] = share_ns(slope, entry["decode"], entry["start"], entry["chunk"])
        total += charged[i]
        prefills += not entry["decode"]
        served = served or r == champion
        row["computed"] = end
        row["pending"] += sampled
        row["inflight_slot"] = slot
        row["shared_tail"] = False
    scale = predicted_ns / total if total > 0.0 else 0.0
    for i in range(places.size):
        charged[i] *= scale
        if entries[places[i]]["load"]:
            charged[i] += load_ns
        charge(numbers[_GROUPS, i], charged[i], counter, weight, lane_counter)
    return prefills, served


@kernel
def recharge(
    records: Records,
    valid: Bool,
    rows: I32,
    groups: I32,
    charged: F64,
    measured_ns: float,
    counter: F64,
    weight: F64,
    lane_counter: F64,
) -> None:
    """Put the measured time of a step in place of the predicted one, chunk by chunk.

    What was computed in vain (rows not `valid`) costs its tenant as well, but counts as no request's service.
    """
    total = 0.0
    for i in range(charged.size):
        total += charged[i]
    scale = measured_ns / total if total > 0.0 else 0.0
    for i in range(charged.size):
        actual = charged[i] * scale
        charge(groups[i], actual - charged[i], counter, weight, lane_counter)
        if valid[i]:
            records[rows[i]]["service_ns"] += actual


def put_in_flight(
    records: Records,
    entries: Records,
    places: I32,
    champion: int,
    slot: int,
    planes: F64,
    features: F64,
    fairness: Fairness,
    loads: I32,
    load_ns: float,
) -> tuple[InFlight, int, bool]:
    """Make the decision of granted entries; see `start_chunks`, whose answers are returned as well.

    `loads`: see `Decision`; each takes `load_ns`.
    """
    n, f = places.size, fairness
    predicted = predict_ns(planes, features)
    numbers, samples, charged = np.empty((N_NUMBERS, n), np.int32), np.empty(n, np.bool_), np.empty(n)
    prefills, served = start_chunks(
        records, entries, places, champion, slot, planes, features, np.empty(N_FEATURES), predicted, load_ns,
        f.counter, f.weight, f.lane_counter, samples, numbers, charged,
    )  # fmt: skip
    rows, tokens, starts, epochs, groups = numbers
    predicted_ns = int(predicted + load_ns * loads.shape[0])
    decision = Decision(slot, rows, tokens, starts, samples, epochs, loads=loads, predicted_ns=predicted_ns)
    return InFlight(decision, features, groups, charged), prefills, served
