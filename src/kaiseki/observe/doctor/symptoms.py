"""Symptoms that any engine with vLLM's metric names can show (A17), each told from its likely causes."""

from __future__ import annotations

from kaiseki.observe.doctor.case import DEFAULT_TBT_S, DEFAULT_TTFT_S, Case, Finding, Rule, ms

TTFT, GAP = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
QUEUE = "vllm:request_queue_time_seconds"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV = "vllm:kv_cache_usage_perc"
PROMPT, OUTPUT = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
FULL = 0.9
"""Share of the KV pool from which on it binds."""
LEAST_LOOKED_UP = 2_000
"""Prompt tokens below which a hit rate says nothing."""


def slow_first_tokens(case: Case) -> Finding | None:
    """TTFT up: because requests queue, or because the prefill itself takes so long."""
    r = case.readings
    late = _worst(case, TTFT, 0.9, case.targets_s("ttft_ms"), DEFAULT_TTFT_S)
    if late is None:
        return None
    whose, p90, target = late
    queue, kv = r.quantile(QUEUE, 0.9) or 0.0, r.gauge(KV) or 0.0
    evidence = (
        f"p90 of {whose} {ms(p90)} (target {ms(target)}), p90 of {QUEUE} {ms(queue)}, {KV} {kv:.2f}, "
        f"{r.gauge(WAITING) or 0:.0f} waiting"
    )
    symptom = "First tokens come late"
    if queue < p90 / 2:
        return Finding(
            "slow_prefill",
            symptom,
            "not the queue but the prefill takes the time: prompts are long, or share slots with many "
            "decodes",
            evidence,
            "look at the prefix hit rate, give prefill a larger part of a slot (looser TBT, larger budget), "
            "or"
            " split prefill and decode (`kaiseki advise` says whether it pays)",
        )
    why = _why_they_queue(case, kv)
    return Finding(
        "admission_queue",
        f"{symptom} while the card is not the limit" if kv < FULL else symptom,
        why[0],
        evidence + why[2],
        why[1],
    )


def _why_they_queue(case: Case, kv: float) -> tuple[str, str, str]:
    """Cause, fix and more evidence."""
    cut = case.readings.grew_by("kaiseki_cutoffs_total", "reason")
    cut.pop("queue_empty", None)
    first = next(iter(cut), "")
    told = f", kaiseki_cutoffs_total mostly {first}" if first else ""
    if kv >= FULL or first in ("no_kv", "watermark", "champion_reserve"):
        return (
            "requests wait for KV blocks",
            "fewer or shorter outputs at a time, a larger pool, or another"
            " replica; `kaiseki explain` of a waiting request says how many blocks it lacks",
            told,
        )
    if first == "no_row":
        return "the batch is full while KV is left", "raise scheduling.max_batch_size", told
    if first == "fair_share":
        return (
            "tenants ahead of their share wait for others",
            "nothing if the shares are meant; else their weights, or scheduling.fairness_window",
            told,
        )
    if first in ("no_time", "decode_bound"):
        return (
            "the tightest TBT leaves slots too little room for prefill",
            "loosen that TBT, serve its class on a replica of its own, or add one",
            told,
        )
    return (
        "requests arrive faster than they are admitted, though KV is left",
        "raise the batch limit"
        " (max_num_seqs, scheduling.max_batch_size) or the token budget of a step, or add a replica",
        told,
    )


def late_gaps(case: Case) -> Finding | None:
    """TBT up while TTFT is normal: prefill chunks stretch the slots, or the decodes alone do."""
    r = case.readings
    late = _worst(case, GAP, 0.99, case.targets_s("tbt_ms"), DEFAULT_TBT_S)
    if late is None:
        return None
    whose, p99, target = late
    p50 = r.quantile(GAP, 0.5) or 0.0
    tokens = r.quantile("vllm:iteration_tokens_total", 0.9)
    evidence = f"p99 of {whose} {ms(p99)} (target {ms(target)}), p50 of {GAP} {ms(p50)}"
    if tokens is not None:
        evidence += f", p90 of vllm:iteration_tokens_total {tokens:.0f}"
    if p50 > target:
        return Finding(
            "decodes_too_many",
            "Tokens come slowly all the time",
            "the decode batch alone takes longer than the target allows",
            evidence,
            "lower the batch limit, or a card with more memory bandwidth; a class with this TBT may not fit "
            "here",
        )
    return Finding(
        "budget_breaks_tbt",
        "Streams stutter now and then",
        "steps with prefill in them last longer than the gap that decodes may have",
        evidence,
        "lower the token budget of a step (max_num_batched_tokens, scheduling.budget_tokens) to what"
        " fits the TBT; policy kaiseki sizes chunks by it",
    )


def _worst(
    case: Case, name: str, q: float, targets: dict[str, float], default: float
) -> tuple[str, float, float] | None:
    """The quantile that is furthest beyond its target: what it is of, its value and the target, seconds.

    Classes are judged one by one where the server tells their targets, else all requests together.
    """
    own = {TTFT: "kaiseki_ttft_seconds", GAP: "kaiseki_tbt_seconds"}[name]
    if not targets:
        found = [(name, case.readings.quantile(name, q), default)]
    else:
        found = [
            (f"{own}, class {c},", case.readings.quantile(own, q, **{"class": c}), t)
            for c, t in targets.items()
        ]
    late = [(whose, value, target) for whose, value, target in found if value is not None and value > target]
    return max(late, key=lambda x: x[1] / x[2], default=None)


def few_prefix_hits(case: Case) -> Finding | None:
    """Prefix hits below 30 %: prompts too short for a block, or nothing shared, or it was evicted."""
    r = case.readings
    asked, hit = r.grew("vllm:prefix_cache_queries_total"), r.grew("vllm:prefix_cache_hits_total")
    if asked < LEAST_LOOKED_UP or hit / asked >= 0.3:
        return None
    page = case.state.get("kv", {}).get("block_tokens") or _block_size(case)
    median = r.quantile("vllm:request_prompt_tokens", 0.5)
    evidence = f"{hit:.0f} of {asked:.0f} prompt tokens found ({hit / asked:.0%})"
    symptom = "Few prompt tokens come from the prefix cache"
    if page and median and median <= 2 * page:
        return Finding(
            "hash_granularity",
            symptom,
            f"most prompts are no longer than two blocks of {page} tokens, and only whole blocks are reused",
            f"{evidence}, median of vllm:request_prompt_tokens at most {median:.0f}",
            "a smaller memory.block_size, or nothing: short prompts cost little",
        )
    return Finding(
        "few_prefix_hits",
        symptom,
        "prompts share little, or what they share was evicted or is on another replica",
        f"{evidence}, {KV} {r.gauge(KV) or 0:.2f}",
        "put what is common first in prompts, route by prefix (prefix-aware, kv-aware), enlarge the pool",
    )


def _block_size(case: Case) -> int | None:
    sizes = case.readings.label_values("vllm:cache_config_info", "block_size") - {""}
    return int(min(sizes)) if sizes and min(sizes).isdecimal() else None


def slow_transfers(case: Case) -> Finding | None:
    """KV transfers that take over 1 ms."""
    mean = case.readings.mean("vllm:nixl_xfer_time_seconds")
    if mean is None or mean <= 1e-3:
        return None
    return Finding(
        "slow_transfers",
        "KV transfers take over a millisecond",
        "the link is shared by too many transfers at a time, or slower than planned for",
        f"mean of vllm:nixl_xfer_time_seconds {ms(mean)}",
        "cap active transfers per link and keep head-room (links: max_active, headroom), or move less KV",
    )


def losing_speculation(case: Case) -> Finding | None:
    """Draft tokens that are mostly thrown away, or half as often accepted as before."""
    r = case.readings
    drafted, accepted = (
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
    )
    tried = r.grew(drafted)
    if tried < 200:
        return None
    rate = r.grew(accepted) / tried
    before = r.grew_before(accepted) / r.grew_before(drafted) if r.grew_before(drafted) else None
    dropped = before is not None and rate <= before / 2
    if rate >= 0.3 and not dropped:
        return None
    was = f", {before:.0%} before" if before is not None else ""
    return Finding(
        "losing_speculation",
        "Speculation costs more than it brings",
        "acceptance has halved: the load is no longer what the draft is good at, or it verifies elsewhere"
        if dropped
        else "most drafted tokens are rejected, and at this batch size verifying them is not free",
        f"{rate:.0%} of {tried:.0f} draft tokens accepted{was}, {r.gauge(RUNNING) or 0:.0f} running",
        "fewer draft tokens, none above the batch size at which it loses, verify beside the target",
    )


def large_prompts_wait(case: Case) -> Finding | None:
    """Large prompts that wait over 5 s while others don't."""
    told = [r for r in case.requests if r.get("ttft_ms") is not None]
    if len(told) < 8:
        return None
    lengths = sorted(r["prompt_tokens"] for r in told)
    large = max(4 * lengths[len(lengths) // 2], 4096)
    late = [r for r in told if r["prompt_tokens"] >= large and r["ttft_ms"] > 5000]
    others = sorted(r["ttft_ms"] for r in told if r["prompt_tokens"] < large)
    if not late or not others or others[len(others) // 2] > 2500:
        return None
    worst = max(late, key=lambda r: r["ttft_ms"])
    return Finding(
        "large_prompts_wait",
        "Large prompts queue for over 5 s while short ones are served",
        "they get what is left of slots, and their classes ask for no more",
        f"{len(late)} of the last {len(told)} requests, worst {worst['request']} with "
        f"{worst['prompt_tokens']}"
        f" prompt tokens, first token after {worst['ttft_ms'] / 1e3:.1f} s; median of the others"
        f" {others[len(others) // 2]:.0f} ms",
        "a class of their own with a TTFT in proportion, a larger weight for their tenant, or a pool "
        "for prefill",
    )


def kv_pressure(case: Case) -> Finding | None:
    """The KV pool is full and work waits, or is thrown away."""
    r = case.readings
    kv, waiting = r.gauge(KV), r.gauge(WAITING) or 0
    ended = r.grew("vllm:request_success_total")
    preempted = r.grew("vllm:num_preemptions_total")
    if preempted > max(2.0, 0.1 * ended):
        return Finding(
            "preemptions",
            "Work is computed twice",
            "more is admitted than the KV pool can hold to its end, so requests are preempted and begin "
            "again",
            f"{preempted:.0f} preemptions while {ended:.0f} requests ended, {KV} {kv or 0:.2f}",
            "lower memory.watermark_ratio or the batch limit, or enlarge the pool",
        )
    if kv is None or kv < FULL or not waiting:
        return None
    return Finding(
        "kv_full",
        "The KV pool is full and requests wait",
        "outputs and contexts of what runs fill it",
        f"{KV} {kv:.2f} with {waiting:.0f} waiting",
        "a larger pool (pool_tokens, gpu_memory_utilization), shorter max_tokens, or another replica",
    )


def errors(case: Case) -> Finding | None:
    """Requests that end by an error."""
    r = case.readings
    ended = r.grew_by("vllm:request_success_total", "finished_reason")
    failed, total = ended.get("error", 0.0), sum(ended.values())
    if failed < max(1.0, 0.01 * total):
        return None
    return Finding(
        "errors",
        "Requests fail",
        "the engine raises errors on them",
        f"{failed:.0f} of {total:.0f} requests ended with finished_reason error",
        "the server's log names each request and error; `kaiseki explain` one of them",
    )


def no_progress(case: Case) -> Finding | None:
    """Work is there, and nothing is computed."""
    r = case.readings
    busy = (r.least(RUNNING) or 0) + (r.least(WAITING) or 0)
    moved = r.grew(PROMPT) + r.grew(OUTPUT)
    if r.seconds is None or r.seconds < 1 or not busy or moved or not r.has(PROMPT):
        return None
    return Finding(
        "stuck_engine",
        "Nothing moves",
        "the engine hangs in a step, or no waiting request can ever be admitted",
        f"{busy:.0f} requests running or waiting and no token in {r.seconds:.0f} s",
        "GET /health says since when; restart the engine if it hangs, else `kaiseki explain` what waits",
    )


def lagging_gauges(case: Case) -> Finding | None:
    """Tokens are computed by requests that the gauges don't know."""
    r = case.readings
    moved = r.grew(OUTPUT)
    ended = r.grew("vllm:request_success_total")
    if r.seconds is None or moved <= 0 or not r.has(RUNNING) or ended:
        return None
    if (r.gauge(RUNNING) or 0) or (r.least(RUNNING) or 0):
        return None
    return Finding(
        "lagging_gauges",
        "Gauges don't show what runs",
        "they are refreshed less often than requests come and go, so routers that read them send too "
        "much here",
        f"{moved:.0f} tokens in {r.seconds:.0f} s, none running by {RUNNING}, and none ended",
        "refresh gauges each step; let routers count what they have sent themselves",
    )


def low_throughput(case: Case) -> Finding | None:
    """Few tokens though several run and nothing else is short."""
    r = case.readings
    running, seconds = r.least(RUNNING) or 0, r.seconds
    if seconds is None or seconds < 1 or running < 1:
        return None
    rate = r.grew(OUTPUT) / seconds
    if rate <= 0 or rate / running >= 2 or r.grew(PROMPT) / seconds > 50 * rate:
        return None
    return Finding(
        "low_throughput",
        "Running requests get less than two tokens a second each",
        "steps are slow for what they compute: host time, a busy machine, or a card that throttles",
        f"{rate:.1f} tokens/s for {running:.0f} running",
        "compare step times with `kaiseki calibrate` or another replica; look at what else the machine does",
    )


def adapter_waits(case: Case) -> Finding | None:
    """Requests wait for a LoRA adapter whose turn does not come."""
    r = case.readings
    cut = r.grew("kaiseki_cutoffs_total", reason="adapter")
    waiting = _names(case, "waiting_lora_adapters") - _names(case, "running_lora_adapters")
    if not cut and not waiting:
        return None
    named = f"{', '.join(sorted(waiting))} waiting by vllm:lora_requests_info" if waiting else ""
    counted = f"{cut:.0f} slots cut by reason adapter in kaiseki_cutoffs_total" if cut else ""
    return Finding(
        "adapter_waits",
        "Requests for some adapters wait while others run",
        "all adapter slots hold adapters that are in use",
        ", ".join(filter(None, (named, counted))),
        "more adapter slots (max_loras, lora_slots), or a replica for the adapters that are asked for most",
    )


def _names(case: Case, label: str) -> set[str]:
    found = case.readings.label_values("vllm:lora_requests_info", label)
    return {name.strip() for names in found for name in names.split(",")} - {""}


def herd(case: Case) -> Finding | None:
    """One of several servers gets far more than the others."""
    if len(case.loads) < 2:
        return None
    mean = sum(case.loads.values()) / len(case.loads)
    busiest = max(case.loads, key=lambda name: case.loads[name])
    if mean < 1 or case.loads[busiest] < 2 * mean:
        return None
    return Finding(
        "herd",
        "One replica has far more to do than the others",
        "routers choose by the same stale figures, or by prefix alone",
        ", ".join(f"{name}: {load:.0f}" for name, load in case.loads.items()) + " running or waiting",
        "route by predicted finish with a load term, and count what was sent since the last refresh",
    )


RULES: tuple[Rule, ...] = (
    no_progress,
    errors,
    slow_first_tokens,
    late_gaps,
    kv_pressure,
    few_prefix_hits,
    slow_transfers,
    losing_speculation,
    large_prompts_wait,
    adapter_waits,
    herd,
    lagging_gauges,
    low_throughput,
)
