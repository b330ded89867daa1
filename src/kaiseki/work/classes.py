"""The classes file: targets, tenants, and which requests of a trace are whose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from kaiseki.core.requests import ServiceClass
from kaiseki.sections import (
    Class,
    ConfigError,
    Name,
    Positive,
    Problem,
    Section,
    Shipped,
    instead,
    mapping,
    problem_of,
    read_mapping,
    shown,
)
from kaiseki.work import conditions

DEFAULT = "default"
"""Class without targets and tenant of weight 1 for requests that no rule assigns."""
SHIPPED = Shipped(resources.files("kaiseki.work") / "plans")


class TracedClass(Class):
    """A service class; its TTFT target may grow with the prompt.

    With `ttft_per_lone` the target of a request is the greater of `ttft_ms` and so many times what its
    prefill would take alone on the idle replica, so that none is hopeless from birth.
    """

    ttft_per_lone: Positive | None = None


class Tenant(Section):
    """Who sends requests; `class` is that of its requests unless a rule says otherwise."""

    weight: Positive = 1.0
    cls: Annotated[Name | None, Field(alias="class")] = None


class Rule(Section):
    """Which requests belong to a tenant and class: all, a share of them, those of a kind, or both.

    `share` is of the requests that no rule before has taken; the requests of a session stay together.
    """

    share: Annotated[float | None, Field(gt=0, le=1)] = None
    when: str | None = None
    tenant: Name = DEFAULT
    cls: Annotated[Name | None, Field(alias="class")] = None


class Plan(Section):
    """A classes file."""

    classes: dict[Name, TracedClass] = Field(default_factory=dict)
    tenants: dict[Name, Tenant] = Field(default_factory=dict)
    assign: list[Rule] = Field(default_factory=list)

    def class_names(self) -> list[str]:
        """Names that `Batch.class_index` points to; the first is the one without targets."""
        return [DEFAULT, *(name for name in self.classes if name != DEFAULT)]

    def tenant_names(self) -> list[str]:
        """Names that `Batch.tenant_index` points to."""
        return [DEFAULT, *(name for name in self.tenants if name != DEFAULT)]

    def service_classes(self) -> list[ServiceClass]:
        """The classes as the core knows them, in the order of `class_names`."""
        return [self.traced_class(name).service_class(name) for name in self.class_names()]

    def tenant_weights(self) -> dict[str, float]:
        """Weight of each tenant, in the order of `tenant_names`."""
        return {name: self.tenants.get(name, Tenant()).weight for name in self.tenant_names()}

    def traced_class(self, name: str) -> TracedClass:
        """A class by name."""
        return self.classes.get(name, TracedClass())

    def class_of(self, rule: Rule) -> str:
        """The class that a rule gives: its own, else its tenant's, else the one without targets."""
        return rule.cls or self.tenants.get(rule.tenant, Tenant()).cls or DEFAULT


def shipped() -> list[str]:
    """Names of the files that come with Kaiseki."""
    return SHIPPED.names()


def load(path_or_name: str | Path) -> Plan:
    """Read a classes file, or one that comes with Kaiseki by its name.

    Raises:
        OSError: it can't be read.
        ConfigError: it has problems.
    """
    return parse(SHIPPED.read(path_or_name))


def parse(text: str | bytes) -> Plan:
    """A classes file from YAML text.

    Raises:
        ConfigError: with every problem found.
    """
    raw, problems = read_mapping(Plan, text)
    raw = {key: value for key, value in raw.items() if value is not None}
    problems += _cross_check(raw)
    plan = None
    try:
        plan = Plan.model_validate(raw)
    except ValidationError as error:
        problems += [problem_of(Plan, item) for item in error.errors(include_url=False)]
    if problems or plan is None:
        raise ConfigError(problems)
    return plan


def _cross_check(raw: Mapping[str, Any]) -> Iterator[Problem]:
    """What spans several keys; on the raw file, so that it is told next to wrong values elsewhere."""
    classes = {DEFAULT, *mapping(raw, "classes")}
    tenants = {DEFAULT, *mapping(raw, "tenants")}
    for name, cls in mapping(raw, "classes").items():
        if isinstance(cls, dict) and cls.get("ttft_per_lone") is not None and cls.get("ttft_ms") is None:
            path = f"classes.{name}.ttft_per_lone"
            yield Problem(path, cls["ttft_per_lone"], "needs ttft_ms beside it, the least target")
    for name, tenant in mapping(raw, "tenants").items():
        yield from _unknown(f"tenants.{name}.class", tenant, "class", classes)
    rules = raw.get("assign")
    for i, rule in enumerate(rules if isinstance(rules, list) else []):
        yield from _unknown(f"assign[{i}].class", rule, "class", classes)
        yield from _unknown(f"assign[{i}].tenant", rule, "tenant", tenants)
        when = rule.get("when") if isinstance(rule, dict) else None
        if isinstance(when, str):
            try:
                conditions.parse(when)
            except ValueError as error:
                yield Problem(f"assign[{i}].when", shown("", when), str(error))
    if (len(classes) > 1 or len(tenants) > 1) and not rules:
        yield Problem("assign", None, "needs at least one rule, or no request gets a class or tenant")


def _unknown(path: str, section: Any, key: str, known: set[str]) -> Iterator[Problem]:
    name = section.get(key) if isinstance(section, dict) else None
    if isinstance(name, str) and name not in known:
        yield Problem(path, name, f"no such {key}; {instead(name, known)}")
