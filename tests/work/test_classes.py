"""Classes files: what they mean, who gets what, and errors that help."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.work.streams import column, same

from kaiseki.core.requests import NEVER_NS
from kaiseki.sections import ConfigError
from kaiseki.work.assigning import Assigner
from kaiseki.work.batches import Batch, take
from kaiseki.work.catalogue import azure_conversation, chat_sessions
from kaiseki.work.classes import Plan, load, parse, shipped
from kaiseki.work.conditions import COLUMNS
from kaiseki.work.conditions import parse as condition

DOCUMENTED = """
classes:
  interactive: {ttft_ms: 500, tbt_ms: 60, weight: 4}
  standard:    {ttft_ms: 2000, tbt_ms: 120, weight: 2}
  batch:       {deadline_s: 600, weight: 1}
tenants:
  acme: {weight: 3, class: interactive}
  labs: {weight: 1, class: batch}
assign:
  - {share: 0.3, tenant: labs, class: batch}
  - {when: "input_tokens <= 2000", tenant: acme, class: interactive}
  - {tenant: acme, class: standard}
"""


def lone_s(prompt_tokens: np.ndarray) -> np.ndarray:
    return 0.1 + prompt_tokens * 1e-3


def assigner(plan: Plan, seed: int = 0) -> Assigner:
    return Assigner(plan, lone_s, seed)


def requests(n: int) -> list[Batch]:
    return list(take(azure_conversation().stream(3), n))


def problems(text: str | bytes) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_the_documented_file() -> None:
    plan = parse(DOCUMENTED)
    assert plan.class_names() == ["default", "interactive", "standard", "batch"]
    assert plan.tenant_weights() == {"default": 1.0, "acme": 3.0, "labs": 1.0}
    core = plan.service_classes()
    assert [cls.name for cls in core] == plan.class_names()
    assert (core[1].ttft_ns, core[1].tbt_ns, core[1].weight) == (500_000_000, 60_000_000, 4.0)
    assert (core[3].ttft_ns, core[3].deadline_ns) == (None, 600 * 10**9)

    made = list(assigner(plan).stream(requests(40_000)))
    names = np.array(plan.class_names())[column(made, "class_index")]
    tenants = np.array(plan.tenant_names())[column(made, "tenant_index")]
    short = column(made, "prompt_tokens") <= 2000
    assert np.array_equal(tenants == "labs", names == "batch")
    assert (names == "batch").mean() == pytest.approx(0.3, abs=0.01)
    assert np.array_equal(names == "interactive", short & (names != "batch"))
    assert np.array_equal(names == "standard", ~short & (names != "batch"))
    target = {"batch": NEVER_NS, "interactive": 500_000_000, "standard": 2_000_000_000}
    assert column(made, "ttft_ns").tolist() == [target[name] for name in names]


def test_the_first_rule_wins_and_shares_are_of_the_rest() -> None:
    plan = parse("""
        tenants: {a: , b: , c: }
        assign:
          - {share: 0.5, tenant: a}
          - {share: 0.5, tenant: b}
          - {share: 0.5, when: output_tokens > 150, tenant: c}
        """)
    made = list(assigner(plan).stream(requests(40_000)))
    index, long = column(made, "tenant_index"), column(made, "output_tokens") > 150
    shares = np.bincount(index) / len(index)
    assert shares[1:3] == pytest.approx([0.5, 0.25], abs=0.01)
    assert not ((index == 3) & ~long).any()
    assert (index[long] == 3).mean() == pytest.approx(0.125, abs=0.01)


def test_who_gets_what_depends_on_the_seed_but_not_on_the_batches() -> None:
    plan = load("mixed")
    whole = requests(5000)[0]
    assert same(assigner(plan, 1).assign(whole), assigner(plan, 1).assign(whole))
    assert same(assigner(plan, 1).assign(whole.head(100)), assigner(plan, 1).assign(whole).head(100))
    assert not same(assigner(plan, 1).assign(whole), assigner(plan, 2).assign(whole))


def test_a_session_stays_with_its_tenant() -> None:
    made = assigner(load("mixed")).assign(next(chat_sessions().stream(2)))
    of_labs = made.tenant_index == 2
    children = np.flatnonzero(made.follow.parent >= 0)
    assert np.array_equal(of_labs[children], of_labs[made.follow.parent[children]])
    assert of_labs.mean() == pytest.approx(0.3, abs=0.03)


def test_no_target_is_below_what_a_prefill_takes_alone() -> None:
    plan = parse("classes: {a: {ttft_ms: 500, ttft_per_lone: 2}}\nassign: [{class: a}]")
    made = assigner(plan).assign(Batch.of(0, [0, 1, 2], [10, 150, 10_000], [1, 1, 1]))
    assert made.ttft_ns.tolist() == [500_000_000, 500_000_000, 20_200_000_000]


def test_the_tenants_class_is_that_of_its_requests() -> None:
    plan = parse("classes: {a: }\ntenants: {t: {class: a}, u: }\nassign: [{tenant: t}]")
    assert assigner(plan).assign(requests(10)[0]).class_index.tolist() == [1] * 10
    assert plan.class_of(plan.assign[0]) == "a"


def test_an_empty_file_leaves_all_as_it_is() -> None:
    batch = requests(10)[0]
    assert same(assigner(parse("")).assign(batch), batch)


def test_shipped_files(tmp_path: Path) -> None:
    assert shipped() == ["chat", "mixed"]
    for name in shipped():
        made = assigner(load(name)).assign(requests(1000)[0])
        assert (made.class_index > 0).all()
    file = tmp_path / "mine.yaml"
    file.write_text(DOCUMENTED)
    assert load(file) == parse(DOCUMENTED)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("clases: {}", "clases", "unknown key; did you mean 'classes'? allowed: assign, classes, tenants"),
        ("- 1", "", "must be a mapping with classes, tenants, assign"),
        ("classes: {a: {ttft: 5}}", "classes.a.ttft", "ttft_per_lone"),
        ("classes: {a: {ttft_ms: -5}}", "classes.a.ttft_ms", "should be greater than 0"),
        ("classes: {a: {ttft_ms: '5'}}", "classes.a.ttft_ms", "valid number"),
        ("classes: {a: {ttft_ms: .nan}}", "classes.a.ttft_ms", "finite"),
        ("classes: {a: {ttft_per_lone: 2}}", "classes.a.ttft_per_lone", "needs ttft_ms"),
        ("classes: {a: 5}", "classes.a", "must be a mapping with ttft_ms"),
        ("classes: {a b: }", "classes.a b", "only letters, digits"),
        ("classes: {a: , a: }", "classes.a", "given twice"),
        ("classes: {a: }", "assign", "at least one rule"),
        ("tenants: {t: {class: b}}", "tenants.t.class", "no such class; allowed: default"),
        ("tenants: {t: {weight: 0}}", "tenants.t.weight", "greater than 0"),
        ("tenants: {t: {api_key_sha256: []}}", "tenants.t.api_key_sha256", "allowed: class, weight"),
        ("assign: [{tenant: t}]", "assign[0].tenant", "no such tenant; allowed: default"),
        ("assign: [{class: b}]", "assign[0].class", "no such class"),
        ("assign: [{share: 1.5}]", "assign[0].share", "less than or equal to 1"),
        ("assign: [{share: 0}]", "assign[0].share", "greater than 0"),
        ("assign: [{if: x}]", "assign[0].if", "allowed: class, share, tenant, when"),
        ("assign: [{when: tokens > 5}]", "assign[0].when", "'tokens' is unknown; allowed: input_tokens"),
        ("assign: {a: b}", "assign", "valid list"),
        ("a: [", "", "not valid YAML"),
    ],
)
def test_problems(text: str, path: str, message: str) -> None:
    assert message in problems(text)[path]


def test_all_problems_at_once() -> None:
    text = "classes: {a: {ttft: 5}}\nassign: [{class: b}, {when: 'import os'}]"
    assert problems(text).keys() == {"classes.a.ttft", "assign[0].class", "assign[1].when"}


ROWS = Batch.of(0, [0, 10**9, 2 * 10**9], [10, 200, 3000], [5, 6, 7])


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("input_tokens <= 200", [True, True, False]),
        ("10 < input_tokens < 3000", [False, True, False]),
        ("not input_tokens == 200", [True, False, True]),
        ("input_tokens > 100 and output_tokens < 7 or arrival_s == 0", [True, True, False]),
        ("total_tokens - input_tokens * 2 + 4000 >= -(-3806)", [True, True, False]),
        ("(follow_up == 1) or (output_tokens != 6)", [True, False, True]),
        ("1 < 2", [True, True, True]),
    ],
)
def test_conditions(text: str, holds: list[bool]) -> None:
    assert condition(text).holds(ROWS).tolist() == holds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "input_tokens",
        "input_tokens <",
        "input_tokens + 1",
        "1",
        "True",
        "input_tokens == True",
        "input_tokens in (1, 2)",
        "input_tokens is 5",
        "input_tokens ** 9 > 1",
        "input_tokens / 0 > 1",
        "input_tokens < 1e999",
        f"input_tokens < 1{'0' * 400}",
        "input_tokens < 'a'",
        "(lambda: 1)() > 0",
        "__import__('os').system('true') == 0",
        "input_tokens.real > 1",
        "[x for x in y] > 1",
        "(x := 5) > 1",
        "prompt > 5",
        "\0",
        "(" * 400 + "1" + ")" * 400 + " < 2",
        "not " * 240 + "1",
        "1 < 2 " * 200,
    ],
)
def test_what_is_no_condition(text: str) -> None:
    with pytest.raises(ValueError):
        condition(text)


NUMBERS = st.recursive(
    st.sampled_from([*COLUMNS, "0", "7", "1.5", "200"]),
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("+-*"), inner),
    max_leaves=4,
)
CONDITIONS = st.recursive(
    st.builds("{} {} {}".format, NUMBERS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), NUMBERS),
    lambda inner: (
        st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or"]), inner)
        | st.builds("(not {})".format, inner)
    ),
    max_leaves=5,
)


@given(CONDITIONS)
def test_conditions_mean_what_python_means(text: str) -> None:
    values = {name: np.asarray(read(ROWS), float) for name, read in COLUMNS.items()}
    plain = [bool(eval(text, {}, {name: v[row] for name, v in values.items()})) for row in range(3)]
    assert condition(text).holds(ROWS).tolist() == plain
