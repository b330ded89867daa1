"""The doctor: every planted fault is found by its rule and no other, and nothing is found in health."""

from __future__ import annotations

from typing import Any

import pytest
from tests.harness import Bench, job

from kaiseki.core.settings import SchedulerSettings
from kaiseki.observe.doctor.case import Case
from kaiseki.observe.doctor.diagnose import diagnose
from kaiseki.observe.doctor.readings import Readings, parse
from kaiseki.observe.exposition import expose

SETTINGS = {
    "scheduling": {
        "policy": "kaiseki",
        "max_waiting_tokens": 0,
        "decide_share": 0.2,
        "quantum_tokens": 16,
        "policy_settings": {"tau_ms": 1000.0},
    },
    "classes": {
        "chat": {"ttft_ms": 500, "tbt_ms": 60, "weight": 4.0},
        "bulk": {"deadline_s": 60, "weight": 1.0},
    },
}
TTFT, GAP = 'kaiseki_ttft_seconds{class="chat"}', 'kaiseki_tbt_seconds{class="chat"}'
EDGES = {
    "vllm:time_to_first_token_seconds": (0.1, 0.5, 1, 5, 10),
    "vllm:inter_token_latency_seconds": (0.02, 0.05, 0.1, 0.5),
    "vllm:request_queue_time_seconds": (0.1, 0.5, 1, 5, 10),
    "vllm:iteration_tokens_total": (16, 128, 512, 2048),
    "vllm:request_prompt_tokens": (10, 20, 50, 500, 2000),
    "vllm:nixl_xfer_time_seconds": (0.0005, 0.001, 0.01),
    TTFT: (0.1, 0.5, 1, 5, 10),
    GAP: (0.02, 0.05, 0.1, 0.5),
    "kaiseki_slot_seconds": (0.01, 0.02, 0.05, 0.1),
    "kaiseki_decide_seconds": (0.0005, 0.001, 0.01),
}
HEALTHY: dict[str, Any] = {
    "vllm:num_requests_running": 4,
    "vllm:num_requests_waiting": 0,
    "vllm:kv_cache_usage_perc": 0.5,
    "vllm:prompt_tokens_total": 20_000,
    "vllm:generation_tokens_total": 2_000,
    "vllm:prefix_cache_queries_total": 20_000,
    "vllm:prefix_cache_hits_total": 12_000,
    'vllm:request_success_total{finished_reason="stop"}': 40,
    "vllm:time_to_first_token_seconds": [0.2] * 40,
    "vllm:inter_token_latency_seconds": [0.03] * 400,
    TTFT: [0.2] * 40,
    GAP: [0.03] * 400,
    "vllm:request_queue_time_seconds": [0.05] * 40,
    "vllm:iteration_tokens_total": [100] * 200,
    "vllm:request_prompt_tokens": [400] * 40,
    "kaiseki_slot_seconds": [0.04] * 200,
    "kaiseki_decide_seconds": [0.0004] * 200,
    'kaiseki_cutoffs_total{reason="queue_empty"}': 100,
}


def page(values: dict[str, Any]) -> str:
    lines = []
    for name, value in values.items():
        if not isinstance(value, list):
            lines.append(f"{name} {value}")
            continue
        base, _, labels = name.rstrip("}").partition("{")
        lines.append(f"# TYPE {base} histogram")
        for edge in (*EDGES[name], float("inf")):
            le = "+Inf" if edge == float("inf") else edge
            lines.append(
                f'{base}_bucket{{{labels}{"," * bool(labels)}le="{le}"}} {sum(v <= edge for v in value)}'
            )
        lines += [f"{base}_sum{{{labels}}} {sum(value)}", f"{base}_count{{{labels}}} {len(value)}"]
    return "\n".join(lines) + "\n"


def case(
    changes: dict[str, Any],
    settings: dict[str, Any] | None = None,
    requests: list[dict[str, Any]] | None = None,
) -> Case:
    """A window of ten seconds in which a healthy server did these things otherwise."""
    now = HEALTHY | changes
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    before = {name: value for name, value in now.items() if name in gauges}
    before |= {name: 0 for name, value in now.items() if name not in gauges and not isinstance(value, list)}
    state = {"settings": settings or SETTINGS, "kv": {"block_tokens": 16}}
    return Case(Readings(parse(page(now), 10.0), parse(page(before), 0.0)), state, requests or [])


def found(*cases: Case) -> list[str]:
    return [f.id for _, f in diagnose({f"s{i}": c for i, c in enumerate(cases)})]


def with_settings(**scheduling: Any) -> dict[str, Any]:
    return SETTINGS | {"scheduling": SETTINGS["scheduling"] | scheduling}


SLOW = {TTFT: [4.0] * 40}
QUEUED = SLOW | {"vllm:request_queue_time_seconds": [4.0] * 40, "vllm:num_requests_waiting": 9}
QUIET = {
    "vllm:prompt_tokens_total": 0,
    "vllm:generation_tokens_total": 0,
    "vllm:prefix_cache_queries_total": 0,
    "vllm:prefix_cache_hits_total": 0,
    'vllm:request_success_total{finished_reason="stop"}': 0,
    "vllm:time_to_first_token_seconds": [],
    "vllm:inter_token_latency_seconds": [],
    "vllm:request_queue_time_seconds": [],
    TTFT: [],
    GAP: [],
}
LINES = [{"request": f"r{i}", "prompt_tokens": 200, "ttft_ms": 150.0} for i in range(20)]
PLANTED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, list[dict[str, Any]]]] = {
    "admission_queue": (QUEUED | {'kaiseki_cutoffs_total{reason="no_row"}': 500}, None, []),
    "slow_prefill": (SLOW, None, []),
    "budget_breaks_tbt": ({GAP: [0.03] * 390 + [0.4] * 10}, None, []),
    "decodes_too_many": ({GAP: [0.09] * 400, "vllm:inter_token_latency_seconds": [0.09] * 400}, None, []),
    "few_prefix_hits": ({"vllm:prefix_cache_hits_total": 200}, None, []),
    "hash_granularity": (
        {"vllm:prefix_cache_hits_total": 200, "vllm:request_prompt_tokens": [18] * 40},
        None,
        [],
    ),
    "slow_transfers": ({"vllm:nixl_xfer_time_seconds": [0.004] * 20}, None, []),
    "losing_speculation": (
        {"vllm:spec_decode_num_draft_tokens_total": 1000, "vllm:spec_decode_num_accepted_tokens_total": 150},
        None,
        [],
    ),
    "large_prompts_wait": (
        {},
        None,
        [*LINES, {"request": "big", "prompt_tokens": 40_000, "ttft_ms": 9000.0}],
    ),
    "kv_full": ({"vllm:kv_cache_usage_perc": 0.97, "vllm:num_requests_waiting": 3}, None, []),
    "preemptions": ({"vllm:num_preemptions_total": 30}, None, []),
    "errors": ({'vllm:request_success_total{finished_reason="error"}': 5}, None, []),
    "stuck_engine": (QUIET, None, []),
    "lagging_gauges": (
        {'vllm:request_success_total{finished_reason="stop"}': 0, "vllm:num_requests_running": 0},
        None,
        [],
    ),
    "low_throughput": ({"vllm:generation_tokens_total": 40, "vllm:prompt_tokens_total": 300}, None, []),
    "adapter_waits": ({'kaiseki_cutoffs_total{reason="adapter"}': 50}, None, []),
    "quantum_too_fine": ({"kaiseki_decide_seconds": [0.012] * 200}, None, []),
    "targets_ignored": ({}, with_settings(policy="fcfs"), []),
    "budget_ignored": ({}, with_settings(budget_tokens=512), []),
    "tau_too_low": ({}, with_settings(policy_settings={"tau_ms": 1.0}), []),
    "queue_limit_too_high": (
        {"vllm:num_requests_waiting": 5, 'kaiseki_requests_total{outcome="expired"}': 7},
        None,
        [],
    ),
    "queue_limit_too_low": (
        {'kaiseki_refusals_total{reason="queue_full"}': 7},
        with_settings(max_waiting_tokens=100),
        [],
    ),
}


def test_health() -> None:
    assert found(case({})) == []
    assert found(case({}), case({"vllm:num_requests_running": 6})) == []


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_and_nothing_else(fault: str) -> None:
    assert found(case(*PLANTED[fault])) == [fault]


def test_a_class_without_a_target_may_wait() -> None:
    """Batch work that waits for minutes is no finding while those with targets are served in time."""
    assert found(case({"vllm:time_to_first_token_seconds": [9.0] * 40})) == []


def test_without_settings_usual_targets_are_assumed() -> None:
    plain = case({"vllm:time_to_first_token_seconds": [4.0] * 40})
    assert found(Case(plain.readings)) == ["slow_prefill"]


def test_a_herd_shows_by_comparing() -> None:
    assert found(case({"vllm:num_requests_running": 40}), case({}), case({})) == ["herd"]


def test_halved_acceptance_is_told_from_a_poor_draft() -> None:
    drafted, accepted = (
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    )
    before = parse(page(HEALTHY | {drafted: 10_000, accepted: 8_000}), 0.0)
    now = parse(page(HEALTHY | {drafted: 11_000, accepted: 8_350}), 10.0)
    told = {f.id: f for _, f in diagnose({"s": Case(Readings(now, before))})}
    assert "halved" in told["losing_speculation"].cause


def test_a_counter_that_fell_belongs_to_a_new_server() -> None:
    now, before = parse("a_total 5\n", 10.0), parse("a_total 900\n", 0.0)
    assert Readings(now, before).grew("a_total") == 5


def test_what_is_no_metrics_page_is_said() -> None:
    with pytest.raises(ValueError, match="no metrics"):
        parse("")


def test_it_reads_what_our_own_server_exports() -> None:
    """Names in the rules are those on the page: a run with one row and a queue shows the reason."""
    bench = Bench("fcfs", settings=SchedulerSettings(max_batch_size=1))
    for i in range(12):
        bench.submit(job(f"r{i}", 2000, 100), list(range(2000)))
    for _ in range(600):
        bench.driver.step()
    text = expose(bench.driver.metrics).decode()
    told = [f for _, f in diagnose({"s": Case(Readings(parse(text, 0.0)))})]
    queue = [f for f in told if f.id == "admission_queue"]
    assert queue, told
    assert "batch is full" in queue[0].cause
