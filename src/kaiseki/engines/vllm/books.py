"""Our core beside a vLLM scheduler: what each knows of the other, once per step.

The core decides in `plan`; vLLM carries that out and has the last word, as it may find a prompt's image
not encoded yet or a block taken; `settle` tells the core what was done. `follow` does the same for
steps that vLLM decided alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kaiseki import config
from kaiseki.config import Settings
from kaiseki.core.admission import Refusal
from kaiseki.core.decision import I32, Decision, StepResult
from kaiseki.core.endings import Ending
from kaiseki.core.protocols import Capabilities, CostModel
from kaiseki.core.reasons import Event, Finish, Outcome, Reason
from kaiseki.core.requests import OnLate, Request
from kaiseki.core.scheduler import Plan, Scheduler
from kaiseki.core.table import State
from kaiseki.engines.vllm import adapter
from kaiseki.engines.vllm.kv import Foreseen, VllmBlocks
from kaiseki.engines.vllm.witness import Witness


class Disagreement(RuntimeError):
    """The core and vLLM no longer agree on what runs; the message says how."""


@dataclass(slots=True)
class Layout:
    """A plan in vLLM's terms.

    Attributes:
        caps: most tokens per request id, of those that may not take all they could; 0 for none at all.
        admitted: requests to take from the queue, in order.
        order: running requests that are granted something, in the plan's order, or None to leave theirs.
        tokens, requests: how much that is, if vLLM does it all.
    """

    caps: dict[str, int]
    admitted: list[Any]
    order: list[Any] | None
    tokens: int
    requests: int


class Books:
    """The core, and which of its rows is which request.

    Args:
        scheduler: vLLM's.
        settings: ours.
        cost: how long steps take.
        stop: preempts a running request in vLLM.
        witness: makes the one who is told of everything.
    """

    def __init__(
        self,
        scheduler: Any,
        settings: Settings,
        cost: CostModel,
        stop: Callable[[Any], None],
        witness: Callable[[Scheduler], Witness],
    ) -> None:
        self.kv = VllmBlocks(scheduler, stop)
        limits = settings.scheduler_settings()
        most = min(limits.max_batch_size, int(scheduler.max_num_active_reqs))
        self._limits = replace(limits, max_batch_size=most)
        self.core = Scheduler(config.policy(settings), self.kv, cost, _capabilities(scheduler), self._limits)
        self.set_shares(settings)
        self._witness = witness(self.core)

    def set_shares(self, settings: Settings) -> None:
        """Use these weights of tenants from now on."""
        for name, tenant in settings.tenants.items():
            self.core.set_tenant(name, tenant.weight)

    # ------------------------------------------------------------------ requests in and out

    def submit(self, asked: Request, request: Any, now: int) -> Refusal | None:
        """Queue a request, or say why not; see `Scheduler.submit`."""
        self.kv.arriving = request
        refusal = self.core.submit(asked, now)
        if refusal is None:
            self._witness.opened(self.core, asked, now)
        else:
            self._witness.refused(self.core, asked, refusal, now)
        return refusal

    def watch(self, asked: Request, request: Any, now: int) -> None:
        """Queue a request that vLLM runs whatever is said: it is not refused, and never given up."""
        room = self.kv.total_blocks * self.kv.block_tokens - asked.prompt_tokens
        patient = replace(asked.cls, on_late=OnLate.KEEP)
        asked = replace(asked, cls=patient, max_tokens=max(1, min(asked.max_tokens, room)))
        self.core.settings = replace(self._limits, max_waiting=0, max_waiting_tokens=0)
        self.submit(asked, request, now)
        self.core.settings = self._limits

    def row(self, request: Any) -> int | None:
        """A request's row, if it has one."""
        return self.core.life.ids.get(request.request_id)

    def end(self, request: Any, outcome: Outcome, reason: Reason, now: int) -> None:
        """A request has left vLLM, or its row is not used any more; without a row nothing happens."""
        row = self.row(request)
        if row is not None:
            self.core.life.end(row, outcome, reason, now)

    def stopped(self, requests: Sequence[Any], now: int) -> None:
        """These were preempted by vLLM itself."""
        rows = [row for request in requests if (row := self.row(request)) is not None]
        running = np.array(rows, np.int32)
        running = running[self.core.table.state[running] == State.RUNNING]
        if running.size:
            self.core.life.preempt(running, Event.PREEMPTED, Reason.FORCED_BY_GROWTH, now)

    def lost(self) -> list[Ending]:
        """Requests that the core has dropped since the last call."""
        endings = self.core.take_endings()
        self._witness.ended(self.core, endings)
        return [ending for ending in endings if ending.outcome is Outcome.EXPIRED]

    # ------------------------------------------------------------------ a step

    def lay_out(self, plan: Plan) -> Layout:
        """What vLLM is to do."""
        entries, requests = plan.filled.entries, self.kv.requests
        chunk, waiting, decode = entries["chunk"], entries["waiting"], entries["decode"]
        granted = chunk > 0
        new = np.flatnonzero(granted & waiting)
        old = np.flatnonzero(granted & ~waiting)
        prefills = old[~decode[old]]
        caps: dict[str, int] = {}
        for i in [*prefills.tolist(), *new.tolist()]:
            # A chunk of one may be the last before drafts, which vLLM adds and our core does not count.
            if chunk[i] > 1 or entries["need"][i] > 1:
                caps[requests[int(entries["row"][i])].request_id] = int(chunk[i])
        if old.size < self.core.table.running_count:
            for row in self._left_out(entries["row"][old]).tolist():
                caps[requests[row].request_id] = 0
        order = [requests[row] for row in entries["row"][old].tolist()] if prefills.size else None
        admitted = [requests[row] for row in entries["row"][new].tolist()]
        return Layout(caps, admitted, order, int(chunk[granted].sum()), new.size + old.size)

    def _left_out(self, rows: I32) -> I32:
        """Running rows that are not among these."""
        running = self.core.table.running_rows()
        among = np.zeros(self.core.table.capacity, np.bool_)
        among[rows] = True
        left: I32 = running[~among[running]]
        return left

    def settle(self, plan: Plan, layout: Layout, output: Any, now: int) -> Decision:
        """Carry out a plan as vLLM did.

        Raises:
            Disagreement: vLLM ran a request that the plan does not know of.
        """
        scheduled = output.num_scheduled_tokens
        as_planned = (
            len(scheduled) == layout.requests
            and output.total_num_scheduled_tokens - adapter.drafts(output) == layout.tokens
            and self._starts_agree(plan, layout, scheduled)
        )
        if not as_planned:
            self._write_what_was_done(plan, scheduled)
        return self._carry_out(plan, now)

    def _carry_out(self, plan: Plan, now: int) -> Decision:
        decision = self.core.carry_out(plan, now)
        self._witness.decided(self.core, decision, *self.core.trace.drain(), now)
        return decision

    def _starts_agree(self, plan: Plan, layout: Layout, scheduled: dict[str, int]) -> bool:
        """Whether vLLM found as much cached of those it admitted as the plan says."""
        if not layout.admitted:
            return True
        entries = plan.filled.entries
        new = (entries["chunk"] > 0) & entries["waiting"]
        return all(
            request.num_computed_tokens - scheduled.get(request.request_id, -1) == start
            for request, start in zip(layout.admitted, entries["start"][new].tolist(), strict=True)
        )

    def follow(self, output: Any, now: int) -> Decision:
        """Enter a step that vLLM decided.

        Raises:
            Disagreement: it ran a request that has no row.
        """
        rows = self._rows(output.num_scheduled_tokens)
        waiting = rows[self.core.table.state[rows] == State.WAITING]
        plan = self.core.follow(waiting, now)
        self._write_what_was_done(plan, output.num_scheduled_tokens)
        return self._carry_out(plan, now)

    def _rows(self, ids: dict[str, int]) -> I32:
        known = self.core.life.ids
        try:
            return np.fromiter(map(known.__getitem__, ids), np.int32, len(ids))
        except KeyError as error:
            raise Disagreement(f"vLLM ran request {error}, which Kaiseki does not know") from error

    def _write_what_was_done(self, plan: Plan, scheduled: dict[str, int]) -> None:
        """Put vLLM's chunks in place of the planned ones."""
        entries, table = plan.filled.entries, self.core.table
        rows = self._rows(scheduled)
        done = np.zeros(table.capacity, np.int32)
        done[rows] = np.fromiter(scheduled.values(), np.int32, len(scheduled))
        got = done[entries["row"]]
        missed = (entries["chunk"] > 0) & (got == 0)
        entries["reason"][missed] = Reason.NO_KV  # what is found out as late as this is nearly always that
        entries["chunk"] = np.minimum(got, entries["need"])
        if np.count_nonzero(got) != len(scheduled):
            raise Disagreement(
                f"vLLM ran {len(scheduled)} requests, of which {np.count_nonzero(got)} could run"
            )
        for i in np.flatnonzero(entries["waiting"] & (got > 0)).tolist():
            request = self.kv.requests[int(entries["row"][i])]
            known = entries["start"][i] + entries["need"][i]
            entries["start"][i] = request.num_computed_tokens - got[i]
            entries["need"][i] = known - entries["start"][i]
            entries["chunk"][i] = min(got[i], entries["need"][i])
        plan.changed = True

    def put_aside(self, requests: Sequence[Any], now: int) -> None:
        """These were to run and wait for something else first, such as KV that a connector fetches."""
        rows = np.array([self.core.life.ids[r.request_id] for r in requests], np.int32)
        self.core.life.back_off(rows, np.zeros(rows.size), now)

    def come_back(self, request: Any, now: int) -> None:
        """What a request was put aside for has come."""
        self.core.life.come_back(np.array([self.core.life.ids[request.request_id]], np.int32), now)

    def apply(
        self, decision: Decision, results: Any, finished: Sequence[Any], started_ns: int, ended_ns: int
    ) -> None:
        """Take in what a step gave.

        Args:
            decision: of that step.
            results: vLLM's `ModelRunnerOutput`.
            finished: requests that ended by it with their output.
            started_ns, ended_ns: when it ran.
        """
        core = self.core
        n = decision.rows.size
        new_tokens = self._counts(results)[decision.rows]
        finish = np.zeros(n, np.int8)
        for request in finished:
            row = self.row(request)
            places = np.flatnonzero(decision.rows == row)
            if row is not None and places.size:
                finish[places[0]] = Finish.LENGTH if adapter.finished_at_length(request) else Finish.STOP
                given = request.num_output_tokens - int(core.table.outputs[row])
                new_tokens[places[0]] = max(given, 0)
        nothing = np.zeros(n, np.bool_)
        result = StepResult(
            decision.slot, decision.rows, decision.epochs, new_tokens, np.empty(0, np.int32), finish,
            nothing, nothing, started_ns, ended_ns,
        )  # fmt: skip
        core.apply(result)
        self._witness.applied(core, result, core.trace.drain()[0])

    def _counts(self, results: Any) -> I32:
        """int32[capacity]: by row, how many tokens a step gave."""
        counts = np.zeros(self.core.table.capacity, np.int32)
        if results.sampled_token_ids:
            get = self.core.life.ids.get
            rows = np.array([get(i, -1) for i in results.req_ids], np.int32)
            lengths = np.fromiter(map(len, results.sampled_token_ids), np.int32, rows.size)
            known = rows >= 0
            counts[rows[known]] = lengths[known]
        return counts

    def check(self, running: Sequence[Any], open_requests: int) -> None:
        """Both must know of the same number of requests.

        Raises:
            Disagreement: they don't.
        """
        table = self.core.table
        if table.running_count != len(running) or table.open_rows != open_requests:
            raise Disagreement(
                f"vLLM runs {len(running)} of {open_requests} requests, Kaiseki {table.running_count} of "
                f"{table.open_rows}"
            )

    def foresee(self, now: int) -> list[str]:
        """Ids of those that the core would admit now, in order; nothing changes by asking."""
        twin: Scheduler = copy.deepcopy(self.core, {id(self.kv): Foreseen.of(self.kv)})
        entries = twin.plan(now).filled.entries
        new = entries["row"][(entries["chunk"] > 0) & entries["waiting"]]
        return [self.kv.requests[row].request_id for row in new.tolist()]


def _capabilities(scheduler: Any) -> Capabilities:
    loras = scheduler.lora_config
    return Capabilities(
        depth=max(0, int(scheduler.vllm_config.max_concurrent_batches) - 1),
        placeholders=bool(scheduler.scheduler_config.async_scheduling),
        max_context_tokens=int(scheduler.max_model_len) + 1,  # vLLM counts no room for the last token
        max_step_tokens=int(scheduler.max_num_scheduled_tokens),
        adapter_slots=int(loras.max_loras) if loras is not None else 0,
        adapter_load_ns=_ADAPTER_LOAD_NS if loras is not None else 0,
    )


_ADAPTER_LOAD_NS = 5_000_000
"""What loading an adapter is taken to cost: 50 to 200 MB over PCIe take 2 to 8 ms."""
