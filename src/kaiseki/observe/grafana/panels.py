"""What the dashboard shows: rows of panels, each some queries with a unit."""

from __future__ import annotations

from dataclasses import dataclass

RANGE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Panel:
    """One time series panel.

    Attributes:
        title: what it shows.
        unit: Grafana's name of the unit.
        queries: PromQL and legend.
        about: one sentence, shown on hover.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str


def _rate(metric: str, by: str = "", where: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({metric}{where}[{RANGE}]))"


def _quantile(q: float, metric: str, by: str = "") -> str:
    keys = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({keys}) (rate({metric}_bucket[{RANGE}])))"


def _attainment(by: str) -> str:
    good = _rate("kaiseki_slo_total", by, '{result="attained"}')
    return f"{good} / {_rate('kaiseki_slo_total', by)}"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Service": (
        Panel(
            "Attainment by class",
            "percentunit",
            ((_attainment("class"), "{{class}}"),),
            "Part of the requests that ended whose first token and gaps were in time.",
        ),
        Panel(
            "TTFT by class",
            "s",
            tuple(
                (_quantile(q, "kaiseki_ttft_seconds", "class"), f"{{{{class}}}} p{q * 100:.0f}")
                for q in (0.5, 0.99)
            ),
            "Arrival to first token.",
        ),
        Panel(
            "Gaps by class",
            "s",
            tuple(
                (_quantile(q, "kaiseki_tbt_seconds", "class"), f"{{{{class}}}} p{q * 100:.0f}")
                for q in (0.5, 0.99)
            ),
            "Between two tokens of a stream.",
        ),
        Panel(
            "Refused and expired",
            "reqps",
            ((_rate("kaiseki_refusals_total", "outcome, reason"), "{{outcome}}: {{reason}}"),),
            "Requests that got no output, by reason.",
        ),
    ),
    "Load": (
        Panel(
            "Requests",
            "short",
            (("vllm:num_requests_running", "running"), ("vllm:num_requests_waiting", "waiting")),
            "At the end of the last slot.",
        ),
        Panel(
            "Tokens",
            "short",
            (
                (_rate("vllm:prompt_tokens_total"), "prefill"),
                (_rate("vllm:generation_tokens_total"), "output"),
            ),
            "Computed per second.",
        ),
        Panel(
            "KV pool in use", "percentunit", (("vllm:kv_cache_usage_perc", "used"),), "Part of all blocks."
        ),
        Panel(
            "Prefix hits",
            "percentunit",
            (
                (
                    f"{_rate('vllm:prefix_cache_hits_total')} / {_rate('vllm:prefix_cache_queries_total')}",
                    "hit rate",
                ),
            ),
            "Part of the prompt tokens that were found in the cache.",
        ),
        Panel(
            "Why the queue was cut",
            "cps",
            ((_rate("kaiseki_cutoffs_total", "reason"), "{{reason}}"),),
            "The constraint that ended selection, each time it changed.",
        ),
        Panel(
            "Preemptions",
            "cps",
            ((_rate("kaiseki_preemptions_total", "reason"), "{{reason}}"),),
            "Running requests that lost their KV, by reason.",
        ),
    ),
    "Fairness": (
        Panel(
            "Service by tenant",
            "short",
            (("kaiseki_tenant_service", "{{tenant}}"),),
            "Card-seconds per unit of weight; lines of tenants with a backlog stay together.",
        ),
        Panel(
            "Lag and bound",
            "s",
            (("kaiseki_fairness_gap", "largest lag"), ("kaiseki_fairness_bound", "H")),
            "How far the tenant furthest ahead is; from H on it gets nothing more.",
        ),
        Panel(
            "Attainment by tenant",
            "percentunit",
            ((_attainment("tenant"), "{{tenant}}"),),
            "As above, by tenant.",
        ),
    ),
    "Scheduler": (
        Panel(
            "Deciding",
            "s",
            tuple((_quantile(q, "kaiseki_decide_seconds"), f"p{q * 100:.0f}") for q in (0.5, 0.99)),
            "Time to decide one slot.",
        ),
        Panel(
            "Slots",
            "s",
            tuple((_quantile(q, "kaiseki_slot_seconds"), f"p{q * 100:.0f}") for q in (0.5, 0.99)),
            "Time to execute one slot.",
        ),
        Panel(
            "Part of slots spent deciding",
            "percentunit",
            ((f"{_rate('kaiseki_decide_seconds_sum')} / {_rate('kaiseki_slot_seconds_sum')}", "share"),),
            "Beyond scheduling.decide_share the quantum gets coarser.",
        ),
        Panel(
            "Engine errors",
            "cps",
            (
                (_rate("kaiseki_engine_errors_total", "then"), "{{then}}"),
                (_rate("kaiseki_failed_steps_total"), "whole steps"),
            ),
            "Chunks on which the engine failed.",
        ),
    ),
}
