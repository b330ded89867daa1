"""The YAML settings file: what may be said, what it means, and errors that help.

`parse` reports every problem of a file at once, each with its path, the value found and what is
allowed instead. Every key here is used by the code; there are none for later.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from kaiseki.core.policy import Policy
from kaiseki.core.requests import OnLate, ServiceClass
from kaiseki.core.settings import SchedulerSettings
from kaiseki.engines.recovery import Recovery
from kaiseki.policies import registry

PRESETS: dict[str, dict[str, Any]] = {
    "conversation": {"scheduling": {"max_batch_size": 64, "max_slot_tokens": 1024}},
}
"""Defaults for a kind of use; what the file says wins over them. `conversation`: smaller batches."""

DEFAULT_CLASS = "default"
TIER_STEP = 100
"""How far apart the tiers of two classes are in `Request.priority` units, see `kaiseki.server.slo`."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Pause = Annotated[float, Field(ge=0, le=30_000)]  # so short that waiting is no stall yet
Limit = Annotated[int, Field(ge=0)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[\w.\-]+$")]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Section(BaseModel):
    """A mapping of the file: unknown keys are errors, values are not converted between types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, populate_by_name=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_said(cls, value: Any) -> Any:
        """A key with nothing after it (`scheduling:`) is an empty section."""
        return {} if value is None else value


class Scheduling(Section):
    """How a slot is filled. The meaning of each key is told in `SchedulerSettings` and `Policy`.

    `policy_settings` are fields of the policy's own class, such as `tau_ms` of `kaiseki`.
    """

    policy: Annotated[str, Field(min_length=1)] = "kaiseki"
    max_batch_size: Count = 1024
    timeout_ms: Positive = 50.0
    fairness_window: Count = 100
    quantum_tokens: Count = 16
    decide_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    max_slot_tokens: Count = 8192
    budget_tokens: Count | None = None
    policy_settings: dict[str, bool | int | float | str] = {}
    window: Count = 64
    max_passes: Count = 64
    max_waiting: Limit = 0
    max_waiting_tokens: Limit = 0
    slo_lambda: Annotated[float, Field(ge=0)] = 1.0


class Memory(Section):
    """The KV pool. With neither `pool_tokens` nor `pool_bytes` the engine chooses by free memory."""

    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    watermark_ratio: Annotated[float, Field(gt=0, le=1)] = 0.8
    pool_tokens: Count | None = None
    pool_bytes: ByteSize | None = None


class Engine(Section):
    """The model and how it runs here. `model` is a name that `kaiseki pull` knows or a local path.

    A request goes on after at most `max_retries` errors of the engine that may be retried; this and what
    is done about an engine that keeps failing is told in `Recovery`. With
    `own_process` the model runs in a process apart from the HTTP server's.
    """

    model: Annotated[str, Field(min_length=1)] = "smollm2-135m-instruct"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: Count | None = None
    pipeline_depth: Annotated[int, Field(ge=0, le=1)] = 1
    max_context: Count | None = None
    max_retries: Annotated[int, Field(ge=0, le=100)] = 2
    backoff_ms: Pause = 50.0
    backoff_max_ms: Pause = 2000.0
    failing_steps: Limit = 5
    probe_s: Positive = 1.0
    own_process: bool = True


class Class(Section):
    """A service class; targets left out don't apply."""

    ttft_ms: Positive | None = None
    tbt_ms: Positive | None = None
    deadline_s: Positive | None = None
    weight: Positive = 1.0
    on_late: Literal["keep", "demote", "expire"] = "demote"
    tier: Annotated[int, Field(ge=-1000, le=1000)] = 0

    def service_class(self, name: str) -> ServiceClass:
        """The class as the core knows it."""
        return ServiceClass(
            name=name,
            ttft_ns=_ns(self.ttft_ms, 1e6),
            tbt_ns=_ns(self.tbt_ms, 1e6),
            deadline_ns=_ns(self.deadline_s, 1e9),
            weight=self.weight,
            on_late=OnLate[self.on_late.upper()],
            tier=self.tier * TIER_STEP,
        )


class Tenant(Section):
    """Who is served, how much, and with which keys.

    `class` is what its requests get unless they ask otherwise, `classes` what else they may ask for.
    A `trusted` caller (a gateway) may name other tenants and tighten targets; an `operator` sees the
    requests of all tenants. Only SHA-256 digests of keys are kept.
    """

    weight: Positive = 1.0
    cls: Annotated[Name | None, Field(alias="class")] = None
    classes: list[Name] = []
    api_key_sha256: list[Digest] = []
    trusted: bool = False
    operator: bool = False


class Server(Section):
    """The HTTP side."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    drain_s: Annotated[float, Field(ge=0)] = 30.0
    default_class: Name = DEFAULT_CLASS
    max_body_bytes: Annotated[ByteSize, Field(ge=1024)] = ByteSize(8 << 20)
    max_choices: Count = 64


class Metrics(Section):
    """The metrics page."""

    tenant_labels: Annotated[int, Field(ge=1, le=1000)] = 32


class Settings(Section):
    """Everything `kaiseki serve` can be told."""

    preset: Literal["conversation"] | None = None
    scheduling: Scheduling = Scheduling()
    memory: Memory = Memory()
    engine: Engine = Engine()
    classes: dict[Name, Class] = {}
    tenants: dict[Name, Tenant] = {}
    server: Server = Server()
    metrics: Metrics = Metrics()

    def scheduler_settings(self) -> SchedulerSettings:
        """What the scheduling core takes."""
        values = self.scheduling.model_dump(exclude={"policy", "budget_tokens", "policy_settings"})
        return SchedulerSettings(**values, watermark_ratio=self.memory.watermark_ratio)

    def recovery(self) -> Recovery:
        """What is done about errors of the engine."""
        e = self.engine
        return Recovery(e.max_retries, e.backoff_ms, e.backoff_max_ms, e.failing_steps, e.probe_s)

    def service_classes(self) -> dict[str, ServiceClass]:
        """All classes by name; one without targets is always there for requests that say nothing."""
        classes = {name: cls.service_class(name) for name, cls in self.classes.items()}
        return {DEFAULT_CLASS: ServiceClass(DEFAULT_CLASS)} | classes


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a settings file: where, what was found, and what is allowed."""

    path: str
    value: Any
    message: str


class ConfigError(ValueError):
    """A settings file with problems."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(f"{p.path}: {p.message}" for p in problems))
        self.problems = problems


def key_digest(key: str) -> str:
    """The form in which an API key is kept."""
    return hashlib.sha256(key.encode()).hexdigest()


def load(path: Path) -> Settings:
    """Read a settings file.

    Raises:
        OSError: it can't be read.
        ConfigError: it has problems.
    """
    return parse(path.read_bytes())


def parse(text: str | bytes) -> Settings:
    """Settings from YAML text.

    Raises:
        ConfigError: with every problem found.
    """
    raw, problems = _read_yaml(text)
    if not isinstance(raw, dict):
        raise ConfigError([Problem("", _shown("", raw), f"must be a mapping with {_keys(Settings)}")])
    problems += _cross_check(raw)
    settings = None
    try:
        settings = Settings.model_validate(_with_preset(raw))
    except ValidationError as error:
        problems += [_problem(item) for item in error.errors(include_url=False)]
    if problems or settings is None:
        raise ConfigError(problems)
    policy(settings)  # with the settings for it
    return settings


def policy(settings: Settings) -> Policy:
    """The scheduling policy that the settings name.

    Raises:
        ConfigError: it is not installed, or has no such setting.
    """
    scheduling = settings.scheduling
    given = dict(scheduling.policy_settings)
    if scheduling.budget_tokens is not None:
        given["budget_tokens"] = scheduling.budget_tokens
    try:
        plain = registry.load(scheduling.policy)
        made = registry.load(scheduling.policy, **given)
    except registry.UnknownPolicy as error:
        raise ConfigError([Problem("scheduling.policy", scheduling.policy, str(error))]) from None
    except (ValueError, TypeError) as error:
        raise ConfigError([Problem("scheduling.policy_settings", None, str(error))]) from None
    wrong = [
        Problem(f"scheduling.policy_settings.{key}", value, f"must be like the default, {default!r}")
        for key, value in given.items()
        if not _same_kind(value, default := getattr(plain, key))
    ]
    if wrong:
        raise ConfigError(wrong)
    return made


def _same_kind(value: Any, default: Any) -> bool:
    """Whether a value may stand for a default; where that is None, any number may."""
    if isinstance(default, bool) or isinstance(value, bool):
        return type(value) is type(default)
    if default is None or isinstance(default, float):
        return isinstance(value, int | float)
    return isinstance(value, type(default))


def _read_yaml(text: str | bytes) -> tuple[Any, list[Problem]]:
    """The document, and keys given twice, of which plain YAML silently keeps the last."""
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return {}, []
            twice = list(_duplicates(node, "", set()))  # first, since constructing merges `<<` into the nodes
            return loader.construct_document(node), twice
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([Problem("", None, f"not valid YAML: {error}")]) from None


def _duplicates(node: yaml.Node, path: str, seen: set[int]) -> Iterator[Problem]:
    if not isinstance(node, yaml.MappingNode) or id(node) in seen:
        return
    seen.add(id(node))
    lines: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        below = f"{path}.{key.value}".lstrip(".")
        line = key.start_mark.line + 1
        if key.value in lines and key.tag != "tag:yaml.org,2002:merge":
            yield Problem(below, None, f"given twice, in line {lines[key.value]} and line {line}")
        lines[key.value] = line
        yield from _duplicates(value, below, seen)


def _with_preset(raw: dict[str, Any]) -> dict[str, Any]:
    preset = PRESETS.get(raw["preset"]) if isinstance(raw.get("preset"), str) else None
    merged = {key: value for key, value in raw.items() if value is not None}
    for section, defaults in (preset or {}).items():
        given = merged.get(section, {})
        if isinstance(given, dict):
            merged[section] = defaults | given
    return merged


def _cross_check(raw: Mapping[str, Any]) -> Iterator[Problem]:
    """What spans several keys. Runs on the raw file, so that it reports next to wrong values elsewhere."""
    classes = {DEFAULT_CLASS, *_mapping(raw, "classes")}
    default = _mapping(raw, "server").get("default_class")
    if isinstance(default, str) and default not in classes:
        yield Problem("server.default_class", default, f"no such class; {_instead(default, classes)}")
    owners: dict[str, str] = {}
    for name, tenant in _mapping(raw, "tenants").items():
        if not isinstance(tenant, dict):
            continue
        listed = tenant.get("classes")
        wanted = {"class": tenant.get("class")} | {
            f"classes[{i}]": cls for i, cls in enumerate(listed if isinstance(listed, list) else [])
        }
        for key, cls in wanted.items():
            if isinstance(cls, str) and cls not in classes:
                yield Problem(f"tenants.{name}.{key}", cls, f"no such class; {_instead(cls, classes)}")
        digests = tenant.get("api_key_sha256")
        for digest in digests if isinstance(digests, list) else []:
            if isinstance(digest, str) and owners.setdefault(digest, name) != name:
                path = f"tenants.{name}.api_key_sha256"
                yield Problem(path, None, f"the same key already belongs to tenant {owners[digest]!r}")
    chosen = _mapping(raw, "scheduling").get("policy")
    if isinstance(chosen, str):
        try:
            registry.load(chosen)
        except registry.UnknownPolicy as error:
            yield Problem("scheduling.policy", chosen, str(error))
    memory = _mapping(raw, "memory")
    if memory.get("pool_tokens") is not None and memory.get("pool_bytes") is not None:
        yield Problem("memory.pool_bytes", memory["pool_bytes"], "give either pool_tokens or pool_bytes")


def _mapping(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def _problem(error: Any) -> Problem:
    """A pydantic error in our words."""
    is_key = "[key]" in error["loc"]
    loc = [str(part) if is_key else part for part in error["loc"] if part != "[key]"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    if error["type"] == "extra_forbidden":
        allowed = _fields(loc[:-1])
        return Problem(path, _shown(path, error["input"]), f"unknown key; {_instead(str(loc[-1]), allowed)}")
    if error["type"] == "string_pattern_mismatch" and "api_key_sha256" in loc:
        message = "must be the SHA-256 of the key as 64 lower-case hex digits (not the key itself)"
        return Problem(path, None, message)
    if error["type"] == "string_pattern_mismatch":
        return Problem(
            path, _shown(path, error["input"]), "only letters, digits, '_', '-' and '.' are allowed"
        )
    if error["type"] in ("model_type", "model_attributes_type"):
        allowed = _fields(loc)
        return Problem(path, _shown(path, error["input"]), f"must be a mapping with {', '.join(allowed)}")
    message = error["msg"][0].lower() + error["msg"][1:]
    return Problem(path, _shown(path, error["input"]), message.replace("input should", "should"))


def _fields(loc: list[str | int]) -> list[str]:
    """The keys allowed in the section at `loc`."""
    section: Any = Settings
    for part in loc:
        if section is Settings and part in ("classes", "tenants"):
            section = Class if part == "classes" else Tenant
        elif section is Settings:
            section = Settings.model_fields[str(part)].annotation
    return [field.alias or name for name, field in section.model_fields.items()]


def _keys(section: type[Section]) -> str:
    return ", ".join(section.model_fields)


def _instead(wrong: str, allowed: list[str] | set[str]) -> str:
    close = difflib.get_close_matches(wrong, allowed, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}allowed: {', '.join(sorted(allowed))}"


def _shown(path: str, value: Any) -> Any:
    """The value as it may be shown: short, plain, and never something that could be a key."""
    if "api_key" in path:
        return None
    return value if value is None or isinstance(value, bool | int | float) else str(value)[:200]


def _ns(value: float | None, unit: float) -> int | None:
    return None if value is None else round(value * unit)
