"""Applying a step's result: tokens, gaps, charges, endings. Stale results are dropped here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kaiseki.core.decision import I8, I32, Bool, StepResult
from kaiseki.core.jit import kernel
from kaiseki.core.lifecycle import Lifecycle
from kaiseki.core.reasons import Event, Finish, Outcome, Reason
from kaiseki.core.starting import InFlight, recharge
from kaiseki.core.table import Records, State

_RUNNING = int(State.RUNNING)

# What became of a chunk.
STALE = 0  # its request was stopped or ended meanwhile
WORKED = 1
FIRST = 2  # worked, and gave the first token
LATER = 3  # worked, and gave further tokens
FAILED = 4

TOKEN = np.dtype(
    [
        ("tenant", np.int32),
        ("cls", np.int32),
        ("first", np.bool_),  # the request's first, `ns` since its arrival; otherwise since its last token
        ("ns", np.float64),
    ],
    align=True,
)


@dataclass(slots=True)
class Applied:
    """What a step changed, for metrics and for whoever passes tokens on.

    Attributes:
        emitted: bool[n] over the step's rows, those whose new tokens count.
        tokens: TOKEN[m], one per row that got tokens.
    """

    emitted: Bool
    tokens: Records


@kernel
def take_results(
    records: Records,
    rows: I32,
    epochs: I32,
    new_tokens: I32,
    failed: Bool,
    starts: I32,
    tokens: I32,
    samples: Bool,
    slot: int,
    ended_ns: int,
    became: I8,
    done: I32,
    confirmed: I32,
    gaps: Records,
) -> tuple[int, int]:
    """Bring rows up to date. Fills `became` (per chunk), and one record per token-giving row in `gaps`.

    `done`, `confirmed`: rows that worked, and how many of their positions now hold computed KV.
    Returns how many rows worked, and how many gave tokens.
    """
    n_done, n_gaps = 0, 0
    for i in range(rows.size):
        row = records[rows[i]]
        if row["epoch"] != epochs[i] or row["state"] != _RUNNING:
            became[i] = STALE
            continue
        if failed[i]:
            became[i] = FAILED
            continue
        became[i] = WORKED
        row["confirmed"] = max(row["confirmed"], starts[i] + tokens[i])
        row["pending"] -= samples[i]
        if row["inflight_slot"] == slot:
            row["inflight_slot"] = -1
        done[n_done] = rows[i]
        confirmed[n_done] = row["confirmed"]
        n_done += 1
        if new_tokens[i] <= 0:
            continue
        first = row["outputs"] == 0
        became[i] = FIRST if first else LATER
        gap = ended_ns - (row["arrival_ns"] if first else row["last_token_ns"])
        if first:
            row["first_token_ns"] = ended_ns
        else:
            row["late_gaps"] += gap > row["tbt_ns"]
        row["outputs"] += new_tokens[i]
        row["last_token_ns"] = ended_ns
        token = gaps[n_gaps]
        token["tenant"] = row["tenant"]
        token["cls"] = row["cls"]
        token["first"] = first
        token["ns"] = float(gap)
        n_gaps += 1
    return n_done, n_gaps


@kernel
def find_ended(records: Records, rows: I32, became: I8, finish: I8, out: I32) -> int:
    """Places of rows that worked and are done: the engine says so, or they have all tokens they may have."""
    n = 0
    for i in range(rows.size):
        if became[i] < WORKED or became[i] > LATER:
            continue
        row = records[rows[i]]
        if finish[i] != 0 or row["outputs"] >= row["max_tokens"]:
            out[n] = i
            n += 1
    return n


def apply_step(life: Lifecycle, flight: InFlight, result: StepResult) -> Applied:
    """Take in what a step did. Results of rows that were preempted or ended meanwhile are dropped."""
    t, d, r = life.table, flight.decision, result
    n = r.rows.size
    became = np.empty(n, np.int8)
    done, confirmed = np.empty(n, np.int32), np.empty(n, np.int32)
    gaps: Records = np.empty(n, TOKEN)
    worked, gave = take_results(
        t.records, r.rows, r.epochs, r.new_tokens, r.failed, d.starts, d.tokens, d.samples,
        r.slot, r.ended_ns, became, done, confirmed, gaps,
    )  # fmt: skip
    if life.policy.output_weight > 0.0:
        given = r.new_tokens[(became == FIRST) | (became == LATER)]
        life.fairness.count_tokens(gaps["tenant"][:gave], given, life.policy.output_weight)
    measured = float(r.ended_ns - r.started_ns)
    fair, charges = life.fairness, (flight.groups, flight.charged)
    counters = fair.counter, fair.weight, fair.lane_counter
    recharge(t.records, became != STALE, r.rows, *charges, measured, *counters)
    fair.observe_slot(measured)
    first = r.rows[became == FIRST]
    life.trace.note(life.slot, r.ended_ns, t.seq[first], Event.FIRST_TOKEN, Reason.NONE)
    life.kv.commit(done[:worked], confirmed[:worked])
    _end_finished(life, became, result)
    if r.failed.any():
        _end_failed(life, became == FAILED, result)
    life.prompts_done(r.ended_ns)
    return Applied((became == FIRST) | (became == LATER), gaps[:gave])


def _end_finished(life: Lifecycle, became: I8, result: StepResult) -> None:
    rows = result.rows
    ended = np.empty(rows.size, np.int32)
    ended = ended[: find_ended(life.table.records, rows, became, result.finish, ended)]
    if ended.size:
        finishes = [Finish(f) or Finish.LENGTH for f in result.finish[ended].tolist()]
        life.end_all(rows[ended], Outcome.COMPLETED, Reason.NONE, result.ended_ns, finishes)


def _end_failed(life: Lifecycle, failed: Bool, result: StepResult) -> None:
    again = result.rows[failed & result.retryable]
    if again.size:
        life.preempt(again, Event.RETRIED, Reason.ENGINE_ERROR, result.ended_ns)
    life.end_all(
        result.rows[failed & ~result.retryable], Outcome.FAILED, Reason.ENGINE_ERROR, result.ended_ns
    )
