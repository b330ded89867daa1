"""How soon: service class, targets and priority of a request, normalised at the edge.

**Class.** What `x-llm-d-inference-objective` (or `x-gateway-inference-objective`) names, else the class
of the tenant, else `server.default_class`. A tenant may ask for its own class, for those listed in its
`classes`, and for any that is no more urgent than its own: its first target (TTFT or deadline) no sooner,
its TBT no shorter, its weight no larger, its tier no lower. A trusted caller may ask for all.

**Targets.** `x-llm-d-slo-ttft-ms` and `x-llm-d-slo-tpot-ms` (or `x-slo-ttft-ms`, `x-slo-tpot-ms`), in
milliseconds, replace the class's. Anybody may loosen a target. One tighter than the class's is taken from
a trusted caller only; from others the class's stays, as if nothing had been asked: gateways set these
headers on every request, so refusing would help nobody. The answer's `x-kaiseki-slo` says what applies.
Values are rounded down to two significant digits, which keeps the number of distinct targets small.

**Priority.** Two fields, two polarities:

- `priority` in the body, as in vLLM: lower is sooner. 0 is the most urgent that people usually send.
- `nvext.agent_hints.priority`, as in NVIDIA Dynamo: higher is sooner, 0 says nothing.

Both become an offset to the class's own place, lower is sooner, where a request that says nothing is at 0:
`priority` minus 10, and minus the hint. So `priority: 0` and a hint of 10 are the same and both go before
silent requests; `priority: 10` and a hint of 0 are the same as silence. When both are given, `priority`
counts. Offsets order requests *within* a class: they are clamped to less than the distance between two
tiers, except from a trusted caller, who may put a request before or behind other classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from kaiseki.config import Settings
from kaiseki.core.requests import ServiceClass
from kaiseki.sections import TIER_STEP
from kaiseki.server.errors import ApiError, invalid
from kaiseki.server.identity import Caller, Directory

CLASS_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TBT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
SLO_HEADER = "x-kaiseki-slo"

SILENT_PRIORITY = 10
"""The body's `priority` that means the same as saying nothing."""
MAX_OFFSET = TIER_STEP // 2 - 1
MAX_TRUSTED_OFFSET = 100_000
LEAST_TARGET_MS, MOST_TARGET_MS = 1e-6, 1e9


class Targets:
    """Turns what a request says about urgency into a class and a priority."""

    def __init__(self, settings: Settings, directory: Directory) -> None:
        self._classes = settings.service_classes()
        self._default = settings.server.default_class
        self._directory = directory

    def service_class(self, caller: Caller, headers: Mapping[str, str]) -> ServiceClass:
        """The class of a request, with its own targets if it has any.

        Raises:
            ApiError: 400 for an unknown class or a target that is no number, 403 for a class that the
                tenant may not use.
        """
        tenant = self._directory.tenant(caller.charged)
        own = self._classes[tenant.cls or self._default]
        wanted = own
        header, name = _first(headers, CLASS_HEADERS)
        if name is not None:
            if name not in self._classes:
                raise invalid(header, f"no such class; there are {', '.join(self._classes)}", name)
            wanted = self._classes[name]
        if not (caller.trusted or wanted.name in tenant.classes or _looser(wanted, own)):
            allowed = f"only {own.name!r}, less urgent ones{_and(tenant.classes)}"
            message = f"Tenant {caller.tenant!r} may not use class {wanted.name!r}: {allowed}."
            raise ApiError(403, message, param=header, code="class_not_allowed")
        return replace(
            wanted,
            ttft_ns=_target(wanted.ttft_ns, *_first(headers, TTFT_HEADERS), caller.trusted),
            tbt_ns=_target(wanted.tbt_ns, *_first(headers, TBT_HEADERS), caller.trusted),
        )


def offset(priority: int | None, hint: int | None, trusted: bool) -> int:
    """The request's place relative to silent ones of its class; lower is sooner."""
    if priority is not None:
        wanted = priority - SILENT_PRIORITY
    elif hint is not None:
        wanted = -hint
    else:
        wanted = 0
    most = MAX_TRUSTED_OFFSET if trusted else MAX_OFFSET
    return max(-most, min(most, wanted))


def describe(cls: ServiceClass) -> str:
    """A class and its targets, for the `x-kaiseki-slo` header."""
    parts = [f"class={cls.name}"]
    for name, ns in (("ttft_ms", cls.ttft_ns), ("tbt_ms", cls.tbt_ns), ("deadline_ms", cls.deadline_ns)):
        if ns is not None:
            parts.append(f"{name}={ns / 1e6:g}")
    return "; ".join(parts)


def _looser(a: ServiceClass, b: ServiceClass) -> bool:
    """Whether class `a` is no more urgent than `b` in any respect."""
    return (
        _first_due(a) >= _first_due(b)
        and _or_never(a.tbt_ns) >= _or_never(b.tbt_ns)
        and a.weight <= b.weight
        and a.tier >= b.tier
    )


def _first_due(cls: ServiceClass) -> float:
    return min(_or_never(cls.ttft_ns), _or_never(cls.deadline_ns))


def _or_never(ns: int | None) -> float:
    return math.inf if ns is None else ns


def _target(own_ns: int | None, header: str, text: str | None, trusted: bool) -> int | None:
    if text is None:
        return own_ns
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if not LEAST_TARGET_MS <= value <= MOST_TARGET_MS:  # also catches nan
        allowed = f"must be a number of milliseconds from {LEAST_TARGET_MS:g} to {MOST_TARGET_MS:g}"
        raise invalid(header, allowed, text)
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    wanted = max(1, round(math.floor(value / unit + 1e-9) * unit * 1e6))
    if trusted:
        return wanted
    return None if own_ns is None else max(wanted, own_ns)


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str | None]:
    """The first of the headers that is there, and its value."""
    for name in names:
        value = headers.get(name, "").strip()
        if value:
            return name, value
    return names[0], None


def _and(classes: list[str]) -> str:
    return f" and {', '.join(map(repr, classes))}" if classes else ""
