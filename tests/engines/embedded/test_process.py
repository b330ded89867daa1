"""The engine in a process of its own: the same outputs, and whatever ends, nobody waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny_models import build, byte_tokenizer

from kaiseki.core.decision import Decision
from kaiseki.core.reasons import Finish, Outcome, Reason
from kaiseki.core.requests import Request
from kaiseki.core.scheduler import Scheduler
from kaiseki.cost.online import FixedLinear
from kaiseki.engines.driver import Driver
from kaiseki.engines.embedded import (
    EmbeddedEngine,
    EngineDied,
    GenerationWork,
    ProcessEngine,
    SamplingParams,
    UnsupportedModel,
    wire,
)
from kaiseki.engines.embedded.child import portable
from kaiseki.engines.updates import Update
from kaiseki.memory.pool import BlockPool
from kaiseki.policies.registry import load

GENEROUS_S = 60.0
BLOCKS = 128
Engine = EmbeddedEngine | ProcessEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "tiny"
    build("llama").save_pretrained(out)
    byte_tokenizer().save_pretrained(out)
    return out


def start(kind: type[Engine], folder: Path, depth: int = 1) -> tuple[Any, BlockPool]:
    pool = BlockPool(BLOCKS, 4)
    return kind.load(folder, tables=pool, blocks=BLOCKS, block_tokens=4, threads=1, depth=depth), pool


@contextmanager
def started(folder: Path) -> Iterator[tuple[ProcessEngine, BlockPool]]:
    engine, pool = start(ProcessEngine, folder)
    try:
        yield engine, pool
    finally:
        engine.shutdown()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + GENEROUS_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@dataclass
class Told:
    """What the clients of a driver were told."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)
    finishes: dict[str, Finish] = field(default_factory=dict)
    ends: dict[str, Update] = field(default_factory=dict)

    def take(self, update: Update) -> None:
        name = update.request_id
        self.tokens.setdefault(name, []).extend(update.token_ids)
        for output in update.payload or ():
            self.text[name] = self.text.get(name, "") + output.text
            if output.chosen is not None:
                assert output.chosen.token_id == output.token_id
                candidates = (output.chosen, *output.top)
                self.logprobs.setdefault(name, []).extend(c.logprob for c in candidates)
        if update.outcome:
            self.ends[name] = update
            self.finishes[name] = update.finish


def driver_over(engine: Engine, pool: BlockPool) -> Driver:
    cost = FixedLinear(np.array([1e6, 1e5, 0.0, 1e5, 1.0, 1.0, 0.0]))
    policy = load("sarathi", budget_tokens=24)  # several steps per prompt, decodes beside them
    return Driver(Scheduler(policy, pool, cost, engine.capabilities), engine)


def submit(driver: Driver, told: Told, name: str, prompt: list[int], fork_of: str | None = None, **how: Any):
    sampling = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **how})
    request = Request(name, len(prompt), sampling.max_tokens, fork_of=fork_of)
    driver.submit(request, GenerationWork(tuple(prompt), sampling), told.take)


def run_mixed(engine: Engine, pool: BlockPool, stop: str) -> Told:
    """Greedy, sampled, forked, stopped, with log-probabilities, and one whose chunk fails."""
    driver, told = driver_over(engine, pool), Told()
    prompts = [np.random.default_rng(i).integers(0, 250, 9 + 11 * i).tolist() for i in range(5)]
    submit(driver, told, "greedy", prompts[0])
    submit(driver, told, "first", prompts[1], seed=1, temperature=1.0)
    submit(driver, told, "second", prompts[1], fork_of="first", seed=2, temperature=1.0)
    submit(driver, told, "logprobs", prompts[2], logprobs=3)
    submit(driver, told, "stopped", prompts[0], stop=(stop,))
    submit(driver, told, "broken", [1, 2, 9999, 3])
    submit(driver, told, "long", prompts[4], max_tokens=30, seed=3, temperature=0.8)
    driver.run_until_idle()
    assert driver.health().ok
    assert (pool.live_blocks(), driver.scheduler.table.open_rows) == (0, 0)
    return told


@pytest.mark.parametrize("depth", [0, 1])
def test_outputs_are_those_of_an_engine_in_this_process(folder: Path, depth: int) -> None:
    here, pool = start(EmbeddedEngine, folder, depth)
    text = run_mixed(here, pool, "never comes").text["greedy"]
    expected = run_mixed(here, pool, text[3:5])
    there, pool = start(ProcessEngine, folder, depth)
    try:
        assert (there.capabilities, there.shape, there.eos) == (here.capabilities, here.shape, here.eos)
        assert there.config.vocab_size == here.config.vocab_size
        assert there.encode("hi") == here.encode("hi")
        there.warm_up(40)
        for number in (signal.SIGINT, signal.SIGTERM):  # for the server, which drains
            os.kill(there.pid, number)
        got = run_mixed(there, pool, text[3:5])
    finally:
        there.shutdown()
        here.shutdown()
    assert got.tokens == expected.tokens
    assert got.text == expected.text
    assert got.finishes == expected.finishes
    assert got.logprobs.keys() == {"logprobs"}
    assert got.logprobs["logprobs"] == pytest.approx(expected.logprobs["logprobs"], abs=1e-4)
    assert got.tokens["first"] != got.tokens["second"]
    assert got.text["stopped"] == text[: text.index(text[3:5])]
    assert got.finishes["stopped"] == Finish.STOP
    outcomes = {name: end.outcome for name, end in got.ends.items()}
    assert outcomes.pop("broken") == Outcome.FAILED
    assert set(outcomes.values()) == {Outcome.COMPLETED}


def test_requests_in_flight_are_answered_when_the_process_is_killed(folder: Path) -> None:
    with started(folder) as (engine, pool):
        driver, told = driver_over(engine, pool), Told()
        for i in range(3):
            submit(driver, told, f"r{i}", [5, 6, 7 + i], max_tokens=120)
        driver.start()
        until(lambda: len(told.tokens) == 3)
        os.kill(engine.pid, signal.SIGKILL)
        until(lambda: len(told.ends) == 3)
        late = Told()
        submit(driver, late, "late", [1])
        until(lambda: "late" in late.ends)
        driver.stop()
    ends = {(end.outcome, end.reason) for end in told.ends.values()}
    assert ends == {(Outcome.FAILED, Reason.ENGINE_ERROR)}
    assert late.ends["late"].reason == Reason.DRAINING
    health = driver.health()
    assert not health.ok
    assert health.reason == "EngineDied: the engine's process was killed by SIGKILL"


def test_a_process_that_ends_while_nothing_runs_is_noticed(folder: Path) -> None:
    with started(folder) as (engine, pool):
        driver = driver_over(engine, pool)
        engine.watch(driver.break_off)
        driver.start()
        assert driver.health().ok
        os.kill(engine.pid, signal.SIGABRT)
        until(lambda: not driver.health().ok)
        assert driver.health().reason == "EngineDied: the engine's process was killed by SIGABRT"
        driver.stop()


def hold(pool: BlockPool, row: int) -> None:
    """Give a row a block."""
    one = np.ones(1, np.int32)
    pool.register(row, ())
    pool.reserve(one * row, one * 0, one)


def one_row(slot: int, row: int) -> Decision:
    one = np.ones(1, np.int32)
    return Decision(slot, one * row, one, one * 0, np.ones(1, bool), one * 0)


def test_the_last_words_of_a_process_that_breaks_are_told(folder: Path, capfd: Any) -> None:
    """A row that was never opened is a bug on our side, which no request can be blamed for."""
    with started(folder) as (engine, pool):
        engine.open(0, GenerationWork([1], SamplingParams()))
        hold(pool, 0)
        hold(pool, 7)
        engine.execute(one_row(0, 0))
        assert engine.collect().new_tokens.tolist() == [1]
        engine.execute(one_row(1, 7))
        with pytest.raises(EngineDied, match=r"the engine's process failed: KeyError: 7"):
            engine.collect()
        assert "Traceback" in capfd.readouterr().err
        engine.open(1, GenerationWork([1, 2], SamplingParams()))  # `execute` tells
        engine.close(1)
        with pytest.raises(EngineDied, match="ended with exit code 1"):
            engine.execute(one_row(2, 0))  # may still get into the pipe
            engine.collect()


def test_shutting_down_is_quick_and_may_be_repeated(folder: Path) -> None:
    with started(folder) as (engine, pool):
        with pytest.raises(ValueError, match="at least one token"):
            engine.open(0, GenerationWork([], SamplingParams()))
        engine.open(0, GenerationWork([1], SamplingParams()))
        engine.watch(lambda error: pytest.fail("it was asked for"))
        hold(pool, 0)
        engine.execute(one_row(0, 0))
        pid = engine.pid
        engine.shutdown()
        engine.shutdown()
        assert not Path(f"/proc/{pid}").exists()
        with pytest.raises(EngineDied):
            engine.collect()
        with pytest.raises(EngineDied, match="exit code 0"):
            engine.execute(one_row(1, 0))


PARENT = """
import sys, time
from kaiseki.engines.embedded import ProcessEngine
from kaiseki.memory.pool import BlockPool
engine = ProcessEngine.load(sys.argv[1], tables=BlockPool(16, 4), blocks=16, block_tokens=4, threads=1)
print(engine.pid, flush=True)
time.sleep(600)
"""


def test_nothing_is_left_when_the_parent_is_killed(folder: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(folder)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        try:
            assert parent.stdout is not None
            status = Path(f"/proc/{int(parent.stdout.readline())}/stat")
            assert status.exists()
        finally:
            parent.kill()

    def gone() -> bool:
        try:
            return status.read_text().rpartition(")")[2].split()[0] == "Z"  # if nobody adopts orphans here
        except OSError:
            return True

    until(gone)


def test_errors_of_loading_are_those_of_an_engine_in_this_process(folder: Path, tmp_path: Path) -> None:
    def error(kind: type[Engine], where: Path, **options: Any) -> Exception:
        with pytest.raises((OSError, ValueError)) as caught:
            kind.load(where, tables=BlockPool(16, 4), **{"blocks": 16, "block_tokens": 4, **options})
        return caught.value

    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for where, options in (
        (tmp_path / "nowhere", {}),
        (tmp_path, {}),  # no weights
        (folder, {"blocks": 1}),
        (folder, {"dtype": "float16"}),
    ):
        here, there = error(EmbeddedEngine, where, **options), error(ProcessEngine, where, **options)
        assert (type(there), str(there)) == (type(here), str(here))


def test_every_error_can_be_sent() -> None:
    class Own(ValueError):
        """Not to be found by the other end."""

    for error, expected in (
        (UnsupportedModel("ALiBi"), UnsupportedModel("ALiBi")),
        (FileNotFoundError(2, "no such file", "x"), FileNotFoundError(2, "no such file", "x")),
        (Own("odd"), ValueError("odd")),
        (KeyError("k"), KeyError("k")),
    ):
        sent = portable(error)
        assert (type(sent), str(sent)) == (type(expected), str(expected))


def test_decisions_arrive_as_they_were_sent() -> None:
    three = np.arange(3, dtype=np.int32)
    sent = Decision(
        9, three, three + 1, three * 5, three > 0, three + 2, copies=np.array([[1, 2], [3, 4]], np.int32)
    )
    scattered = np.arange(24, dtype=np.int32).reshape(3, 8)[:, ::2]
    got, tables = wire.unpack_decision(wire.pack_decision(sent, scattered))
    for name in ("rows", "tokens", "starts", "samples", "epochs", "copies"):
        np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
        assert getattr(got, name).dtype == getattr(sent, name).dtype
    assert got.slot == 9
    np.testing.assert_array_equal(tables, scattered)
