"""The scheduler: submit, decide, apply, cancel. One decision per slot on one replica, over arrays.

Single-threaded by design: one owner calls it. It never blocks, reads no clock and keeps no ledger of
KV: `now` is an argument, and blocks are whatever its `KVSpace` says.
"""

from __future__ import annotations

import numpy as np

from kaiseki.core.admission import Refusal, hopeless, never_runs, queue_full
from kaiseki.core.applying import Applied, InFlight, apply_step
from kaiseki.core.composing import (
    entries_of,
    no_entries,
    order_of,
    promised_blocks,
    reorder,
    slot_bound_ns,
)
from kaiseki.core.costs import add_decode, lone_rates, marginal_ns, predict_ns
from kaiseki.core.decision import F64, I32, Decision, How, StepResult
from kaiseki.core.fairness import Fairness
from kaiseki.core.filling import (
    L_ADMISSION,
    L_BLOCKS,
    L_ROWS,
    L_SOLE,
    L_STARVING,
    L_TOKENS,
    N_LIMITS,
    Entries,
    fill,
    no_features,
)
from kaiseki.core.lifecycle import Ending, Lifecycle
from kaiseki.core.pace import Pace
from kaiseki.core.policy import Policy
from kaiseki.core.preemption import choose_forced, choose_purchase, newcomer_value, victim_prices
from kaiseki.core.protocols import F_DECODES, F_TOKENS, Capabilities, CostModel, KVSpace
from kaiseki.core.queues import Waiting
from kaiseki.core.reasons import Event, Outcome, Reason
from kaiseki.core.recording import record_slot
from kaiseki.core.requests import NEVER_NS, OnLate, Request
from kaiseki.core.scan import BOUND_DECODE, DECODE, PREFILL, Scan, scan
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.table import NO_ROW, RequestTable, State
from kaiseki.core.trace import Trace

_REMEMBERED_SLOTS = 10_000
"""For how long the next arrival is expected to have a target that was seen before."""
_NO_ROOM = (Reason.NO_ROW, Reason.NO_KV, Reason.WATERMARK)


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
        self.trace = Trace()
        self.waiting = Waiting(self.table, origin_ns)
        self.champion = NO_ROW
        self._inflight: dict[int, InFlight] = {}
        self._ttft_seen: dict[int, int] = {}
        self._slots_without_prefill = 0
        self._planes = cost.planes()
        rates = lone_rates(self._planes)
        pace = Pace(token_ns=rates[1], slot_ns=rates[2])
        self.life = Lifecycle(self.table, self.waiting, kv, self.fairness, self.trace, policy, pace, rates)

    # ------------------------------------------------------------------ requests in and out

    def set_tenant(self, name: str, weight: float) -> None:
        """Set a tenant's share; unknown tenants have weight 1.

        Raises:
            ValueError: the weight is not positive.
        """
        self.fairness.set_weight(name, weight)

    def submit(self, request: Request, now: int) -> Refusal | None:
        """Queue a request, or say why not.

        Raises:
            ValueError: the id is open already, or a length is below 1.
        """
        if request.id in self.life.ids:
            raise ValueError(f"request id {request.id!r} is already open")
        if request.prompt_tokens < 1 or request.max_tokens < 1:
            raise ValueError(
                f"request {request.id!r}: prompt_tokens={request.prompt_tokens}, "
                f"max_tokens={request.max_tokens}; both must be >= 1"
            )
        refusal = (
            never_runs(request, self.capabilities, self.kv)
            or queue_full(request, self.settings, self.waiting, self.drain_s())
            or hopeless(request, self.policy, self.life.rates)
        )
        if refusal is not None:
            return refusal
        if request.cls.ttft_ns is not None:
            self._ttft_seen[request.cls.ttft_ns] = self.life.slot
        self.life.open(request, now)
        return None

    def cancel(self, request_id: str, now: int, reason: Reason = Reason.CLIENT_GONE) -> bool:
        """End an open request; its blocks are free by the next slot. False when it is not open."""
        row = self.life.ids.get(request_id)
        if row is None:
            return False
        self.life.end(row, Outcome.CANCELLED, reason, now)
        return True

    def tightest_ttft_ns(self) -> int:
        """The tightest TTFT among the last `_REMEMBERED_SLOTS` slots' arrivals, NEVER_NS without any."""
        since = self.life.slot - _REMEMBERED_SLOTS
        self._ttft_seen = {ttft: slot for ttft, slot in self._ttft_seen.items() if slot >= since}
        return min(self._ttft_seen, default=NEVER_NS)

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
        life.slot += 1
        self._planes = self.cost.planes()
        life.rates = lone_rates(self._planes)
        if self.policy.gives_up:
            self._give_up_waiting(now)
        found = scan(self.table, now, self.capabilities.placeholders, life.rates)
        if self.policy.gives_up:
            found = self._give_up_running(found, now)
        self._elect(found.rows)
        found, forced = self._make_room(found, now)
        new = no_entries() if forced.size else self._candidates(now, work_limit)
        entries, features = self._fill(found, new, now, NO_ROW)
        bought = np.empty(0, np.int32)
        if self.policy.buys and new.rows.size:
            bought, newcomer = self._buy(entries, found, now)
            if bought.size:
                found = found.without(np.isin(found.rows, bought))
                # A victim's blocks are idle now, and a fork can no longer share them.
                new = self._measure(new.rows)
                entries, features = self._fill(found, new, now, newcomer)
        return self._emit(entries, features, np.concatenate([forced, bought]), found, now)

    def _give_up_waiting(self, now: int) -> None:
        """Drop or demote waiting requests that can't meet their SLO any more, latest start first."""
        rows = self.waiting.due(now, self.settings.window)
        if rows.size == 0:
            return
        known = self.table.prompt[rows] + self.table.outputs[rows]
        cached = self.kv.cached_tokens(rows, known - 1)[:, 0]
        latest = self.life.latest_start(self.life.view(rows, known - cached))
        can = latest >= now
        self.waiting.watch(rows[can], latest[can])
        self._lose(rows[~can], Reason.HOPELESS, now)

    def _give_up_running(self, found: Scan, now: int) -> Scan:
        if not found.lost.any():
            return found
        lost = found.rows[found.lost]
        late = self.table.outputs[lost] > 0
        self._lose(lost[late], Reason.LATE_GAPS, now)
        self._lose(lost[~late], Reason.HOPELESS, now)
        return found.without(found.lost & (self.table.state[found.rows] != State.RUNNING))

    def _lose(self, rows: I32, reason: Reason, now: int) -> None:
        fate = self.table.on_late[rows]
        demoted = rows[(fate == OnLate.DEMOTE) & ~self.table.demoted[rows]]
        if demoted.size:
            self.life.demote(demoted, reason, now)
        for row in rows[fate == OnLate.EXPIRE]:
            self.life.end(int(row), Outcome.EXPIRED, reason, now)

    def _elect(self, running: I32) -> None:
        """Keep the champion until it ends; then the oldest running row takes over."""
        t = self.table
        if self.champion != NO_ROW and t.state[self.champion] == State.RUNNING:
            return
        self.champion = int(running[np.argmin(t.admitted_seq[running])]) if running.size else NO_ROW

    def _make_room(self, found: Scan, now: int) -> tuple[Scan, I32]:
        """Stop the cheapest running rows when decodes (and the champion) can't get their next block."""
        t, block = self.table, self.kv.block_tokens
        growing = (found.kind == DECODE) | (found.kind == BOUND_DECODE)
        rows = found.rows[growing]
        start = t.computed[rows]
        need = int(((start % block == 0) | t.shared_tail[rows]).sum())
        if self.champion != NO_ROW and (found.kind[found.rows == self.champion] == PREFILL).any():
            need += 1
        limbo = self.kv.total_blocks - self.kv.free_blocks() - self.kv.live_blocks()
        shortage = need - self.kv.free_blocks() - limbo
        if shortage <= 0:
            return found, rows[:0]
        others = found.rows[found.rows != self.champion]
        held = -(-t.computed[others] // block)
        cost = self.policy.victim_cost(self.life.view(others, t.computed[others]), held, now)
        order = np.lexsort((-t.admitted_seq[others], cost))
        ranked = others[order]
        victims = choose_forced(ranked, self.kv.reclaimable(ranked), shortage)
        if victims.size:
            self.life.preempt(victims, Event.PREEMPTED, Reason.FORCED_BY_GROWTH, now, float(shortage))
        return found.without(np.isin(found.rows, victims)), victims

    def _candidates(self, now: int, work_limit: int | None) -> Entries:
        """Look at the best few waiting requests that can still make it."""
        t, life = self.table, self.life
        free_rows = self.settings.max_batch_size - t.running_count
        if self.policy.whole_batch and t.running_count:
            return no_entries()
        limit = min(self.settings.window, max(free_rows, 1 if self.policy.buys else 0))
        limit = min(limit, len(self.waiting), self.settings.window if work_limit is None else work_limit)
        if limit <= 0:
            return no_entries()
        tenants = int((self.waiting.counts() > 0).sum())
        share = -(-limit // tenants) if self.policy.fair else limit
        new = self._measure(self.waiting.peek(limit, share))
        looked = new.rows.size
        while self.policy.gives_up:
            # The latest-start heap gives up a window of requests per slot; nobody is admitted after it.
            latest = life.latest_start(life.view(new.rows, new.need))
            lost = (latest < now) & ~t.demoted[new.rows] & (t.on_late[new.rows] != OnLate.KEEP)
            if not lost.any():
                break
            self._lose(new.rows[lost], Reason.HOPELESS, now)
            left = limit if work_limit is None else min(limit, work_limit - looked)
            more = self.waiting.peek(max(0, min(int(lost.sum()), left)), share)
            looked += more.size
            new = self._measure(np.concatenate([new.rows[~lost], more]))
        return new

    def _measure(self, rows: I32) -> Entries:
        """What each of these waiting requests would need if it were admitted now."""
        t, life, block = self.table, self.life, self.kv.block_tokens
        known = t.prompt[rows] + t.outputs[rows]
        parents = life.forkable(rows)
        cached = self.kv.cached_tokens(rows, known - 1)
        forks = parents != NO_ROW
        start = np.where(forks, t.prompt[rows] - 1, cached[:, 0]).astype(np.int32)
        t.shared_tail[parents[forks]] = True
        n = rows.size
        copy = (forks & (start % block != 0)).astype(np.int32)
        return Entries(
            rows=rows,
            decode=np.zeros(n, np.bool_),
            waiting=np.ones(n, np.bool_),
            start=start,
            need=(known - start).astype(np.int32),
            pins=np.where(forks, 0, cached[:, 1]).astype(np.int32),
            copy=copy,
            whole=(-(-known // block) - -(-start // block) + copy).astype(np.int32),
            tenant=t.tenant[rows],
            chunk=np.zeros(n, np.int32),
            reason=np.zeros(n, np.int32),
            short=np.zeros(n),
        )

    def _fill(self, found: Scan, new: Entries, now: int, first: int) -> tuple[Entries, F64]:
        """Order all entries and grant what fits. Returns them with their grants, and the set's features."""
        t, s, p, planes = self.table, self.settings, self.policy, self._planes
        block = self.kv.block_tokens
        bound_ns = slot_bound_ns(p, found, self.tightest_ttft_ns())
        headroom = self.cost.headroom() if p.time_bound else 1.0
        entries = entries_of(t, found, new, block)
        keys = self.waiting.keys(entries.rows)
        scores = p.rescore(self.life.view(entries.rows, entries.need), keys, now)
        bound = np.isin(entries.rows, found.rows[found.kind == BOUND_DECODE])
        crowd = no_features()
        decodes = entries.decode
        crowd[F_DECODES] = decodes.sum() - 1
        add_decode(crowd, float(entries.start[decodes].sum()))
        roomy = predict_ns(planes, crowd) * headroom <= bound_ns
        entries = reorder(entries, order_of(p, t, entries, bound, scores, first, s.max_passes, roomy))
        limits = np.zeros(N_LIMITS)
        budget = s.max_slot_tokens if p.budget_tokens is None else p.budget_tokens
        limits[L_TOKENS] = min(budget, self.capabilities.max_step_tokens)
        limits[L_ROWS] = s.max_batch_size - t.running_count
        limits[L_BLOCKS] = self.kv.free_blocks()
        ceiling = int(s.watermark_ratio * self.kv.total_blocks)
        limits[L_ADMISSION] = ceiling - self.kv.live_blocks() - promised_blocks(t, found, block)
        limits[L_STARVING] = float(self._slots_without_prefill >= p.starving_slots)
        limits[L_SOLE] = float(t.running_count == 0)
        lag = self.fairness.lag_ns if p.fair and self.fairness.lag_ns > 0 else np.inf
        features = no_features()
        e = entries
        fill(
            e.decode, e.waiting, e.start, e.need, e.pins, e.copy, e.whole, e.tenant,
            e.chunk, e.reason, e.short,
            features, planes, headroom, bound_ns, limits, s.quantum_tokens, block, p.chunked, p.strict,
            self.fairness.counter.copy(), self.fairness.weight, lag,
        )  # fmt: skip
        return entries, features

    def _buy(self, entries: Entries, found: Scan, now: int) -> tuple[I32, int]:
        """Stop running requests for the first newcomer that found no room, if that pays."""
        none = np.empty(0, np.int32)
        t, life, s = self.table, self.life, self.settings
        shut_out = entries.waiting & (entries.chunk == 0) & np.isin(entries.reason, _NO_ROOM)
        shut_out &= ~t.demoted[entries.rows]
        if not shut_out.any():
            return none, NO_ROW
        i = int(np.argmax(shut_out))
        newcomer = life.view(entries.rows[i : i + 1], entries.need[i : i + 1])
        tau = self.policy.tau_ms * 1e6
        value = newcomer_value(newcomer, now, tau, s.slo_lambda)
        rows = found.rows
        able = (rows != self.champion) & (t.preempted_slot[rows] + s.fairness_window < life.slot)
        view = life.view(rows[able], t.computed[rows[able]])
        prices = victim_prices(view, newcomer, now, tau, s.slo_lambda)
        order = np.argsort(prices, kind="stable")
        order = order[np.isfinite(prices[order])]
        ranked = view.rows[order]
        reason = Reason(int(entries.reason[i]))
        short = 0 if reason == Reason.NO_ROW else int(np.ceil(entries.short[i]))
        deal = choose_purchase(ranked, prices[order], self.kv.reclaimable(ranked), short, value)
        if deal is None:
            return none, NO_ROW
        seq = int(t.seq[newcomer.rows[0]])
        life.preempt(deal.victims, Event.PREEMPTED, Reason.PURCHASED, now, deal.price, seq)
        self.trace.note(life.slot, now, t.seq[newcomer.rows], Event.ADMITTED, Reason.PURCHASED, deal.value)
        return deal.victims, int(newcomer.rows[0])

    def _emit(self, entries: Entries, features: F64, stopped: I32, found: Scan, now: int) -> Decision:
        """Turn grants into a decision: attach, reserve, advance the table, record."""
        t, life = self.table, self.life
        self.waiting.put_back(entries.rows[entries.waiting & (entries.chunk == 0)])
        granted = entries.chunk > 0
        admitted = entries.rows[granted & entries.waiting]
        if admitted.size:
            self._attach(admitted, entries.start[granted & entries.waiting], now)
        rows, start, chunk = entries.rows[granted], entries.start[granted], entries.chunk[granted]
        end = start + chunk
        fits = np.cumsum(self.kv.growth_need(rows, start, end)) <= self.kv.free_blocks()
        if not fits.all():
            rows, start, chunk, end = rows[fits], start[fits], chunk[fits], end[fits]
        copies = self.kv.reserve(rows, start, end)
        t.shared_tail[rows] = False
        samples = end == t.prompt[rows] + t.outputs[rows] + t.pending[rows]
        t.computed[rows] = end
        t.pending[rows] += samples
        t.inflight_slot[rows] = life.slot
        decision = Decision(
            slot=life.slot,
            rows=rows,
            tokens=chunk,
            starts=start,
            samples=samples,
            epochs=t.epoch[rows].copy(),
            preempted=stopped,
            how=np.full(stopped.size, How.RECOMPUTE, np.int8),
            copies=copies,
            predicted_ns=int(predict_ns(self._planes, features)),
            bound_ns=int(min(slot_bound_ns(self.policy, found, self.tightest_ttft_ns()), NEVER_NS)),
        )
        decode = entries.decode[granted] if fits.all() else entries.decode[granted][fits]
        starved = bool(decode.all()) and not entries.decode.all()
        self._slots_without_prefill = self._slots_without_prefill + 1 if starved else 0
        if rows.size:
            shares = marginal_ns(self._planes, features, decode, start, chunk)
            self._inflight[life.slot] = InFlight(decision, features, shares)
        record_slot(life, self.settings, entries, now)
        return decision

    def _attach(self, rows: I32, starts: I32, now: int) -> None:
        """Give newly admitted rows the KV they can share, and mark them as running."""
        t, life = self.table, self.life
        parents = life.forkable(rows)
        forks = parents != NO_ROW
        for child, parent, tokens in zip(rows[forks], parents[forks], starts[forks], strict=True):
            self.kv.fork(int(parent), int(child), int(tokens))
            t.shared_tail[[child, parent]] = True
        plain = rows[~forks]
        if plain.size:
            self.kv.attach(plain, starts[~forks])
        life.start(rows, starts, now)

    # ------------------------------------------------------------------ apply

    def apply(self, result: StepResult) -> Applied:
        """Take in what a step did; see `applying.apply_step`."""
        flight = self._inflight.pop(result.slot)
        measured = result.ended_ns - result.started_ns
        self.cost.observe(flight.features, measured)
        self.life.pace.observe(float(measured), int(flight.features[F_TOKENS]))
        applied = apply_step(self.life, flight, result)
        self.kv.retire(result.slot)
        return applied

    @property
    def in_flight(self) -> int:
        """Decisions whose results have not been applied."""
        return len(self._inflight)
