"""The scheduler: submit, decide, apply, cancel. One decision per slot on one replica, over arrays.

Single-threaded by design: one owner calls it. It never blocks, reads no clock and keeps no ledger of
KV: `now` is an argument, and blocks are whatever its `KVSpace` says.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from kaiseki.core.adapters import Adapters, count_passes
from kaiseki.core.admission import Refusal, has_room, hopeless, never_runs, queue_full
from kaiseki.core.applying import Applied, apply_step
from kaiseki.core.composing import (
    arrange,
    arrange_all,
    phases_of_prefills,
    scores_of_prefills,
    slot_bound_ns,
)
from kaiseki.core.costs import add_decode, lone_rates, predict_ns
from kaiseki.core.decision import F64, I32, Bool, Decision, How, StepResult
from kaiseki.core.entries import (
    ENTRY,
    joined,
    no_entries,
    running_entries,
    shut_out,
    sift,
    waiting_entries,
)
from kaiseki.core.fairness import Fairness
from kaiseki.core.filling import R_LAG, fill, no_features
from kaiseki.core.lanes import LANES, per_tenant
from kaiseki.core.lifecycle import Ending, Lifecycle
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
from kaiseki.core.pausing import ranks_of_decodes
from kaiseki.core.policy import Order, Policy
from kaiseki.core.preemption import choose_forced, choose_purchase, newcomer_value, victim_prices
from kaiseki.core.protocols import F_DECODES, F_TOKENS, Capabilities, CostModel, KVSpace, OutOfBlocks
from kaiseki.core.quantum import Quantum
from kaiseki.core.queues import Waiting
from kaiseki.core.reasons import Event, Outcome, Reason
from kaiseki.core.recording import record_slot
from kaiseki.core.requests import NEVER_NS, OnLate, Request
from kaiseki.core.scan import CONTEXT, GROWTH, N_DECODES, N_LOST, OLDEST, PROMISED, Scan, scan
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.starting import InFlight, put_in_flight
from kaiseki.core.table import NO_ROW, Records, RequestTable, State
from kaiseki.core.trace import Trace

_REMEMBERED_SLOTS = 10_000
"""For how long the next arrival is expected to have a target that was seen before."""


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
        self._ttft_seen: deque[tuple[int, int]] = deque()  # (slot, ns)
        self._slots_without_prefill = 0
        self._champion_waits = 0
        self._planes = cost.planes()
        rates = lone_rates(self._planes)
        pace = Pace(token_ns=rates[1], slot_ns=rates[2])
        self.life = Lifecycle(
            self.table, self.waiting, kv, self.fairness, self.trace, policy, pace, self.adapters, rates
        )

    # ------------------------------------------------------------------ requests in and out

    def set_tenant(self, name: str, weight: float) -> None:
        """Set a tenant's share; unknown tenants have weight 1.

        Raises:
            ValueError: the weight is not positive.
        """
        self.fairness.set_weight(name, weight)

    def submit(self, request: Request, now: int) -> Refusal | None:
        """Queue a request, or say why not.

        One that has begun elsewhere takes its blocks now, and is queued by `landed`.

        Raises:
            ValueError: the id is open already, or a length is below 1.
            OutOfBlocks: it has begun elsewhere, and its KV finds no room; see `has_room`.
        """
        if request.id in self.life.ids:
            raise ValueError(f"request id {request.id!r} is already open")
        if request.prompt_tokens < 1 or request.max_tokens < 1:
            raise ValueError(
                f"request {request.id!r}: prompt_tokens={request.prompt_tokens}, "
                f"max_tokens={request.max_tokens}; both must be >= 1"
            )
        refusal = never_runs(request, self.policy, self.capabilities, self.kv)
        if request.begun is not None and refusal is None and not self.has_room(request):
            raise OutOfBlocks(f"request {request.id!r}: ask has_room before its KV is sent")
        if request.begun is None and refusal is None:
            refusal = queue_full(request, self.settings, self.waiting, self.drain_s()) or hopeless(
                request, self.policy, self.life.rates
            )
        if refusal is not None:
            return refusal
        if request.ttft_target_ns is not None and request.begun is None:
            self._remember_ttft(request.ttft_target_ns)
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

    def tightest_ttft_ns(self) -> int:
        """The tightest TTFT among the last `_REMEMBERED_SLOTS` slots' arrivals, NEVER_NS without any."""
        seen, since = self._ttft_seen, self.life.slot - _REMEMBERED_SLOTS
        while seen and seen[0][0] < since:
            seen.popleft()
        return seen[0][1] if seen else NEVER_NS

    def _remember_ttft(self, ttft_ns: int) -> None:
        """Targets rise in the queue: one that was seen before a tighter one can't be the tightest again."""
        seen = self._ttft_seen
        while seen and seen[-1][1] >= ttft_ns:
            seen.pop()
        seen.append((self.life.slot, ttft_ns))

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
        life = self.life
        life.enqueue_arrivals()
        life.slot += 1
        self._planes = self.cost.planes()
        life.rates = lone_rates(self._planes)
        if self.policy.gives_up:
            self._give_up_waiting(now)
        found = self._scan(now)
        if found.counts[N_LOST]:
            found = self._give_up_running(found, now)
        if self.champion == NO_ROW or self.table.state[self.champion] != State.RUNNING:
            self.champion = int(found.counts[OLDEST])
            self._champion_waits = 0
            if found.counts[OLDEST] != NO_ROW:
                found = self._scan(now)  # what the new champion needs counts as well
        forced = self._make_room(found, now)
        if forced.size:
            found = self._scan(now)
        new = no_entries() if forced.size else self._candidates(now, work_limit)
        filled = self._fill(found, new, now, NO_ROW)
        bought = forced[:0]
        if new.size and (self.policy.buys or self.policy.fair):
            bought, newcomer = self._displace(filled.entries, now)
            if bought.size:
                found = self._scan(now)
                # A victim's blocks are idle now, and a fork can no longer share them.
                new = self._measure(filled.entries["row"][filled.entries["waiting"]])
                filled = self._fill(found, new, now, newcomer)
        decision = self._emit(filled, found, now)
        if self.policy.fair:
            waiting = self.waiting
            self.fairness.settle(filled.entries, waiting.by_group(), waiting.reachable(), filled.limits)
        if forced.size or bought.size:
            decision.preempted = np.concatenate([forced, bought])
            decision.how = np.full(decision.preempted.size, How.RECOMPUTE, np.int8)
        return decision

    def _scan(self, now: int) -> Scan:
        return scan(
            self.table,
            now,
            self.capabilities.placeholders,
            self.policy.gives_up,
            self.life.rates,
            self.kv.block_tokens,
            self.champion,
        )

    def _give_up_waiting(self, now: int) -> None:
        """Drop or demote waiting requests that can't meet their SLO any more, latest start first."""
        rows = self.waiting.due(now, self.settings.window)
        if rows.size == 0:
            return
        known = self.table.prompt[rows] + self.table.outputs[rows]
        cached = self.kv.cached_tokens(rows, known - 1)[:, 0]
        latest = self.life.latest_start(rows, known - cached)
        can = latest >= now
        self.waiting.watch(rows[can], latest[can])
        self._lose(rows[~can], Reason.HOPELESS, now)

    def _give_up_running(self, found: Scan, now: int) -> Scan:
        """Drop or demote running requests that are lost, and look again."""
        lost = found.rows[found.found["lost"]]
        late = self.table.outputs[lost] > 0
        self._lose(lost[late], Reason.LATE_GAPS, now)
        self._lose(lost[~late], Reason.HOPELESS, now)
        return self._scan(now)

    def _lose(self, rows: I32, reason: Reason, now: int) -> None:
        fate = self.table.on_late[rows]
        demoted = rows[(fate == OnLate.DEMOTE) & ~self.table.demoted[rows]]
        if demoted.size:
            self.life.demote(demoted, reason, now)
        self.life.end_all(rows[fate == OnLate.EXPIRE], Outcome.EXPIRED, reason, now)

    def _make_room(self, found: Scan, now: int) -> I32:
        """Stop the cheapest running rows when decodes (and the champion) can't get their next block."""
        limbo = self.kv.total_blocks - self.kv.free_blocks() - self.kv.live_blocks()
        shortage = int(found.counts[GROWTH]) - self.kv.free_blocks() - limbo
        if shortage <= 0:
            return np.empty(0, np.int32)
        rows = self.table.running_rows()
        others = rows[rows != self.champion]
        ranked = self._cheapest_first(others, now)
        victims = choose_forced(ranked, self.kv.reclaimable(ranked), shortage)
        if victims.size:
            self.life.preempt(victims, Event.PREEMPTED, Reason.FORCED_BY_GROWTH, now, float(shortage))
        return victims

    def _cheapest_first(self, rows: I32, now: int) -> I32:
        """Running rows in increasing order of what stopping each loses per block; the youngest loses ties."""
        t = self.table
        held = -(-t.computed[rows].astype(np.int64) // self.kv.block_tokens)
        cost = self.policy.victim_cost(self.life.view(rows, t.computed[rows]), held, now)
        ranked: I32 = rows[np.lexsort((-t.admitted_seq[rows], cost))]
        return ranked

    def _candidates(self, now: int, work_limit: int | None) -> Records:
        """Look at the best few waiting requests that can still make it."""
        t = self.table
        free_rows = self.settings.max_batch_size - t.running_count
        if len(self.waiting) == 0 or (self.policy.whole_batch and t.running_count):
            return no_entries()
        if self.adapters.slots:
            self.adapters.want(self.waiting.by_adapter())
            self._take_stock()
        tenants = per_tenant(self.waiting.reachable()) > 0
        count = int(np.count_nonzero(tenants))
        window = max(self.settings.window, count) if self.policy.fair else self.settings.window
        limit = min(window, max(free_rows, 1 if self.policy.buys or self.policy.fair else 0))
        limit = min(limit, len(self.waiting), window if work_limit is None else work_limit)
        if limit <= 0:
            return no_entries()
        if self.policy.counts_tokens:
            # Whom the counters favour may have the later arrivals, so there are more to choose from.
            window = max(self.settings.window, count)
            limit = window if work_limit is None else min(window, work_limit)
        # Those whose adapter can't be had take nobody's place among the candidates.
        stuck = self._stuck(self.settings.window if work_limit is None else work_limit)
        if work_limit is not None:
            limit = min(limit, work_limit - stuck.size)
        quota = self._quota(tenants, max(count, 1), limit)
        # Where rows are short, who gets the next one is decided here.
        skip = None
        if self.policy.fair and limit < len(self.waiting):
            skip = self.fairness.lanes_ahead(self.waiting.reachable())
        rows = self.waiting.peek(limit, quota, skip)
        new = self._measure(np.concatenate([rows, stuck]) if stuck.size else rows)
        looked = new.size
        while self.policy.gives_up:
            # The latest-start heap gives up a window of requests per slot; nobody is admitted after it.
            rows = np.ascontiguousarray(new["row"])
            latest = self.life.latest_start(rows, np.ascontiguousarray(new["need"]))
            if latest.min(initial=np.inf) >= now:
                break
            lost = (latest < now) & ~t.demoted[rows] & (t.on_late[rows] != OnLate.KEEP)
            if not lost.any():
                break
            np.add.at(quota, t.tenant[rows[lost]], 1)
            self._lose(rows[lost], Reason.HOPELESS, now)
            left = limit if work_limit is None else min(limit, work_limit - looked)
            more = self.waiting.peek(max(0, min(int(lost.sum()), left)), quota, skip)
            looked += more.size
            new = self._measure(np.concatenate([rows[~lost], more]))
        return new

    def _take_stock(self) -> int:
        """Find out which adapters can be had now. Returns how many slots are left for any of them."""
        room = self.adapters.take_stock(self.settings.max_passes)
        self.waiting.leave_out(self.adapters.out_of_reach(room))
        return room

    def _stuck(self, looks: int) -> I32:
        """The first few waiting rows whose adapter can't be had: that they were passed over is counted."""
        if not self.adapters.slots or looks < 2:
            return np.empty(0, np.int32)
        return self.waiting.stuck(max(looks // 4, 1))

    def _quota(self, tenants: Bool, count: int, limit: int) -> I32:
        """int32[tenants]: how many of each tenant's waiting requests to look at.

        Equal parts; where there is room for fewer than there are tenants, one each of those that had least.
        """
        if not (self.policy.fair or self.policy.counts_tokens):
            return np.full(tenants.size, limit, np.int32)
        if limit >= count:
            return np.full(tenants.size, -(-limit // count), np.int32)
        quota = np.zeros(tenants.size, np.int32)
        waiting = np.flatnonzero(tenants)
        fair = self.fairness
        counter = (fair.tokens if self.policy.counts_tokens else fair.counter)[waiting]
        quota[waiting[np.argpartition(counter, limit - 1)[:limit]]] = 1
        return quota

    def _measure(self, rows: I32) -> Records:
        """What each of these waiting requests would need if it were admitted now."""
        t = self.table
        rows = np.ascontiguousarray(rows)
        cached = self.kv.cached_tokens(rows, t.prompt[rows] + t.outputs[rows] - 1)
        return waiting_entries(t, rows, cached, self.kv.block_tokens, self.settings.max_passes)

    def _fill(self, found: Scan, new: Records, now: int, first: int) -> Filled:
        """Order all entries and grant what fits."""
        t, s, p = self.table, self.settings, self.policy
        bound_ns = slot_bound_ns(p, found, self.tightest_ttft_ns())
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
            limits[L_ADAPTERS] = self._take_stock()
        if first == NO_ROW and self._champion_waits >= p.starving_slots:
            first = self.champion  # or those with better keys could keep it from ever finishing
        limits[L_SOLE] = float(t.running_count == 0)
        entries = self._arrange(found, new, now, first, bound_ns / headroom, limits)
        lag = hard = np.inf
        if p.fair and self.fairness.lag_ns > 0:
            lag = self.fairness.lag_ns
            hard = self.fairness.hard_lag_ns if self.capabilities.pause_decode else np.inf
        # The champion passes the gates only when it would otherwise get nothing for too long.
        exempt = self.champion if self._champion_waits >= p.starving_slots else NO_ROW
        rules = np.array(
            [
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
            ]
        )
        return Filled(*self._grant(entries, rules, limits), limits, bound_ns)

    def _grant(self, entries: Records, rules: F64, limits: F64) -> tuple[Records, F64]:
        """Walk the entries; while some are put off for others that wait, look at more of these."""
        features, trial, fair = no_features(), no_features(), self.fairness
        counter, lane_counter = fair.comparable()  # the real ones are charged when grants are carried out
        more, lane_more = np.zeros(counter.size, np.int32), np.zeros(lane_counter.size, np.int32)
        lane_deep = np.zeros(lane_counter.size, np.int64)
        deep = np.zeros(counter.size, np.int64)
        looking = self.settings.window if self.policy.fair else 0
        while True:
            if looking > 0:
                groups = self.waiting.reachable()[: lane_deep.size]  # one tenant too many before the first
                lane_deep[: groups.size] = groups
                deep[: groups.size // LANES] = per_tenant(groups)
            else:
                deep[:], lane_deep[:] = 0, 0
            put_off = fill(
                entries, features, trial, self._planes, rules, limits, counter, fair.weight,
                more, deep, lane_counter, lane_more, lane_deep, self.adapters.records,
            )  # fmt: skip
            if self.adapters.slots:
                self.waiting.leave_out(self.adapters.out_of_reach(limits[L_ADAPTERS]))
            if not put_off or looking <= 0:
                return entries, features
            rows = self._behind(entries, counter, lane_counter, rules[R_LAG])
            stopped = self.table.preempted_slot[rows] == self.life.slot  # or it would run on at once
            self.waiting.put_back(rows[stopped])
            rows = rows[~stopped]
            looking = looking - rows.size if rows.size else 0
            entries = joined(entries, self._measure(rows))

    def _behind(self, entries: Records, counter: F64, lane_counter: F64, lag: float) -> I32:
        """Waiting rows for whose sake others were put off: the first of each lane that is behind."""
        waiting = self.waiting
        groups = np.flatnonzero(waiting.reachable() > 0)
        put_off = entries[entries["open"]]
        tenants, lanes = np.unique(put_off["tenant"]), np.unique(put_off["group"])
        behind = counter[groups // LANES] < counter[tenants].max(initial=-np.inf) - lag
        for group in lanes.tolist():
            behind |= (groups // LANES == group // LANES) & (lane_counter[groups] < lane_counter[group] - lag)
        return waiting.heads(groups[behind].astype(np.int32), self.settings.window)

    def _arrange(
        self, found: Scan, new: Records, now: int, first: int, within_ns: float, limits: F64
    ) -> Records:
        """Entries in the order in which they are offered a grant."""
        t, p = self.table, self.policy
        running = running_entries(t, found, self.kv.block_tokens)
        decodes = int(found.counts[N_DECODES])
        crowd = no_features()
        if decodes:
            add_decode(crowd, float(found.counts[CONTEXT] + decodes))
            crowd[F_DECODES] = decodes
        roomy = predict_ns(self._planes, crowd) <= within_ns and decodes <= limits[L_TOKENS]
        others = joined(running[decodes:], new)
        apart = roomy and p.order != Order.ADMISSION
        if apart and others.size == 0:
            return running
        phase = phases_of_prefills(p, t, others, first, self.settings.max_passes)
        if apart:
            score = scores_of_prefills(p, t, others, self._scores(others, now))
            return arrange(t, running, others, found, phase, score)
        entries = joined(running[:decodes], others)
        score = scores_of_prefills(p, t, entries, self._scores(entries, now))
        rank = ranks_of_decodes(t, entries, now, self.life.rates[2], found.tightest_ns)
        return arrange_all(p, t, entries, np.concatenate([np.zeros(decodes), phase]), rank, score)

    def _scores(self, entries: Records, now: int) -> F64:
        rows = np.ascontiguousarray(entries["row"])
        view = self.life.view(rows, entries["need"])
        if self.adapters.slots:
            view.load_ns = self.adapters.loads_of(entries)
        return self.policy.rescore(view, self.waiting.keys(rows), now)

    def _displace(self, entries: Records, now: int) -> tuple[I32, int]:
        """Stop running requests for the first newcomer that found no room, if it may. Victims, newcomer."""
        none = np.empty(0, np.int32)
        out = np.empty(entries.size, np.int32)
        out = out[: shut_out(entries, out)]
        if out.size == 0:
            return none, NO_ROW
        if self.policy.fair:
            victims, newcomer = self._repossess(entries[out], now)
            if victims.size:
                return victims, newcomer
        out = out[~self.table.demoted[entries["row"][out]]]
        if out.size and self.policy.buys:
            return self._buy(entries[out[0]], now)
        return none, NO_ROW

    def _repossess(self, shut_out: Records, now: int) -> tuple[I32, int]:
        """A tenant further ahead than H gives way to one that lacks room: whoever costs least is stopped."""
        t, fair = self.table, self.fairness
        counters = fair.counter[shut_out["tenant"]]
        i = int(np.argmin(counters))
        rows = t.running_rows()
        ahead = fair.counter[t.tenant[rows]] - counters[i] > fair.hard_lag_ns
        rows = rows[ahead & (rows != self.champion)]
        if rows.size == 0 or fair.lag_ns <= 0:
            return rows[:0], NO_ROW
        ranked = self._cheapest_first(rows, now)
        if shut_out["reason"][i] == Reason.NO_ROW:
            victims = ranked[:1]
        else:
            short, freed = int(np.ceil(shut_out["short"][i])), self.kv.reclaimable(ranked)
            # Stopping them for less than it needs would only make them compute everything twice.
            victims = choose_forced(ranked, freed, short) if freed[-1] >= short else ranked[:0]
        newcomer = int(shut_out["row"][i])
        if victims.size:
            gap = float(fair.counter[t.tenant[victims]].max() - counters[i])
            seq = int(t.seq[newcomer])
            self.life.preempt(victims, Event.PREEMPTED, Reason.FAIR_SHARE, now, gap, seq)
        return victims, newcomer

    def _buy(self, wants: Records, now: int) -> tuple[I32, int]:
        """Stop running requests for one newcomer that found no room, if that pays."""
        none = np.empty(0, np.int32)
        t, life, s = self.table, self.life, self.settings
        newcomer = life.view(np.array([wants["row"]]), np.array([wants["need"]]))
        tau = self.policy.tau_ms * 1e6
        value = newcomer_value(newcomer, now, tau, s.slo_lambda)
        if value <= life.rates[0] / 1e9:  # nobody costs less than one slot
            return none, NO_ROW
        rows = t.running_rows()
        rows = rows[(rows != self.champion) & (t.preempted_slot[rows] + s.fairness_window < life.slot)]
        prices = victim_prices(life.view(rows, t.computed[rows]), newcomer, now, tau, s.slo_lambda)
        order = np.argsort(prices, kind="stable")
        order = order[np.isfinite(prices[order])]
        ranked = rows[order]
        short = 0 if wants["reason"] == Reason.NO_ROW else int(np.ceil(wants["short"]))
        deal = choose_purchase(ranked, prices[order], self.kv.reclaimable(ranked), short, value)
        if deal is None:
            return none, NO_ROW
        seq = int(t.seq[newcomer.rows[0]])
        life.preempt(deal.victims, Event.PREEMPTED, Reason.PURCHASED, now, deal.price, seq)
        self.trace.note(life.slot, now, t.seq[newcomer.rows], Event.ADMITTED, Reason.PURCHASED, deal.value)
        return deal.victims, int(newcomer.rows[0])

    def _emit(self, filled: Filled, found: Scan, now: int) -> Decision:
        """Turn grants into a decision: attach, reserve, advance the table, record."""
        life, entries = self.life, filled.entries
        granted: Records = np.empty(entries.size, ENTRY)
        admitted, turned = np.empty((2, entries.size), np.int32)
        n, n_new, n_turned = sift(entries, granted, admitted, turned)
        granted = granted[:n]
        if n_turned:
            self.waiting.put_back(turned[:n_turned])
        if n_new:
            self._attach(granted[admitted[:n_new]], now)
        granted, copies = self._reserve(granted)
        served = self.champion == NO_ROW or bool((granted["row"] == self.champion).any())
        self._champion_waits = 0 if served else self._champion_waits + 1
        loads, stuck = np.empty((0, 2), np.int32), 0
        if self.adapters.slots:
            loads = self.adapters.bring_in(self.table.records, granted, life.slot)
            stuck = count_passes(entries, self.adapters.records, life.slot)
        flight, prefills = put_in_flight(
            self.table.records, granted, life.slot, self._planes, filled.features, self.fairness,
            loads, self.adapters.load_ns,
        )  # fmt: skip
        decision = flight.decision
        decision.copies = copies
        decision.bound_ns = int(min(filled.bound_ns, NEVER_NS))
        starved = prefills == 0 and entries.size - stuck > found.counts[N_DECODES]
        self._slots_without_prefill = self._slots_without_prefill + 1 if starved else 0
        if granted.size:
            self._inflight[life.slot] = flight
        record_slot(life, self.settings, entries, now)
        return decision

    def _attach(self, admitted: Records, now: int) -> None:
        """Give newly admitted rows the KV they can share, and mark them as running."""
        rows, starts, parents = admitted["row"].copy(), admitted["start"].copy(), admitted["parent"]
        forks = np.flatnonzero(parents != NO_ROW)
        for i in forks.tolist():
            self.kv.fork(int(parents[i]), int(rows[i]), int(starts[i]))
            self.table.shared_tail[[rows[i], parents[i]]] = True
        if forks.size < rows.size:
            plain = (parents == NO_ROW) & ~self.table.brought[rows]
            self.kv.attach(rows[plain], starts[plain])
        self.life.start(rows, starts, now)

    def _reserve(self, granted: Records) -> tuple[Records, I32]:
        """Take blocks for the chunks; what does not fit after all is left out. Returns copies as well."""
        rows, start = np.ascontiguousarray(granted["row"]), granted["start"]
        end = start + granted["chunk"]
        try:
            return granted, self.kv.reserve(rows, start, end)
        except OutOfBlocks:
            fits = np.cumsum(self.kv.growth_need(rows, start, end)) <= self.kv.free_blocks()
            return granted[fits], self.kv.reserve(rows[fits], start[fits], end[fits])

    # ------------------------------------------------------------------ apply

    def apply(self, result: StepResult) -> Applied:
        """Take in what a step did; see `applying.apply_step`."""
        flight = self._inflight.pop(result.slot)
        measured = result.ended_ns - result.started_ns
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
