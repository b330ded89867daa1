"""Applying a step's result: tokens, gaps, charges, endings. Stale results are dropped here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kaiseki.core.decision import F64, I32, I64, Bool, Decision, StepResult
from kaiseki.core.lifecycle import Lifecycle
from kaiseki.core.reasons import Event, Finish, Outcome, Reason
from kaiseki.core.table import State


@dataclass(slots=True)
class InFlight:
    """A decision whose result has not come yet.

    Attributes:
        decision: the decision.
        features: float64[N_FEATURES] of its chunk set.
        shares: float64[n], predicted marginal cost of each chunk, ns.
    """

    decision: Decision
    features: F64
    shares: F64


@dataclass(slots=True)
class Applied:
    """What a step changed, as arrays for metrics; parallel within each group.

    first_*: rows that got their first token (ttft in ns). gap_*: further tokens (gap in ns).
    emitted: bool[n] over the step's rows, whose new tokens count.
    """

    first_ttft_ns: I64
    first_tenant: I32
    first_cls: I32
    gap_ns: I64
    gap_tenant: I32
    gap_cls: I32
    emitted: Bool


def apply_step(life: Lifecycle, flight: InFlight, result: StepResult) -> Applied:
    """Take in what a step did. Results of rows that were preempted or ended meanwhile are dropped."""
    t, d, rows = life.table, flight.decision, result.rows
    valid = (t.epoch[rows] == result.epochs) & (t.state[rows] == State.RUNNING)
    measured = float(result.ended_ns - result.started_ns)
    charged = life.fairness.charge(t.tenant[rows[valid]], flight.shares[valid], measured)
    t.service_ns[rows[valid]] += charged
    good = valid & ~result.failed
    done = rows[good]
    t.confirmed[done] = np.maximum(t.confirmed[done], d.starts[good] + d.tokens[good])
    t.pending[done] -= d.samples[good]
    landed = done[t.inflight_slot[done] == result.slot]
    t.inflight_slot[landed] = -1
    applied = _count_tokens(life, done, result.new_tokens[good], result.ended_ns)
    applied.emitted = good & (result.new_tokens > 0)
    life.kv.commit(done, t.confirmed[done])
    _end_finished(life, good, result)
    _end_failed(life, valid & result.failed, result)
    life.prompts_done(result.ended_ns)
    return applied


def _count_tokens(life: Lifecycle, rows: I32, new: I32, ended_ns: int) -> Applied:
    """Advance outputs, stamp first tokens, judge gaps."""
    t = life.table
    got = rows[new > 0]
    first = got[t.outputs[got] == 0]
    later = got[t.outputs[got] > 0]
    gaps = ended_ns - t.last_token_ns[later]
    t.late_gaps[later] += gaps > t.tbt_ns[later]
    t.first_token_ns[first] = ended_ns
    t.outputs[rows] += new
    t.last_token_ns[got] = ended_ns
    life.trace.note(life.slot, ended_ns, t.seq[first], Event.FIRST_TOKEN, Reason.NONE)
    return Applied(
        first_ttft_ns=ended_ns - t.arrival_ns[first],
        first_tenant=t.tenant[first],
        first_cls=t.cls[first],
        gap_ns=gaps,
        gap_tenant=t.tenant[later],
        gap_cls=t.cls[later],
        emitted=np.empty(0, np.bool_),
    )


def _end_finished(life: Lifecycle, good: Bool, result: StepResult) -> None:
    t, rows = life.table, result.rows
    ended = good & ((result.finish != Finish.NONE) | (t.outputs[rows] >= t.max_tokens[rows]))
    for i in np.flatnonzero(ended):
        finish = Finish(int(result.finish[i])) or Finish.LENGTH
        life.end(int(rows[i]), Outcome.COMPLETED, Reason.NONE, result.ended_ns, finish)


def _end_failed(life: Lifecycle, failed: Bool, result: StepResult) -> None:
    again = result.rows[failed & result.retryable]
    if again.size:
        life.preempt(again, Event.RETRIED, Reason.ENGINE_ERROR, result.ended_ns)
    for row in result.rows[failed & ~result.retryable]:
        life.end(int(row), Outcome.FAILED, Reason.ENGINE_ERROR, result.ended_ns)
