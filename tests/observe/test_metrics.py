"""Bins count what they are given, and Prometheus can read the page."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kaiseki.core.applying import TOKEN
from kaiseki.core.endings import Ending
from kaiseki.core.reasons import Finish, Outcome, Reason
from kaiseki.observe.exposition import expose
from kaiseki.observe.metrics import GAP_S, Bins

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(bins: Bins) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(expose(bins).decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, f"{key} twice"
            samples[key] = sample.value
    return samples


def get(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def apply(bins: Bins, gaps: np.ndarray, tenant: np.ndarray, cls: np.ndarray) -> None:
    tokens = np.zeros(gaps.size, TOKEN)
    tokens["ns"], tokens["tenant"], tokens["cls"] = gaps * 1e9, tenant, cls
    bins.on_apply(0.05, tokens)


def end(bins: Bins, outcome: Outcome, *, finish: Finish = Finish.NONE, reason: Reason = Reason.NONE) -> None:
    refused = outcome == Outcome.REFUSED
    ending = Ending(
        request_id="r", row=0, seq=0, tenant=0, cls=0, outcome=outcome, finish=finish, reason=reason,
        attained=outcome == Outcome.COMPLETED, demoted=False, arrival_ns=10**9,
        admitted_ns=-1 if refused else 14 * 10**8, first_token_ns=-1, ended_ns=22 * 10**8, prompt=100,
        outputs=7, cached=32, preemptions=0, recomputed=0, late_gaps=0, service_ns=0.0,
    )  # fmt: skip
    bins.on_end([ending])


@pytest.fixture
def bins() -> Bins:
    bins = Bins("tiny", max_tenants=2)
    bins.set_names(["acme", "labs"], ["fast", "slow"])
    return bins


def test_histograms_agree_with_the_values(bins: Bins) -> None:
    rng = np.random.default_rng(1)
    gaps = np.concatenate([rng.gamma(2.0, 0.1, 500), np.array(GAP_S), [1e6]])
    tenant = rng.integers(0, 2, gaps.size).astype(np.int32)
    cls = rng.integers(0, 2, gaps.size).astype(np.int32)
    apply(bins, gaps, tenant, cls)
    samples = read(bins)
    name = "vllm:inter_token_latency_seconds"
    for bound in GAP_S:
        got = get(samples, f"{name}_bucket", model_name="tiny", engine="0", le=str(float(bound)))
        assert got == np.count_nonzero(gaps <= bound)
    assert get(samples, f"{name}_count", model_name="tiny", engine="0") == gaps.size
    assert get(samples, f"{name}_sum", model_name="tiny", engine="0") == pytest.approx(gaps.sum())
    mine = gaps[(tenant == 1) & (cls == 0)]
    labels = {"tenant": "labs", "class": "fast"}
    assert get(samples, "kaiseki_tbt_seconds_count", **labels) == mine.size
    assert get(samples, "kaiseki_tbt_seconds_sum", **labels) == pytest.approx(mine.sum())


def test_ended_requests(bins: Bins) -> None:
    end(bins, Outcome.COMPLETED, finish=Finish.STOP)
    end(bins, Outcome.COMPLETED, finish=Finish.LENGTH)
    end(bins, Outcome.CANCELLED, reason=Reason.CLIENT_GONE)
    end(bins, Outcome.EXPIRED, reason=Reason.HOPELESS)
    end(bins, Outcome.REFUSED, reason=Reason.NEVER_FITS)
    bins.count_refusal("labs", "slow", Reason.QUEUE_FULL)
    samples = read(bins)
    acme = {"tenant": "acme", "class": "fast"}
    assert get(samples, "kaiseki_requests_total", **acme, outcome="completed") == 2
    assert get(samples, "kaiseki_requests_total", **acme, outcome="cancelled") == 1
    assert get(samples, "kaiseki_slo_total", **acme, result="attained") == 2
    assert get(samples, "kaiseki_slo_total", **acme, result="missed") == 2  # the cancelled one is not counted
    assert get(samples, "kaiseki_request_tokens_total", **acme, kind="cached") == 5 * 32
    assert get(samples, "kaiseki_refusals_total", outcome="refused", reason="never_fits") == 1
    assert get(samples, "kaiseki_refusals_total", outcome="refused", reason="queue_full") == 1
    assert get(samples, "kaiseki_refusals_total", outcome="expired", reason="hopeless") == 1
    vllm = {"model_name": "tiny", "engine": "0"}
    for reason, count in (("stop", 1), ("length", 1), ("abort", 1), ("error", 0)):
        assert get(samples, "vllm:request_success_total", **vllm, finished_reason=reason) == count
    assert get(samples, "vllm:e2e_request_latency_seconds_count", **vllm) == 2
    assert get(samples, "vllm:request_queue_time_seconds_count", **vllm) == 4


def test_many_ends_are_folded_in_without_loss(bins: Bins) -> None:
    labels = {"tenant": "acme", "class": "fast"}
    for more, seen in ((130, 130), (70, 200)):
        for _ in range(more):
            end(bins, Outcome.COMPLETED, finish=Finish.STOP)
        assert get(read(bins), "kaiseki_requests_total", **labels, outcome="completed") == seen


def test_slots_and_load(bins: Bins) -> None:
    bins.on_slot(
        decide_s=1e-4,
        prompt_tokens=48,
        output_tokens=3,
        running=4,
        waiting=9,
        kv_free=25,
        kv_live=70,
        kv_total=100,
        prefix_queried=64,
        prefix_hit=16,
        cutoffs=[Reason.NO_KV, Reason.NO_KV],
        preempted=[Reason.PURCHASED],
    )
    bins.set_fairness(np.array([1.5, 2.5]), gap=1.0, bound=4.0)
    samples = read(bins)
    vllm = {"model_name": "tiny", "engine": "0"}
    expected = {
        "vllm:num_requests_running": 4,
        "vllm:num_requests_waiting": 9,
        "vllm:kv_cache_usage_perc": 0.75,
        "vllm:prompt_tokens_total": 48,
        "vllm:generation_tokens_total": 3,
        "vllm:prefix_cache_queries_total": 64,
        "vllm:prefix_cache_hits_total": 16,
        "vllm:num_preemptions_total": 1,
        "vllm:iteration_tokens_total_sum": 51,
    }
    assert {name: get(samples, name, **vllm) for name in expected} == expected
    assert get(samples, "kaiseki_cutoffs_total", reason="no_kv") == 2
    assert get(samples, "kaiseki_preemptions_total", reason="purchased") == 1
    assert get(samples, "kaiseki_decide_seconds_count") == 1
    assert get(samples, "kaiseki_kv_blocks", state="live") == 70
    assert get(samples, "kaiseki_tenant_service", tenant="labs") == 2.5
    assert get(samples, "kaiseki_fairness_bound") == 4.0


def test_each_reason_has_its_own_label(bins: Bins) -> None:
    for times, reason in enumerate(Reason, start=1):
        bins.cutoffs[reason] = times
        bins.preempted[reason] = times
        for _ in range(times):
            bins.count_refusal("acme", "interactive", reason)
    samples = read(bins)
    for times, reason in enumerate(Reason, start=1):
        assert get(samples, "kaiseki_cutoffs_total", reason=reason.label) == times
        assert get(samples, "kaiseki_preemptions_total", reason=reason.label) == times
        refused = get(samples, "kaiseki_refusals_total", outcome="refused", reason=reason.label)
        assert refused == times, reason


def test_errors_of_the_engine(bins: Bins) -> None:
    bins.on_errors(3, 1, False)
    bins.on_errors(0, 2, True)
    bins.load.engine_failing = True
    samples = read(bins)
    assert get(samples, "kaiseki_engine_errors_total", then="retried") == 3
    assert get(samples, "kaiseki_engine_errors_total", then="failed") == 3
    assert get(samples, "kaiseki_failed_steps_total") == 1
    assert get(samples, "kaiseki_engine_failing") == 1


def test_tenants_beyond_the_cap_and_unnamed_ones_share_a_label(bins: Bins) -> None:
    bins.set_names(["acme", "labs", "third", "fourth"], ["fast", "slow", "fast"])
    apply(bins, np.array([0.1, 0.1, 0.1, 0.1, 0.1]), i32(0, 2, 3, 9, 0), i32(0, 0, 2, 0, 2))
    samples = read(bins)
    shared = {"tenant": "other", "class": "fast"}
    assert get(samples, "kaiseki_tbt_seconds_count", **shared) == 3
    assert get(samples, "kaiseki_tbt_seconds_count", **{"tenant": "acme", "class": "fast"}) == 2
    assert not any(("tenant", "third") in labels for _, labels in samples)
