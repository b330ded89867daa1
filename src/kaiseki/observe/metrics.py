"""Metrics as NumPy bins, filled once per slot; `kaiseki.observe.exposition` shows them to Prometheus.

A thousand `Histogram.observe` calls cost about a millisecond, more than a slot may. Here the driver
hands over arrays, and a compiled loop of a few microseconds sorts all of a slot's gaps into their bins.

Tenants beyond `max_tenants` share the label `other`, so a gateway that invents tenant names cannot grow
the output without end.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kaiseki.core.applying import TOKEN
from kaiseki.core.decision import F64, I64
from kaiseki.core.endings import Ending
from kaiseki.core.jit import kernel
from kaiseki.core.reasons import Finish, Outcome, Reason
from kaiseki.core.table import Records

OTHER = "other"
MAX_CLASSES = 16
FOLD_AFTER = 64
"""Ended requests that are counted together."""
SUCCESS = ("stop", "length", "abort", "error", "repetition")
"""vLLM's values of `finished_reason`."""

# Bounds of vLLM 0.32, so that both can be summed in one query.
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
          20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
GAP_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
         40.0, 80.0)  # fmt: skip
LATENCY_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
             240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
SLOT_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
DECIDE_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1)
SLOT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@kernel
def tally(
    tokens: Records,
    first: I64,
    offset: I64,
    ttft_bounds: F64,
    ttft_counts: I64,
    ttft_sums: F64,
    gap_bounds: F64,
    gap_counts: I64,
    gap_sums: F64,
) -> None:
    """Add each of `tokens` (`core.applying.TOKEN`) to the bin of its (tenant, class) group.

    Counts are (groups, bins). The last entry of `first` and of `offset` stands for every index that has
    no name yet.
    """
    last_tenant, last_class = first.size - 1, offset.size - 1
    for i in range(tokens.size):
        token = tokens[i]
        group = first[min(token["tenant"], last_tenant)] + offset[min(token["cls"], last_class)]
        seconds = token["ns"] / 1e9
        bounds = ttft_bounds if token["first"] else gap_bounds
        place = 0
        while place < bounds.size and seconds > bounds[place]:
            place += 1
        if token["first"]:
            ttft_counts[group, place] += 1
            ttft_sums[group] += seconds
        else:
            gap_counts[group, place] += 1
            gap_sums[group] += seconds


class Histogram:
    """Bucket counts and sums of one histogram for a number of groups (label sets)."""

    def __init__(self, bounds: Sequence[float], groups: int = 1) -> None:
        self.bounds = np.array(bounds, np.float64)
        self._bounds = tuple(bounds)
        self.counts = np.zeros((groups, self.bounds.size + 1), np.int64)
        self.sums = np.zeros(groups)

    def add(self, values: F64) -> None:
        """Many values of a histogram that has one group."""
        np.add.at(self.counts[0], np.searchsorted(self.bounds, values), 1)
        self.sums[0] += values.sum()

    def add_one(self, value: float) -> None:
        self.counts[0, bisect_left(self._bounds, value)] += 1
        self.sums[0] += value


@dataclass(slots=True)
class Load:
    """Gauges: the state at the end of the last slot."""

    running: int = 0
    waiting: int = 0
    kv_free: int = 0
    kv_live: int = 0
    kv_total: int = 0
    fairness_gap: float = 0.0
    fairness_bound: float = 0.0
    engine_failing: bool = False


class Bins:
    """All metrics of one scheduler. Written by the driver's thread, read by whoever scrapes.

    Tenants and classes are given by the core's index; `set_names` says what the indices mean.
    """

    def __init__(self, model_name: str = "", max_tenants: int = 32) -> None:
        self.model_name = model_name
        self.max_tenants = max_tenants
        self.n_classes = MAX_CLASSES + 1
        self._lock = threading.Lock()
        self._named = (0, 0)
        self.tenants: list[str] = []
        self.classes: list[str] = []
        # By index in the core: first group of the tenant, offset of the class in it. One more for the rest.
        self._tenant_base = np.array([max_tenants * self.n_classes], np.int64)
        self._class_of = np.array([MAX_CLASSES], np.int64)

        groups = (max_tenants + 1) * self.n_classes
        self.ttft = Histogram(TTFT_S, groups)
        self.gap = Histogram(GAP_S, groups)
        self.e2e = Histogram(LATENCY_S)
        self.queue = Histogram(LATENCY_S)
        self.prompt = Histogram(REQUEST_TOKENS)
        self.output = Histogram(REQUEST_TOKENS)
        self.slot_tokens = Histogram(SLOT_TOKENS)
        self.decide = Histogram(DECIDE_S)
        self.slot = Histogram(SLOT_S)

        self.ended = np.zeros((groups, len(Outcome)), np.int64)
        self.attained = np.zeros((groups, 2), np.int64)
        self.demoted = np.zeros(groups, np.int64)
        self.tokens = np.zeros((groups, 3), np.int64)
        self.refused = np.zeros((len(Outcome), len(Reason)), np.int64)
        self.success = np.zeros(len(SUCCESS), np.int64)
        self.cutoffs = np.zeros(len(Reason), np.int64)
        self.preempted = np.zeros(len(Reason), np.int64)
        self.service = np.zeros(max_tenants + 1)
        self.errors = np.zeros(2, np.int64)  # chunks that are tried again, chunks that ended their request
        self.failed_steps = 0
        self.totals = np.zeros(4, np.int64)  # prompt, output, prefix queried, prefix hit
        self._ends: list[Ending] = []
        self._service = np.zeros(0)  # by index in the core
        self.load = Load()
        self._tally(np.empty(0, TOKEN))  # compiles now rather than in the first slot

    def set_names(self, tenants: Sequence[str], classes: Sequence[str]) -> None:
        """Tell the names of the core's tenant and class indices; call again when either list grows.

        Indices with the same name share a label. A name keeps its label for good.
        """
        if self._named == (len(tenants), len(classes)):
            return
        with self._lock:
            self._named = len(tenants), len(classes)
            base = [_place(t, self.tenants, self.max_tenants) for t in (*tenants, OTHER)]
            self._tenant_base = np.array(base, np.int64) * self.n_classes
            offsets = [_place(c, self.classes, MAX_CLASSES) for c in (*classes, OTHER)]
            self._class_of = np.array(offsets, np.int64)

    def on_apply(self, slot_s: float, tokens: Records) -> None:
        """One executed slot: how long it took, and what `core.applying.Applied.tokens` says of waits."""
        with self._lock:
            self.slot.add_one(slot_s)
            self._tally(tokens)

    def on_slot(
        self,
        *,
        decide_s: float,
        prompt_tokens: int,
        output_tokens: int,
        running: int,
        waiting: int,
        kv_free: int,
        kv_live: int,
        kv_total: int,
        prefix_queried: int = 0,
        prefix_hit: int = 0,
        cutoffs: Sequence[int] = (),
        preempted: Sequence[int] = (),
    ) -> None:
        """One decision: how long it took, what it computes, how things stand after it.

        `prompt_tokens` were prefilled, `output_tokens` produced. `prefix_queried` and `prefix_hit` are
        prompt tokens of all requests admitted so far, and those of them found in the cache.
        `cutoffs` has the `Reason` of each new cutoff, `preempted` that of each preempted row.
        """
        with self._lock:
            self.decide.add_one(decide_s)
            self.slot_tokens.add_one(prompt_tokens + output_tokens)
            self.totals[0] += prompt_tokens
            self.totals[1] += output_tokens
            self.totals[2], self.totals[3] = prefix_queried, prefix_hit
            for reason in cutoffs:
                self.cutoffs[reason] += 1
            for reason in preempted:
                self.preempted[reason] += 1
        self.set_load(running, waiting, kv_free, kv_live, kv_total)

    def on_errors(self, retried: int, failed: int, whole_step: bool) -> None:
        """Chunks of one step on which the engine failed; `whole_step`: on all of them."""
        with self._lock:
            self.errors += (retried, failed)
            self.failed_steps += whole_step

    def set_load(self, running: int, waiting: int, kv_free: int, kv_live: int, kv_total: int) -> None:
        """The gauges alone, for changes between slots (a submit or a cancel while nothing runs)."""
        load = self.load
        load.running, load.waiting = running, waiting
        load.kv_free, load.kv_live, load.kv_total = kv_free, kv_live, kv_total

    def set_fairness(self, service: F64, gap: float, bound: float) -> None:
        """Service counters by tenant index, the largest lag between two of them, and H of its bound.

        All in card-seconds per unit of weight.
        """
        with self._lock:
            self._service = service
            self.load.fairness_gap, self.load.fairness_bound = gap, bound

    def on_end(self, endings: Sequence[Ending]) -> None:
        """Requests that ended."""
        with self._lock:
            self._ends += endings
            if len(self._ends) >= FOLD_AFTER:
                self._fold()

    def _fold_service(self) -> None:
        """Sort the tenants' counters by label."""
        self.service[:] = 0.0
        places = self._tenant_base.take(np.arange(self._service.size), mode="clip") // self.n_classes
        np.maximum.at(self.service, places, self._service)

    def _fold(self) -> None:
        """Count the ended requests kept so far: many small updates cost less as one."""
        if not self._ends:
            return
        ends = self._ends
        tenant, cls, outcome, finish, reason, attained, demoted = np.array(
            [(e.tenant, e.cls, e.outcome, e.finish, e.reason, e.attained, e.demoted) for e in ends], np.int64
        ).T
        tokens = np.array([(e.prompt, e.cached, e.outputs) for e in ends], np.int64).T
        arrival, admitted, ended = np.array([(e.arrival_ns, e.admitted_ns, e.ended_ns) for e in ends]).T
        ends.clear()
        group = self._tenant_base.take(tenant, mode="clip") + self._class_of.take(cls, mode="clip")
        np.add.at(self.ended, (group, outcome), 1)
        counts = outcome != Outcome.CANCELLED
        np.add.at(self.attained, (group[counts], attained[counts]), 1)
        np.add.at(self.demoted, group, demoted)
        np.add.at(self.tokens, group, tokens.T)
        gave_up = (outcome == Outcome.REFUSED) | (outcome == Outcome.EXPIRED)
        np.add.at(self.refused, (outcome[gave_up], reason[gave_up]), 1)
        np.add.at(self.success, _success(outcome, finish), 1)
        done = outcome == Outcome.COMPLETED
        self.e2e.add((ended - arrival)[done] / 1e9)
        self.queue.add((admitted - arrival)[admitted >= 0] / 1e9)
        self.prompt.add(tokens[0, done].astype(np.float64))
        self.output.add(tokens[2, done].astype(np.float64))

    def count_refusal(self, tenant: str, cls: str, reason: Reason) -> None:
        """A request refused before it reached the scheduler (the server's own limits)."""
        with self._lock:
            group = _place(tenant, self.tenants, self.max_tenants) * self.n_classes
            group += _place(cls, self.classes, MAX_CLASSES)
            self.ended[group, Outcome.REFUSED] += 1
            self.attained[group, 0] += 1
            self.refused[Outcome.REFUSED, reason] += 1

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Everything counted and nothing changing while the arrays are read."""
        with self._lock:
            self._fold()
            self._fold_service()
            yield

    def attainment(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Requests that attained and that missed their SLO so far, by tenant and class."""
        with self.reading():
            tenants = (*self.tenants, *[""] * (self.max_tenants - len(self.tenants)), OTHER)
            classes = (*self.classes, *[""] * (MAX_CLASSES - len(self.classes)), OTHER)
            found = {}
            for group in np.flatnonzero(self.attained.any(axis=1)).tolist():
                tenant, cls = divmod(group, self.n_classes)
                missed, attained = self.attained[group].tolist()
                found[tenants[tenant], classes[cls]] = attained, missed
            return found

    def _tally(self, tokens: Records) -> None:
        t, g = self.ttft, self.gap
        first, offset = self._tenant_base, self._class_of
        tally(tokens, first, offset, t.bounds, t.counts, t.sums, g.bounds, g.counts, g.sums)


def _place(name: str, known: list[str], most: int) -> int:
    """The label slot of a name: its own while there is room, else the one they share."""
    if name in known:
        return known.index(name)
    if len(known) < most and name != OTHER:
        known.append(name)
        return len(known) - 1
    return most


def _success(outcome: I64, finish: I64) -> I64:
    """Indices into SUCCESS of the requests that vLLM would count; refused and expired ones never ran."""
    kind = np.full(len(outcome), -1, np.int64)
    completed = outcome == Outcome.COMPLETED
    kind[completed] = 0
    kind[completed & (finish == Finish.LENGTH)] = 1
    kind[outcome == Outcome.CANCELLED] = 2
    kind[outcome == Outcome.FAILED] = 3
    return kind[kind >= 0]
