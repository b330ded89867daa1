"""The metrics page: bins as Prometheus metric families.

Names are vLLM's own where one exists (`vllm:time_to_first_token_seconds`, with its labels and bucket
bounds, so that dashboards made for vLLM work); all else is `kaiseki_*`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kaiseki.core.decision import F64, I64
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.observe.metrics import MAX_CLASSES, OTHER, SUCCESS, Bins


def expose(bins: Bins) -> bytes:
    """The metrics page in Prometheus' text format, whatever a scraper would like best.

    All of them read it. In OpenMetrics the library writes `vllm_num_requests_running` for
    `vllm:num_requests_running`, and no dashboard made for vLLM would find it.
    """
    registry = CollectorRegistry()
    registry.register(BinsCollector(bins))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class BinsCollector(Collector):
    """What prometheus_client calls on a scrape."""

    def __init__(self, bins: Bins) -> None:
        self._bins = bins

    def collect(self) -> Iterator[Metric]:
        """All families, read in one go so that they agree with each other."""
        with self._bins.reading():
            families = [*_vllm(self._bins), *_kaiseki(self._bins)]
        yield from families


def _vllm(bins: Bins) -> Iterator[Metric]:
    """The metrics that vLLM has too, under its names and labels."""
    labels, values = ("model_name", "engine"), (bins.model_name, "0")
    load = bins.load
    used = 1.0 - load.kv_free / load.kv_total if load.kv_total else 0.0
    for name, text, value in (
        ("num_requests_running", "Requests in execution batches.", load.running),
        ("num_requests_waiting", "Requests waiting to be processed.", load.waiting),
        ("kv_cache_usage_perc", "KV cache usage, 1 means 100 percent.", used),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=labels)
        gauge.add_metric(values, value)
        yield gauge
    prompt, output, queried, hit = bins.totals.tolist()
    for name, text, count in (
        ("prompt_tokens", "Prefill tokens processed.", prompt),
        ("generation_tokens", "Generation tokens processed.", output),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queried),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", hit),
        ("num_preemptions", "Preemptions.", int(bins.preempted.sum())),
    ):
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
        counter.add_metric(values, count)
        yield counter
    success = CounterMetricFamily(
        "vllm:request_success", "Finished requests.", labels=(*labels, "finished_reason")
    )
    for reason, count in zip(SUCCESS, bins.success.tolist(), strict=True):
        success.add_metric((*values, reason), count)
    yield success
    for name, text, data in (
        ("time_to_first_token_seconds", "Time to first token.", bins.ttft),
        ("inter_token_latency_seconds", "Time between two tokens of a request.", bins.gap),
        ("e2e_request_latency_seconds", "Arrival to last token.", bins.e2e),
        ("request_queue_time_seconds", "Arrival to first chunk.", bins.queue),
        ("request_prompt_tokens", "Prompt tokens per finished request.", bins.prompt),
        ("request_generation_tokens", "Output tokens per finished request.", bins.output),
        ("iteration_tokens_total", "Tokens per slot.", bins.slot_tokens),
    ):
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=labels)
        _add_histogram(family, values, data.bounds, data.counts.sum(axis=0), data.sums.sum())
        yield family


def _kaiseki(bins: Bins) -> Iterator[Metric]:
    """What only this scheduler has."""
    for name, text, data in (
        ("decide_seconds", "Time to decide one slot.", bins.decide),
        ("slot_seconds", "Time to execute one slot.", bins.slot),
    ):
        family = HistogramMetricFamily(f"kaiseki_{name}", text)
        _add_histogram(family, (), data.bounds, data.counts[0], data.sums[0])
        yield family
    yield from _by_group(bins)
    yield from _by_reason(bins)
    load = bins.load
    blocks = GaugeMetricFamily("kaiseki_kv_blocks", "KV blocks by state.", labels=("state",))
    for state, value in (("free", load.kv_free), ("live", load.kv_live), ("total", load.kv_total)):
        blocks.add_metric((state,), value)
    yield blocks
    yield GaugeMetricFamily(
        "kaiseki_engine_failing",
        "1 while no requests are taken since the engine fails on every one.",
        value=float(load.engine_failing),
    )
    unit = "card-seconds per unit of weight"
    service = GaugeMetricFamily(
        "kaiseki_tenant_service", f"Service counter, {unit}; 'other' is the highest.", labels=("tenant",)
    )
    for i, tenant in _tenant_labels(bins):
        if bins.service[i]:
            service.add_metric((tenant,), float(bins.service[i]))
    yield service
    yield GaugeMetricFamily("kaiseki_fairness_gap", f"Largest lag, {unit}.", value=load.fairness_gap)
    yield GaugeMetricFamily(
        "kaiseki_fairness_bound",
        f"H; the proven bound of the lag adds one grant, prediction errors and what may not pause, {unit}.",
        value=load.fairness_bound,
    )


def _by_group(bins: Bins) -> Iterator[Metric]:
    """Families by tenant and class; only the pairs that occurred."""
    labels = ("tenant", "class")
    pairs = {
        t * bins.n_classes + c: (tenant, cls)
        for t, tenant in _tenant_labels(bins)
        for c, cls in (*enumerate(bins.classes), (MAX_CLASSES, OTHER))
    }
    for name, text, data in (
        ("ttft_seconds", "Time to first token, by tenant and class.", bins.ttft),
        ("tbt_seconds", "Time between two tokens, by tenant and class.", bins.gap),
    ):
        family = HistogramMetricFamily(f"kaiseki_{name}", text, labels=labels)
        for group, pair in pairs.items():
            if data.counts[group].any():
                _add_histogram(family, pair, data.bounds, data.counts[group], data.sums[group])
        yield family
    outcomes = tuple(o.label for o in Outcome)
    for name, text, extra, columns, table in (
        ("requests", "Requests that ended.", ("outcome",), outcomes, bins.ended),
        ("slo", "Requests by whether they met their SLO; cancelled ones do not count.", ("result",),
         ("missed", "attained"), bins.attained),
        ("request_tokens", "Tokens of requests that ended.", ("kind",), ("prompt", "cached", "output"),
         bins.tokens),
        ("demoted_requests", "Requests that became best effort.", (), ("",), bins.demoted[:, None]),
    ):  # fmt: skip
        counter = CounterMetricFamily(f"kaiseki_{name}", text, labels=(*labels, *extra))
        for group, pair in pairs.items():
            for column, count in zip(columns, table[group].tolist(), strict=True):
                if count:
                    counter.add_metric((*pair, column)[: 2 + len(extra)], count)
        yield counter


def _by_reason(bins: Bins) -> Iterator[Metric]:
    """Families by reason."""
    refused = CounterMetricFamily(
        "kaiseki_refusals", "Requests refused or expired, by reason.", labels=("outcome", "reason")
    )
    for outcome, row in zip(Outcome, bins.refused.tolist(), strict=True):
        for reason, count in zip(Reason, row, strict=True):
            if count:
                refused.add_metric((outcome.label, reason.label), count)
    yield refused
    errors = CounterMetricFamily(
        "kaiseki_engine_errors", "Chunks on which the engine failed, by what follows.", labels=("then",)
    )
    for then, count in zip(("retried", "failed"), bins.errors.tolist(), strict=True):
        errors.add_metric((then,), count)
    yield errors
    yield CounterMetricFamily(
        "kaiseki_failed_steps", "Steps in which the engine failed on every request.", value=bins.failed_steps
    )
    for name, text, counts in (
        ("cutoffs", "Slots in which a new constraint ended selection, by constraint.", bins.cutoffs),
        ("preemptions", "Preemptions, by reason.", bins.preempted),
    ):
        family = CounterMetricFamily(f"kaiseki_{name}", text, labels=("reason",))
        for reason, count in zip(Reason, counts.tolist(), strict=True):
            if count:
                family.add_metric((reason.label,), count)
        yield family


def _tenant_labels(bins: Bins) -> list[tuple[int, str]]:
    return [*enumerate(bins.tenants), (bins.max_tenants, OTHER)]


def _add_histogram(
    family: HistogramMetricFamily, labels: Sequence[str], bounds: F64, counts: I64, total: float
) -> None:
    upto = np.cumsum(counts).tolist()
    edges = [*(str(b) for b in bounds.tolist()), "+Inf"]
    family.add_metric(labels, buckets=list(zip(edges, upto, strict=True)), sum_value=float(total))
