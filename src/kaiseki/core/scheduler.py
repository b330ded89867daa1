"""The scheduler: submit, decide, apply, cancel. One decision per slot on one replica, over arrays.

Single-threaded by design: one owner calls it. It never blocks, reads no clock and keeps no ledger of
KV: `now` is an argument, and blocks are whatever its `KVSpace` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kaiseki.core.adapters import Adapters, count_passes
from kaiseki.core.admission import Refusal, has_room, hopeless, never_runs, queue_full
from kaiseki.core.applying import Applied, apply_step
from kaiseki.core.candidates import find_candidates, give_up_waiting, measure, take_stock
from kaiseki.core.composing import in_order, slot_bound_ns
from kaiseki.core.costs import lone_rates
from kaiseki.core.decision import F64, I32, Decision, How, StepResult
from kaiseki.core.displacing import displace, make_room
from kaiseki.core.endings import Ending
from kaiseki.core.entries import (
    ENDS,
    ENTRY,
    N_SIFTED,
    NEW_PLACES,
    NEW_ROWS,
    NEW_STARTS,
    TURNED,
    WARM,
    lay_out,
    no_entries,
    sift,
)
from kaiseki.core.fairness import Fairness
from kaiseki.core.filling import no_features
from kaiseki.core.granting import grant
from kaiseki.core.lifecycle import Lifecycle
from kaiseki.core.limits import (
    L_ADAPTERS,
    L_ADMISSION,
    L_BLOCKS,
    L_ROWS,
    L_SOLE,
    L_STARVING,
    L_TOKENS,
    N_LIMITS,
)
from kaiseki.core.pace import Pace
from kaiseki.core.policy import Policy
from kaiseki.core.protocols import F_TOKENS, Capabilities, CostModel, KVSpace, OutOfBlocks
from kaiseki.core.quantum import Quantum
from kaiseki.core.queues import Waiting
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.core.recording import record_slot
from kaiseki.core.requests import NEVER_NS, Request
from kaiseki.core.scan import N_DECODES, N_LOST, N_PREFILLS, OLDEST, PROMISED, Scan, scan
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.staging import leave_to_later_slots
from kaiseki.core.starting import InFlight, add_chunks, attach, put_in_flight, reserve
from kaiseki.core.switching import LinearSwitch
from kaiseki.core.table import NO_ROW, Records, RequestTable, State
from kaiseki.core.targets import RecentTargets
from kaiseki.core.trace import Trace

_NO_LOADS = np.empty((0, 2), np.int32)

_NEXT = 8
"""Of so many requests that wait next, the cached prefix is evicted last."""


class Filled(NamedTuple):
    """A slot before it is carried out.

    Attributes:
        entries: ENTRY[n] with their answers, in order.
        features: float64[N_FEATURES] of what was granted.
        limits: float64[N_LIMITS], what is left.
        bound_ns: how long the slot may last; infinite without a bound.
    """

    entries: Records
    features: F64
    limits: F64
    bound_ns: float


@dataclass(slots=True)
class Plan:
    """A slot that is decided and not carried out.

    Attributes:
        slot: its number.
        filled: the entries with what they are granted.
        found: what running rows could do.
        preempted: int32[m], rows that were stopped for it.
        changed: whether `start`, `chunk` or `reason` of entries were changed since.
        led: whether somebody else decides; see `Scheduler.follow`.
    """

    slot: int
    filled: Filled
    found: Scan
    preempted: I32
    changed: bool = False
    led: bool = False


class Scheduler:
    """The scheduling core of one replica.

    Args:
        policy: ordering and traits.
        kv: where KV lives.
        cost: how long steps take.
        capabilities: what the engine can do.
        settings: limits.
        origin_ns: a time no later than any that will be passed in.
    """

    def __init__(
        self,
        policy: Policy,
        kv: KVSpace,
        cost: CostModel,
        capabilities: Capabilities | None = None,
        settings: SchedulerSettings | None = None,
        origin_ns: int = 0,
    ) -> None:
        self.policy = policy
        self.kv = kv
        self.cost = cost
        self.capabilities = capabilities or Capabilities()
        self.settings = settings or SchedulerSettings()
        self.table = RequestTable()
        self.fairness = Fairness(self.settings.fairness_window)
        self.quantum = Quantum(self.settings.quantum_tokens, self.settings.decide_share)
        self.trace = Trace()
        self.waiting = Waiting(self.table, origin_ns)
        self.champion = NO_ROW
        self.adapters = Adapters(self.capabilities.adapter_slots, self.capabilities.adapter_load_ns)
        self._inflight: dict[int, InFlight] = {}
        self._targets = RecentTargets()
        self._slots_without_prefill = 0
        self._champion_waits = 0
        self._planes = cost.planes()
        rates = lone_rates(self._planes)
        pace = Pace(token_ns=rates[1], slot_ns=rates[2])
        block_ns = self.capabilities.swap_block_ns
        self.life = Lifecycle(
            self.table, self.waiting, kv, self.fairness, self.trace, policy, pace, self.adapters,
            LinearSwitch(block_ns) if block_ns else None, rates,
        )  # fmt: skip

    # ------------------------------------------------------------------ requests in and out

    def set_tenant(self, name: str, weight: float) -> None:
        """Set a tenant's share; unknown tenants have weight 1.

        Raises:
            ValueError: the weight is not positive.
        """
        self.fairness.set_weight(name, weight)

    def submit(self, request: Request, now: int) -> Refusal | None:
        """Queue a request, or say why not.

        One whose KV is sent from elsewhere takes its blocks now, and is queued by `landed`.

        Raises:
            ValueError: the id is open already, or a length is below 1.
            OutOfBlocks: its KV is sent from elsewhere, and finds no room; see `has_room`.
        """
        if request.id in self.life.ids:
            raise ValueError(f"request id {request.id!r} is already open")
        if request.prompt_tokens < 1 or request.max_tokens < 1:
            raise ValueError(
                f"request {request.id!r}: prompt_tokens={request.prompt_tokens}, "
                f"max_tokens={request.max_tokens}; both must be >= 1"
            )
        refusal = never_runs(request, self.policy, self.capabilities, self.kv)
        sent = request.begun is not None and request.begun.sent
        if sent and refusal is None and not self.has_room(request):
            raise OutOfBlocks(f"request {request.id!r}: ask has_room before its KV is sent")
        if request.begun is None and refusal is None:
            refusal = queue_full(request, self.settings, self.waiting, self.drain_s()) or hopeless(
                request, self.policy, self.life.rates
            )
        if refusal is not None:
            return refusal
        if request.ttft_target_ns is not None and request.begun is None:
            self._targets.add(self.life.slot, request.ttft_target_ns)
        self.life.open(request, now)
        return None

    def has_room(self, request: Request) -> bool:
        """Whether the KV of a request that has begun elsewhere may be sent here now."""
        if never_runs(request, self.policy, self.capabilities, self.kv) is not None:
            return False
        return has_room(request, self.table, self.kv, self.settings.watermark_ratio)

    def landed(self, request_id: str, now: int) -> None:
        """The KV of a request that has begun elsewhere is here."""
        self.life.landed(self.life.ids[request_id], now)

    def handed_over(self, request_id: str) -> None:
        """The KV of a request that ended here, to go on elsewhere, has been sent or is not wanted."""
        self.life.handed_over(self.life.ids[request_id])

    def cancel(self, request_id: str, now: int, reason: Reason = Reason.CLIENT_GONE) -> bool:
        """End an open request; its blocks are free by the next slot. False when it is not open."""
        row = self.life.ids.get(request_id)
        if row is None or self.table.state[row] == State.GOING:
            return False
        self.life.end(row, Outcome.CANCELLED, reason, now)
        return True

    def take_endings(self) -> list[Ending]:
        """Requests that ended since the last call."""
        endings, self.life.endings = self.life.endings, []
        return endings

    def drain_s(self) -> float:
        """How long the waiting prompts alone would keep the card busy, seconds, at least 1."""
        return max(1.0, self.waiting.tokens * self.life.rates[1] / 1e9)

    # ------------------------------------------------------------------ decide

    def decide(self, now: int, work_limit: int | None = None) -> Decision:
        """One slot: who runs, how much, in which order, and who is stopped.

        Args:
            now: time, ns.
            work_limit: most waiting candidates to look at; None for the setting.
        """
        return self.carry_out(self.plan(now, work_limit), now)

    def plan(self, now: int, work_limit: int | None = None) -> Plan:
        """The first half of `decide`: who is stopped is stopped, what is granted is not carried out yet.

        An engine that has the last word may write what it will really do into the plan's entries, and says
        so by `Plan.changed`; nothing else may be called before `carry_out`.
        """
        life = self.life
        self._begin_slot()
        if self.policy.gives_up:
            give_up_waiting(life, self.settings.window, now)
        found = self._scan(now)
        if found.counts[N_LOST]:
            found = self._give_up_running(found, now)
        found = self._elect(found, now)
        forced = make_room(life, found, self.champion, now)
        if forced.size:
            found = self._scan(now)
        new = no_entries() if forced.size else find_candidates(life, self.settings, now, work_limit)
        filled = self._fill(found, new, now, NO_ROW)
        bought = forced[:0]
        if new.size and (self.policy.buys or self.policy.fair):
            bought, newcomer = displace(life, self.settings, filled.entries, self.champion, now)
            if bought.size:
                found = self._scan(now)
                # A victim's blocks are idle now, and a fork can no longer share them.
                rows = filled.entries["row"][filled.entries["waiting"]]
                new, _ = measure(life, self.settings, rows, now)
                filled = self._fill(found, new, now, newcomer)
        return Plan(life.slot, filled, found, np.concatenate([forced, bought]))

    def follow(self, rows: I32, now: int) -> Plan:
        """In place of `plan`, where somebody else decides: nothing is granted, nobody stopped or given up.

        What is done is to be written into the plan's entries: those of all running rows that can do
        something, then one for each of `rows`.

        Args:
            rows: int32[n], waiting rows that will be admitted.
            now: time, ns.
        """
        self._begin_slot()
        found = self._elect(self._scan(now), now)
        new, _ = measure(self.life, self.settings, rows, now)
        running = int(found.counts[N_DECODES] + found.counts[N_PREFILLS])
        entries: Records = np.empty(running + new.size, ENTRY)
        lay_out(
            self.table.records, found.found, found.counts, self.kv.block_tokens, new, self._planes,
            no_features(), entries,
        )  # fmt: skip
        filled = Filled(entries, no_features(), np.zeros(N_LIMITS), np.inf)
        return Plan(self.life.slot, filled, found, rows[:0], True, True)

    def carry_out(self, plan: Plan, now: int) -> Decision:
        """The second half of `decide`: what the plan's entries grant is in flight afterwards."""
        filled = plan.filled
        if plan.changed:
            features = no_features()
            add_chunks(filled.entries, features)
            filled = filled._replace(features=features)
        decision = self._emit(filled, plan.found, now)
        if self.policy.fair and not plan.led:
            waiting = self.waiting
            self.fairness.settle(filled.entries, waiting.by_group(), waiting.reachable(), filled.limits)
        if plan.preempted.size:
            decision.preempted = plan.preempted
            kept = np.isin(decision.preempted, self.life.swapped)
            decision.how = np.where(kept, How.SWAP, How.RECOMPUTE).astype(np.int8)
            self.life.swapped.clear()
        return decision

    def _begin_slot(self) -> None:
        self.life.enqueue_arrivals()
        self.life.slot += 1
        self._planes = self.cost.planes()
        self.life.rates = lone_rates(self._planes)

    def _elect(self, found: Scan, now: int) -> Scan:
        """Make sure that there is a champion; what a new one needs counts in the scan that is returned."""
        if self.champion != NO_ROW and self.table.state[self.champion] == State.RUNNING:
            return found
        self.champion = int(found.counts[OLDEST])
        self._champion_waits = 0
        return self._scan(now) if self.champion != NO_ROW else found

    def _scan(self, now: int) -> Scan:
        able = self.capabilities
        found = scan(
            self.table,
            now,
            able.placeholders,
            self.policy.gives_up,
            self.life.rates,
            self.kv.block_tokens,
            self.champion,
            self.life.scratch.found,
        )
        if able.depth and not able.placeholders:
            leave_to_later_slots(found, self.table, able.depth, self.kv.block_tokens)
        return found

    def _give_up_running(self, found: Scan, now: int) -> Scan:
        """Drop or demote running requests that are lost, and look again."""
        lost = found.rows[found.found["lost"]]
        late = self.table.outputs[lost] > 0
        self.life.lose(lost[late], Reason.LATE_GAPS, now)
        self.life.lose(lost[~late], Reason.HOPELESS, now)
        return self._scan(now)

    def _fill(self, found: Scan, new: Records, now: int, first: int) -> Filled:
        """Order all entries and grant what fits."""
        t, s, p = self.table, self.settings, self.policy
        bound_ns = slot_bound_ns(p, found, self._targets.tightest_ns(self.life.slot))
        headroom = self.cost.headroom() if p.time_bound else 1.0
        budget = s.max_slot_tokens if p.budget_tokens is None else p.budget_tokens
        limits = np.zeros(N_LIMITS)
        limits[L_TOKENS] = min(budget, self.capabilities.max_step_tokens)
        limits[L_ROWS] = s.max_batch_size - t.running_count
        limits[L_BLOCKS] = self.kv.free_blocks()
        ceiling = int(s.watermark_ratio * self.kv.total_blocks)
        limits[L_ADMISSION] = ceiling - self.kv.live_blocks() - int(found.counts[PROMISED])
        starved = max(self._slots_without_prefill, self._champion_waits)
        limits[L_STARVING] = float(starved >= p.starving_slots)
        if self.adapters.slots:
            limits[L_ADAPTERS] = take_stock(self.life, s.max_passes)
        if first == NO_ROW and self._champion_waits >= p.starving_slots:
            first = self.champion  # or those with better keys could keep it from ever finishing
        limits[L_SOLE] = float(t.running_count == 0)
        entries = in_order(
            self.life,
            found,
            new,
            now,
            first,
            self._planes,
            bound_ns / headroom,
            limits[L_TOKENS],
            limits[L_ADMISSION],
            s.max_passes,
        )
        lag = hard = np.inf
        if p.fair and self.fairness.lag_ns > 0:
            lag = self.fairness.lag_ns
            hard = self.fairness.hard_lag_ns if self.capabilities.pause_decode else np.inf
        # The champion passes the gates only when it would otherwise get nothing for too long.
        exempt = self.champion if self._champion_waits >= p.starving_slots else NO_ROW
        rules = np.array(
            (
                headroom,
                bound_ns,
                found.bare_ns if p.time_bound else np.inf,
                self.quantum.tokens,
                self.kv.block_tokens,
                p.chunked,
                p.strict,
                lag,
                hard,
                exempt,
                self.adapters.load_ns,
            ),
            np.float64,
        )
        return Filled(*grant(self.life, s, entries, self._planes, rules, limits, now), limits, bound_ns)

    def _emit(self, filled: Filled, found: Scan, now: int) -> Decision:
        """Turn grants into a decision: attach, reserve, advance the table, record."""
        life, entries = self.life, filled.entries
        sifted = np.empty((N_SIFTED, entries.size), np.int32)
        n, n_new, n_turned, n_warm, plain = sift(self.table.records, entries, sifted)
        if n_warm:
            warm = sifted[WARM, : min(n_warm, _NEXT)]
            self.kv.pin(warm, self.table.prompt[warm])
        if n_turned:
            self.waiting.put_back(sifted[TURNED, :n_turned])
        if n_new:
            new = entries if plain == n_new else entries[sifted[NEW_PLACES, :n_new]]
            attach(life, new, sifted[NEW_ROWS, :n_new], sifted[NEW_STARTS, :n_new], plain == n_new, now)
        places, rows, starts, ends = sifted[: ENDS + 1, :n]
        places, copies = reserve(self.kv, places, rows, starts, ends)
        loads, stuck = _NO_LOADS, 0
        if self.adapters.slots:
            loads = self.adapters.bring_in(self.table.records, entries, places, life.slot)
            stuck = count_passes(entries, self.adapters.records, life.slot)
        flight, prefills, served = put_in_flight(
            self.table.records, entries, places, self.champion, life.slot, self._planes, filled.features,
            self.fairness, loads, self.adapters.load_ns,
        )  # fmt: skip
        served = served or self.champion == NO_ROW
        self._champion_waits = 0 if served else self._champion_waits + 1
        decision = flight.decision
        decision.copies = copies
        if life.switching is not None and places.size:
            decision.swaps = self.kv.take_moves()
            decision.predicted_ns += int(life.switching.block_ns * len(decision.swaps))
        decision.bound_ns = int(min(filled.bound_ns, NEVER_NS))
        starved = prefills == 0 and entries.size - stuck > found.counts[N_DECODES]
        self._slots_without_prefill = self._slots_without_prefill + 1 if starved else 0
        if places.size:
            self._inflight[life.slot] = flight
        record_slot(life, self.settings, entries, now)
        return decision

    def apply(self, result: StepResult) -> Applied:
        """Take in what a step did; see `applying.apply_step`."""
        flight = self._inflight.pop(result.slot)
        measured = result.ended_ns - result.started_ns - result.swap_ns
        if self.life.switching is not None and flight.decision.swaps.size:
            self.life.switching.observe(len(flight.decision.swaps), result.swap_ns)
        if not flight.decision.loads.size:  # a step alone is what the model is about
            self.cost.observe(flight.features, measured)
        self.life.pace.observe(float(measured), int(flight.features[F_TOKENS]))
        applied = apply_step(self.life, flight, result)
        self.kv.retire(result.slot)
        self.adapters.retired = result.slot
        return applied

    @property
    def in_flight(self) -> int:
        """Decisions whose results have not been applied."""
        return len(self._inflight)

    def outstanding(self, slot: int) -> InFlight:
        """The decision of a slot whose result has not been applied, with what it was predicted from.

        Raises:
            KeyError: there is none.
        """
        return self._inflight[slot]
