"""The settings file: defaults, what the core gets, and errors that help."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from kaiseki.config import Settings, key_digest, load, parse, policy
from kaiseki.core.requests import OnLate
from kaiseki.core.settings import SchedulerSettings
from kaiseki.engines.recovery import Recovery
from kaiseki.sections import ConfigError, Problem


def problems(text: str | bytes) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return {p.path: p for p in caught.value.problems}


def test_documented_defaults() -> None:
    settings = parse("")
    assert settings == Settings()
    assert settings.scheduling.max_batch_size == 1024
    assert settings.scheduling.timeout_ms == 50
    assert settings.scheduling.fairness_window == 100
    assert settings.memory.block_size == 16
    assert settings.memory.watermark_ratio == 0.8


def test_every_scheduler_setting_has_a_key_and_the_same_default() -> None:
    assert parse("").scheduler_settings() == SchedulerSettings()
    text = "scheduling: {max_batch_size: 7, max_waiting_tokens: 9}\nmemory: {watermark_ratio: 0.5}"
    core = parse(text).scheduler_settings()
    assert (core.max_batch_size, core.max_waiting_tokens, core.watermark_ratio) == (7, 9, 0.5)
    assert len(fields(SchedulerSettings)) == len(Settings().scheduler_settings().__slots__)


def test_retries_are_a_small_whole_number() -> None:
    assert parse("").engine.max_retries == 2
    assert parse("engine: {max_retries: 0}").engine.max_retries == 0
    for wrong in ("-1", "101", "1.5", "often"):
        found = problems(f"engine: {{max_retries: {wrong}}}")
        assert list(found) == ["engine.max_retries"]


def test_what_is_done_about_a_failing_engine_has_keys_and_the_same_defaults() -> None:
    assert parse("").recovery() == Recovery()
    text = "engine: {max_retries: 3, backoff_ms: 4, backoff_max_ms: 5, failing_steps: 0, probe_s: 7}"
    assert parse(text).recovery() == Recovery(3, 4, 5, 0, 7)
    for key, wrong in (("backoff_ms", "-1"), ("backoff_max_ms", "30001"), ("probe_s", "0")):
        assert list(problems(f"engine: {{{key}: {wrong}}}")) == [f"engine.{key}"]


def test_classes_reach_the_core_in_its_units() -> None:
    settings = parse(
        """
        classes:
          fast: {ttft_ms: 500, tbt_ms: 62.5, weight: 4, tier: -1, on_late: expire}
          batch: {deadline_s: 600}
          bare:
        """
    )
    classes = settings.service_classes()
    fast = classes["fast"]
    assert (fast.ttft_ns, fast.tbt_ns, fast.deadline_ns) == (500_000_000, 62_500_000, None)
    assert fast.on_late is OnLate.EXPIRE
    assert fast.tier < classes["batch"].tier
    assert classes["batch"].deadline_ns == 600 * 10**9
    assert classes["bare"].ttft_ns is None
    assert classes["default"].ttft_ns is None


def test_preset_gives_way_to_what_the_file_says() -> None:
    assert parse("preset: conversation").scheduling.max_batch_size == 64
    text = "preset: conversation\nscheduling: {max_batch_size: 8}"
    assert parse(text).scheduling.max_batch_size == 8
    assert parse(text).scheduling.max_slot_tokens == 1024


def test_all_problems_at_once_with_path_value_and_what_is_allowed() -> None:
    found = problems(
        """
        scheduling: {max_batch_sze: 5, timeout_ms: -1, window: "3", slo_lambda: .nan}
        memory: {block_size: 2.5, pool_bytes: 2GiB, pool_tokens: 4096}
        classes: {fast: {on_late: drop}, "not ok": {}}
        tenants: {acme: {class: fsat, classes: [none], operator: 1}}
        server: {port: 99999, default_class: nope}
        metrcs: {}
        """
    )
    assert found["scheduling.max_batch_sze"].value == 5
    assert "did you mean 'max_batch_size'" in found["scheduling.max_batch_sze"].message
    assert found["scheduling.timeout_ms"].value == -1
    assert "greater than 0" in found["scheduling.timeout_ms"].message
    assert "integer" in found["scheduling.window"].message
    assert "finite" in found["scheduling.slo_lambda"].message
    assert "integer" in found["memory.block_size"].message
    assert "either pool_tokens or pool_bytes" in found["memory.pool_bytes"].message
    assert "'keep', 'demote' or 'expire'" in found["classes.fast.on_late"].message
    assert "letters" in found["classes.not ok"].message
    assert "did you mean 'fast'" in found["tenants.acme.class"].message
    assert "tenants.acme.classes[0]" in found
    assert "boolean" in found["tenants.acme.operator"].message
    assert "65535" in found["server.port"].message
    assert "default" in found["server.default_class"].message
    assert "did you mean 'metrics'" in found["metrcs"].message


def test_a_key_given_twice_is_not_silently_dropped() -> None:
    found = problems("scheduling:\n  window: 1\n  timeout_ms: 2\n  window: 3\n")
    assert "line 2 and line 4" in found["scheduling.window"].message


def test_merge_keys_still_work() -> None:
    settings = parse("classes:\n  a: &a {ttft_ms: 5, weight: 2}\n  b: {<<: *a, weight: 3}\n")
    assert settings.classes["b"].ttft_ms == 5
    assert settings.classes["b"].weight == 3


def test_keys_are_kept_as_digests_and_never_shown() -> None:
    found = problems("tenants: {acme: {api_key_sha256: [sk-secret]}}")
    problem = found["tenants.acme.api_key_sha256[0]"]
    assert problem.value is None
    assert "SHA-256" in problem.message
    digest = key_digest("sk-secret")
    assert parse(f"tenants: {{acme: {{api_key_sha256: [{digest}]}}}}").tenants["acme"].api_key_sha256 == [
        digest
    ]
    both = f"tenants: {{acme: {{api_key_sha256: [{digest}]}}, labs: {{api_key_sha256: [{digest}]}}}}"
    assert "already belongs to tenant 'acme'" in problems(both)["tenants.labs.api_key_sha256"].message


@pytest.mark.parametrize(
    "text",
    [
        "[1",
        "a: b: c",
        "- 1",
        "7",
        "\x00",
        b"\xff\xfe\x00",
        "a: !!python/object/apply:os.getcwd []",
        "? [1, 2]\n: 3",
        "classes: {true: {}}",
        "classes: {fast: {ttft_ms: 2001-99-99}}",
        "[" * 5000,
    ],
)
def test_what_is_no_settings_file_is_a_problem_and_not_a_crash(text: str | bytes) -> None:
    assert problems(text)


def test_an_empty_section_is_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "kaiseki.yaml"
    path.write_text("scheduling:\nclasses:\nmemory: {pool_bytes: 2GiB}\n")
    settings = load(path)
    assert settings.scheduling == Settings().scheduling
    assert settings.memory.pool_bytes == 2 * 2**30


def test_the_policy_and_its_settings_are_checked() -> None:
    assert "there are" in problems("scheduling: {policy: kaisek, window: x}")["scheduling.policy"].message
    assert "scheduling.policy" in problems("scheduling: {policy: 'no.such.module:Policy'}")
    unknown = problems("scheduling: {policy_settings: {tau: 3}}")["scheduling.policy_settings"]
    assert "tau_ms" in unknown.message
    kinds = problems("scheduling: {policy_settings: {tau_ms: long, fair: 1, idle_share: true}}")
    assert set(kinds) == {f"scheduling.policy_settings.{key}" for key in ("tau_ms", "fair", "idle_share")}
    made = policy(parse("scheduling: {policy: sarathi, budget_tokens: 64, policy_settings: {fair: true}}"))
    assert (made.name, made.budget_tokens, made.fair) == ("sarathi", 64, True)
