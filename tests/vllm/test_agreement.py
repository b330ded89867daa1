"""The core and vLLM agree on what runs, whatever happens; and who decides can be changed at run time."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make test-vllm runs what needs vLLM")

from tests.vllm.rig import MS, STOP, Rig

from kaiseki.engines.vllm.board import Mode
from kaiseki.engines.vllm.books import Books, Disagreement

SETTINGS = {
    "classes": {
        "urgent": {"ttft_ms": 300, "tbt_ms": 60, "weight": 8},
        "normal": {"ttft_ms": 20_000, "tbt_ms": 200},
    },
    "tenants": {"a": {"class": "normal"}, "b": {"class": "normal", "weight": 2}},
}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", ["kaiseki", "shadow"])
def test_a_random_load_in_a_small_pool(depth: int, mode: str) -> None:
    """Arrivals, ends, aborts, shared prefixes, forced preemption and resets of the prefix cache."""
    rng = random.Random(7 + depth)
    rig = Rig(
        SETTINGS | {"vllm": {"mode": mode}}, depth=depth, blocks=60, max_num_seqs=8, max_num_batched_tokens=64
    )
    shared = [rng.randrange(1000, 9000) for _ in range(64)]
    outputs: dict[str, int] = {}
    for step in range(400):
        if rng.random() < 0.25 and len(outputs) < 90:
            name = f"r{len(outputs)}"
            prompt = shared[: rng.choice((0, 32, 64))] + [
                rng.randrange(1000, 9000) for _ in range(rng.randrange(1, 150))
            ]
            outputs[name] = rng.randrange(1, 60)
            rig.add(
                name,
                prompt,
                outputs[name],
                tenant=rng.choice("ab"),
                **{"class": rng.choice(("urgent", "normal"))},
            )
            if rng.random() < 0.2:
                rig.stops[name] = rng.randrange(outputs[name])
        if rng.random() < 0.03 and outputs:
            rig.abort(rng.choice(list(outputs)))
        if step in (120, 260):
            rig.scheduler.reset_prefix_cache(reset_running_requests=True)
        rig.step()
    rig.run()
    assert rig.scheduler.mode == Mode[mode.upper()], "it stepped aside"
    assert rig.core.table.open_rows == 0 and rig.core.kv.live_blocks() == 0
    assert sum(r > 0 for r in _preemptions(rig)) == 0
    whole = [name for name, one in rig.told.items() if one.finish is not None]
    assert len(whole) > 0.8 * len(outputs)
    for name in whole:
        given = rig.told[name].tokens
        expected = rig.expected(name, outputs[name])
        if name in rig.stops:
            expected = [*expected[: rig.stops[name]], STOP]
        assert given == expected, name


def _preemptions(rig: Rig) -> list[int]:
    return [request.num_preemptions for request in rig.scheduler.requests.values()]


def test_forced_preemption_happens_in_such_a_pool() -> None:
    rig = Rig(SETTINGS, blocks=40, max_num_seqs=8)
    for i in range(8):
        rig.add(f"r{i}", 60, 100)
    seen = 0
    while rig.scheduler.has_requests():
        rig.step()
        seen = max([seen, *_preemptions(rig)])
    rig.run()
    assert seen > 0
    assert all(one.tokens == rig.expected(name, 100) for name, one in rig.told.items())


def test_a_stale_token_that_is_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: what is in flight for a preempted request counts as if it still ran."""
    from kaiseki.engines.vllm import KaisekiScheduler

    real = KaisekiScheduler._preempt_request

    def keep(self: object, request: object, timestamp: float, drop_stale_output: bool = False) -> None:
        real(self, request, timestamp, drop_stale_output)
        request.num_stale_output_tokens = 0

    monkeypatch.setattr(KaisekiScheduler, "_preempt_request", keep)
    with pytest.raises(AssertionError):
        test_forced_preemption_happens_in_such_a_pool()


def test_the_kill_switch_returns_to_vllms_order_within_a_step(run_dir: Path) -> None:
    rig = Rig(SETTINGS, max_num_seqs=1)
    for i in range(6):
        rig.add(f"n{i}", 50, 4, **{"class": "normal"})
        time.sleep(0.001)  # vLLM orders by the wall clock
    rig.add("urgent", 50, 4, **{"class": "urgent"})
    rig.step()
    assert list(rig.steps[-1]) == ["urgent"]
    rig.scheduler.board.write(wanted=int(Mode.VLLM))
    rig.step()
    assert rig.scheduler.mode is Mode.VLLM
    rig.run()
    firsts = sorted(rig.told, key=lambda name: rig.told[name].times_ns[0])
    assert firsts == ["urgent", *[f"n{i}" for i in range(6)]]
    assert all(one.tokens == rig.expected(name, 4) for name, one in rig.told.items())


def test_it_comes_back_with_everything_that_was_open() -> None:
    rig = Rig(SETTINGS | {"vllm": {"mode": "vllm"}}, max_num_seqs=2)
    for i in range(5):
        rig.add(f"n{i}", 50, 30, **{"class": "normal"})
    for _ in range(10):
        rig.step()
    rig.scheduler.board.write(wanted=int(Mode.KAISEKI))
    rig.step()
    assert rig.scheduler.mode is Mode.KAISEKI and rig.core.table.open_rows == 5
    rig.run()
    assert rig.scheduler.mode is Mode.KAISEKI
    assert all(one.tokens == rig.expected(name, 30) for name, one in rig.told.items())


def test_shadow_mode_differs_exactly_where_it_should() -> None:
    """Two equal ones in order, then an urgent one behind three others: one admission differs."""
    rig = Rig(SETTINGS | {"vllm": {"mode": "shadow"}}, max_num_seqs=1, depth=0)
    board = rig.scheduler.board
    for name in ("a", "b"):
        rig.add(name, 50, 2, **{"class": "normal"})
        time.sleep(0.001)
    rig.run()
    assert board.read("differing") == 0
    for name in ("x", "y", "z"):
        rig.add(name, 50, 2, **{"class": "normal"})
        time.sleep(0.001)
    rig.add("urgent", 50, 2, **{"class": "urgent"})
    rig.run()
    firsts = sorted("xyz", key=lambda name: rig.told[name].times_ns[0])
    assert firsts == ["x", "y", "z"] and rig.told["urgent"].times_ns[0] > rig.told["z"].times_ns[0]
    # x, y and z each took the place that the urgent one would have had.
    assert board.read("differing") >= 3


def test_it_steps_aside_rather_than_go_on_with_wrong_books(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(SETTINGS, max_num_seqs=4)
    for i in range(6):
        rig.add(f"n{i}", 50, 10)
    rig.step()

    def wrong(self: Books, *_: object) -> None:
        raise Disagreement("on purpose")

    monkeypatch.setattr(Books, "check", wrong)
    rig.run()
    assert rig.scheduler.mode is Mode.VLLM
    assert all(one.tokens == rig.expected(name, 10) for name, one in rig.told.items())


def test_settings_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "kaiseki.yaml"
    file.write_text("tenants: {a: {weight: 1}}\n")
    rig = Rig({}, max_num_seqs=1, additional_config={"kaiseki": str(file)})
    rig.add("r", 50, 4, tenant="a")
    rig.step()
    time.sleep(0.01)
    file.write_text("classes: {fast: {ttft_ms: 100}}\ntenants: {a: {weight: 5, class: fast}}\n")
    rig.clock.advance_to(rig.clock.now_ns() + 2000 * MS)
    rig.step()
    fairness = rig.core.fairness
    assert fairness.weight[fairness.tenant("a")] == 5
    rig.add("s", 50, 4, tenant="a")
    rig.step()
    assert rig.core.life.classes[-1].name == "fast"
    file.write_text("classes: {fast: {ttft_ms: soon}}\n")
    rig.clock.advance_to(rig.clock.now_ns() + 2000 * MS)
    rig.run()
    assert fairness.weight[fairness.tenant("a")] == 5
