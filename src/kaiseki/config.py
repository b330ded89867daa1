"""The YAML settings file: what may be said, what it means, and errors that help.

`parse` reports every problem of a file at once, each with its path, the value found and what is
allowed instead. Every key here is used by the code; there are none for later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, StringConstraints, ValidationError

from kaiseki.core.policy import Policy
from kaiseki.core.requests import ServiceClass
from kaiseki.core.settings import SchedulerSettings
from kaiseki.engines.recovery import Recovery
from kaiseki.memory.pool import Eviction, Placement
from kaiseki.policies import registry
from kaiseki.sections import (
    Class,
    ConfigError,
    Name,
    Positive,
    Problem,
    Section,
    instead,
    mapping,
    path_of,
    problem_of,
    read_mapping,
)

PRESETS: dict[str, dict[str, Any]] = {
    "conversation": {"scheduling": {"max_batch_size": 64, "max_slot_tokens": 1024}},
}
"""Defaults for a kind of use; what the file says wins over them. `conversation`: smaller batches."""

DEFAULT_CLASS = "default"

Count = Annotated[int, Field(ge=1)]
Pause = Annotated[float, Field(ge=0, le=30_000)]  # so short that waiting is no stall yet
Limit = Annotated[int, Field(ge=0)]
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


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
    policy_settings: dict[str, bool | int | float | str] = Field(default_factory=dict)
    window: Count = 64
    max_passes: Count = 64
    max_waiting: Limit = 0
    max_waiting_tokens: Limit = 0
    slo_lambda: Annotated[float, Field(ge=0)] = 1.0
    kv_mu: Annotated[float, Field(ge=0)] = 0.0


class Memory(Section):
    """The KV pool. With neither `pool_tokens` nor `pool_bytes` the engine chooses by free memory."""

    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    watermark_ratio: Annotated[float, Field(gt=0, le=1)] = 0.8
    eviction: Eviction = "arc"
    placement: Placement = "pages"
    pool_tokens: Count | None = None
    pool_bytes: ByteSize | None = None
    host_tokens: Limit = 0


class Engine(Section):
    """The model and how it runs here. `model` is a name that `kaiseki pull` knows or a local path.

    A request goes on after at most `max_retries` errors of the engine that may be retried; this and what
    is done about an engine that keeps failing is told in `Recovery`. With
    `own_process` the model runs in a process apart from the HTTP server's. `profile` is a file of
    `kaiseki calibrate`: its step times are expected until others are seen, and none measured at the start.
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
    profile: Annotated[str | None, Field(min_length=1)] = None


class Tenant(Section):
    """Who is served, how much, and with which keys.

    `class` is what its requests get unless they ask otherwise, `classes` what else they may ask for.
    A `trusted` caller (a gateway) may name other tenants and tighten targets; an `operator` sees the
    requests of all tenants. Only SHA-256 digests of keys are kept.
    """

    weight: Positive = 1.0
    cls: Annotated[Name | None, Field(alias="class")] = None
    classes: list[Name] = Field(default_factory=list)
    api_key_sha256: list[Digest] = Field(default_factory=list)
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


class Vllm(Section):
    """Inside vLLM. `mode` says who decides: Kaiseki; vLLM, while what Kaiseki would do is noted (`shadow`);
    or vLLM alone (`vllm`, the kill switch). It may be changed while the server runs. With `trust_headers`
    whoever reaches the server is believed what headers say of tenants and targets, as a gateway is that lets
    nobody else through.
    """

    mode: Literal["kaiseki", "shadow", "vllm"] = "kaiseki"
    trust_headers: bool = False


class Metrics(Section):
    """The metrics page."""

    tenant_labels: Annotated[int, Field(ge=1, le=1000)] = 32


class Recorder(Section):
    """The flight recorder. Without a folder it records into memory alone, for as long as the server runs.

    `size_mb` is taken at once where there is a folder; without one at most a part of it is.
    """

    folder: Annotated[Path | None, Field(strict=False)] = None
    size_mb: Annotated[float, Field(ge=1, le=1 << 20)] = 256.0


class Settings(Section):
    """Everything `kaiseki serve` can be told."""

    preset: Literal["conversation"] | None = None
    scheduling: Scheduling = Scheduling()
    memory: Memory = Memory()
    engine: Engine = Engine()
    classes: dict[Name, Class] = Field(default_factory=dict)
    tenants: dict[Name, Tenant] = Field(default_factory=dict)
    server: Server = Server()
    metrics: Metrics = Metrics()
    recorder: Recorder = Recorder()
    vllm: Vllm = Vllm()

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
    raw, problems = read_mapping(Settings, text)
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
    classes = {DEFAULT_CLASS, *mapping(raw, "classes")}
    default = mapping(raw, "server").get("default_class")
    if isinstance(default, str) and default not in classes:
        yield Problem("server.default_class", default, f"no such class; {instead(default, classes)}")
    owners: dict[str, str] = {}
    for name, tenant in mapping(raw, "tenants").items():
        if not isinstance(tenant, dict):
            continue
        listed = tenant.get("classes")
        wanted = {"class": tenant.get("class")} | {
            f"classes[{i}]": cls for i, cls in enumerate(listed if isinstance(listed, list) else [])
        }
        for key, cls in wanted.items():
            if isinstance(cls, str) and cls not in classes:
                yield Problem(f"tenants.{name}.{key}", cls, f"no such class; {instead(cls, classes)}")
        digests = tenant.get("api_key_sha256")
        for digest in digests if isinstance(digests, list) else []:
            if isinstance(digest, str) and owners.setdefault(digest, name) != name:
                path = f"tenants.{name}.api_key_sha256"
                yield Problem(path, None, f"the same key already belongs to tenant {owners[digest]!r}")
    chosen = mapping(raw, "scheduling").get("policy")
    if isinstance(chosen, str):
        try:
            registry.load(chosen)
        except registry.UnknownPolicy as error:
            yield Problem("scheduling.policy", chosen, str(error))
    memory = mapping(raw, "memory")
    if memory.get("pool_tokens") is not None and memory.get("pool_bytes") is not None:
        yield Problem("memory.pool_bytes", memory["pool_bytes"], "give either pool_tokens or pool_bytes")


def _problem(error: Any) -> Problem:
    """A pydantic error in our words; a key that was given in the place of its digest is not shown."""
    if error["type"] == "string_pattern_mismatch" and "api_key_sha256" in error["loc"]:
        message = "must be the SHA-256 of the key as 64 lower-case hex digits (not the key itself)"
        return Problem(path_of(error), None, message)
    return problem_of(Settings, error)
