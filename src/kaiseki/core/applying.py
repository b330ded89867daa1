"""Applying a step's result: tokens, gaps, charges, endings. Stale results are dropped here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kaiseki.core.decision import I8, I32, Bool, StepResult
from kaiseki.core.jit import inlined, kernel
from kaiseki.core.lifecycle import Lifecycle
from kaiseki.core.reasons import Event, Finish, Outcome, Reason
from kaiseki.core.starting import InFlight, recharge
from kaiseki.core.table import Record, Records, State

_RUNNING = int(State.RUNNING)
_FIRST_TOKEN, _NONE = int(Event.FIRST_TOKEN), int(Reason.NONE)
_FINISH = tuple(Finish(f) or Finish.LENGTH for f in range(len(Finish)))
"""How a request ended when the engine says this of its last token: NONE means it has all its tokens."""

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


@inlined
def take_tokens(row: Record, count: int, now: int, token: Record) -> None:
    """A row has more tokens, as of `now`; `token` is a TOKEN that says how long they took."""
    first = row["outputs"] == 0
    gap = now - (row["arrival_ns"] if first else row["last_token_ns"])
    if first:
        row["first_token_ns"] = now
    else:
        row["late_gaps"] += gap > row["tbt_ns"]
    row["outputs"] += count
    row["last_token_ns"] = now
    token["tenant"] = row["tenant"]
    token["cls"] = row["cls"]
    token["first"] = first
    token["ns"] = float(gap)


@inlined
def note_first(note: Record, slot: int, now: int, seq: int) -> None:
    """Write a RECORD: a request has its first token."""
    note["slot"] = slot
    note["t_ns"] = now
    note["seq"] = seq
    note["event"] = _FIRST_TOKEN
    note["reason"] = _NONE
    note["other"] = -1
    note["amount"] = 0.0


@kernel
def take_results(
    records: Records,
    rows: I32,
    epochs: I32,
    new_tokens: I32,
    failed: Bool,
    finish: I8,
    tokens: I32,
    samples: Bool,
    slot: int,
    now: int,
    valid: Bool,
    emitted: Bool,
    done: I32,
    confirmed: I32,
    ended: I32,
    gaps: Records,
    current: int,
    notes: Records,
) -> tuple[int, int, int, int, int]:
    """Bring rows up to date with what came out of `slot` at `now`.

    Args:
        records: of the table.
        rows, epochs, new_tokens, failed, finish: of the result.
        tokens, samples: of the decision.
        slot, now: decision, and when its step ended, ns.
        valid, emitted: filled: whether the chunk was not for nothing (its request was stopped or ended
            meanwhile), and whether its new tokens count.
        done, confirmed: filled with the rows that worked, and how many of their positions hold KV now.
        ended: filled with the places of rows that are done: the engine says so, or all tokens are there.
        gaps: TOKEN[n], filled with one per token-giving row.
        current: the newest slot.
        notes: RECORD[n], filled with one per first token.

    Returns how many rows worked, ended, gave tokens, gave their first one, and failed.
    """
    n_done, n_ended, n_gaps, n_first, n_failed = 0, 0, 0, 0, 0
    for i in range(rows.size):
        row = records[rows[i]]
        emitted[i] = False
        valid[i] = not (row["epoch"] != epochs[i] or row["state"] != _RUNNING)
        if not valid[i] or failed[i]:
            n_failed += valid[i]
            continue
        # Draft tokens that turned out right were computed beside the chunk's own.
        ahead = max(new_tokens[i] - 1, 0)
        row["confirmed"] += tokens[i] + ahead
        row["computed"] += ahead
        row["pending"] -= samples[i]
        if row["inflight_slot"] == slot:
            row["inflight_slot"] = -1
        done[n_done] = rows[i]
        confirmed[n_done] = row["confirmed"]
        n_done += 1
        if new_tokens[i] > 0:
            emitted[i] = True
            take_tokens(row, new_tokens[i], now, gaps[n_gaps])
            if gaps[n_gaps]["first"]:
                note_first(notes[n_first], current, now, row["seq"])
                n_first += 1
            n_gaps += 1
        if finish[i] != 0 or row["outputs"] >= row["max_tokens"]:
            ended[n_ended] = i
            n_ended += 1
    return n_done, n_ended, n_gaps, n_first, n_failed


def apply_step(life: Lifecycle, flight: InFlight, result: StepResult) -> Applied:
    """Take in what a step did. Results of rows that were preempted or ended meanwhile are dropped."""
    t, d, r, now = life.table, flight.decision, result, result.ended_ns
    n = r.rows.size
    valid, emitted = np.empty(n, np.bool_), np.empty(n, np.bool_)
    done, confirmed, ended = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    gaps: Records = np.empty(n, TOKEN)
    notes = life.trace.records
    worked, over, gave, first, failed = take_results(
        t.records, r.rows, r.epochs, r.new_tokens, r.failed, r.finish, d.tokens, d.samples,
        r.slot, now, valid, emitted, done, confirmed, ended, gaps, life.slot, notes.room(n),
    )  # fmt: skip
    notes.wrote(first)
    gaps = gaps[:gave]
    if life.policy.output_weight > 0.0:
        life.fairness.count_tokens(gaps["tenant"], r.new_tokens[emitted], life.policy.output_weight)
    fair, measured = life.fairness, float(now - r.started_ns)
    recharge(
        t.records, valid, r.rows, flight.groups, flight.charged, measured,
        fair.counter, fair.weight, fair.lane_counter,
    )  # fmt: skip
    fair.observe_slot(measured)
    life.kv.commit(done[:worked], confirmed[:worked])
    if over:
        ended = ended[:over]
        finishes = [_FINISH[f] for f in r.finish[ended].tolist()]
        life.end_all(r.rows[ended], Outcome.COMPLETED, Reason.NONE, now, finishes)
    if failed:
        _end_failed(life, valid & r.failed, result)
    life.prompts_done(now)
    return Applied(emitted, gaps)


def _end_failed(life: Lifecycle, failed: Bool, result: StepResult) -> None:
    again = result.rows[failed & result.retryable]
    if again.size:
        life.preempt(again, Event.RETRIED, Reason.ENGINE_ERROR, result.ended_ns)
    life.end_all(
        result.rows[failed & ~result.retryable], Outcome.FAILED, Reason.ENGINE_ERROR, result.ended_ns
    )
