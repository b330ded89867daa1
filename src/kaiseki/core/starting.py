"""Carrying out grants: KV is taken, the table moves on, and the decision's arrays are made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kaiseki.core.costs import gradient_ns, predict_ns, share_ns
from kaiseki.core.decision import F64, I32, Bool, Decision
from kaiseki.core.fairness import Fairness, charge
from kaiseki.core.jit import kernel
from kaiseki.core.lifecycle import Lifecycle
from kaiseki.core.protocols import N_FEATURES, KVSpace, OutOfBlocks
from kaiseki.core.table import NO_ROW, Records


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


def attach(life: Lifecycle, admitted: Records, now: int) -> None:
    """Give newly admitted rows the KV they can share, and mark them as running."""
    rows, starts, parents = admitted["row"].copy(), admitted["start"].copy(), admitted["parent"]
    forks = np.flatnonzero(parents != NO_ROW)
    for i in forks.tolist():
        life.kv.fork(int(parents[i]), int(rows[i]), int(starts[i]))
        life.table.shared_tail[[rows[i], parents[i]]] = True
    if forks.size < rows.size:
        plain = (parents == NO_ROW) & ~life.table.brought[rows]
        life.kv.attach(rows[plain], starts[plain])
    life.start(rows, starts, now)


def reserve(kv: KVSpace, granted: Records) -> tuple[Records, I32]:
    """Take blocks for the chunks; what does not fit after all is left out. Returns copies as well."""
    rows, start = np.ascontiguousarray(granted["row"]), granted["start"]
    end = start + granted["chunk"]
    try:
        return granted, kv.reserve(rows, start, end)
    except OutOfBlocks:
        fits = np.cumsum(kv.growth_need(rows, start, end)) <= kv.free_blocks()
        return granted[fits], kv.reserve(rows[fits], start[fits], end[fits])


@kernel
def start_chunks(
    records: Records,
    granted: Records,
    slot: int,
    planes: F64,
    features: F64,
    slope: F64,
    predicted_ns: float,
    load_ns: float,
    counter: F64,
    weight: F64,
    lane_counter: F64,
    rows: I32,
    tokens: I32,
    starts: I32,
    samples: Bool,
    epochs: I32,
    groups: I32,
    charged: F64,
) -> int:
    """Put chunks in flight; fills the last seven arrays, parallel to `granted`, and charges tenants.

    They are predicted to take `predicted_ns`, and each load `load_ns` more. Returns how many are prefills.
    """
    gradient_ns(planes, features, slope)
    total, prefills = 0.0, 0
    for i in range(granted.size):
        entry = granted[i]
        r = entry["row"]
        row = records[r]
        end = entry["start"] + entry["chunk"]
        sampled = end == row["prompt"] + row["outputs"] + row["pending"]
        rows[i] = r
        tokens[i] = entry["chunk"]
        starts[i] = entry["start"]
        samples[i] = sampled
        epochs[i] = row["epoch"]
        groups[i] = entry["group"]
        charged[i] = share_ns(slope, entry["decode"], entry["start"], entry["chunk"])
        total += charged[i]
        prefills += not entry["decode"]
        row["computed"] = end
        row["pending"] += sampled
        row["inflight_slot"] = slot
        row["shared_tail"] = False
    scale = predicted_ns / total if total > 0.0 else 0.0
    for i in range(granted.size):
        charged[i] *= scale
        if granted[i]["load"]:
            charged[i] += load_ns
        charge(groups[i], charged[i], counter, weight, lane_counter)
    return prefills


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
    granted: Records,
    slot: int,
    planes: F64,
    features: F64,
    fairness: Fairness,
    loads: I32,
    load_ns: float,
) -> tuple[InFlight, int]:
    """Make the decision of granted entries; see `start_chunks`. Also returns the number of prefills.

    `loads`: see `Decision`; each takes `load_ns`.
    """
    n = granted.size
    predicted = predict_ns(planes, features)
    d = Decision(
        slot=slot,
        rows=np.empty(n, np.int32),
        tokens=np.empty(n, np.int32),
        starts=np.empty(n, np.int32),
        samples=np.empty(n, np.bool_),
        epochs=np.empty(n, np.int32),
        loads=loads,
        predicted_ns=int(predicted + load_ns * loads.shape[0]),
    )
    flight = InFlight(d, features, np.empty(n, np.int32), np.empty(n))
    f = fairness
    prefills = start_chunks(
        records, granted, slot, planes, features, np.empty(N_FEATURES), predicted, load_ns,
        f.counter, f.weight, f.lane_counter,
        d.rows, d.tokens, d.starts, d.samples, d.epochs, flight.groups, flight.charged,
    )  # fmt: skip
    return flight, prefills
