"""Engines measured in turn: pure parts, the line protocol, and ours on a tiny model."""

from __future__ import annotations

import json
import sys
import textwrap
import time

import pytest

from kaiseki.bench import peer as peers
from kaiseki.bench.engine import Sizes, measure, run
from kaiseki.bench.limits import Peaks, Weights, count_weights, find_limit, measure_peaks
from kaiseki.bench.peer import PeerFailed, start_peer

SIZES = Sizes(vocabulary=100, rounds=5, steps=3, context=20, batches=(1, 4), prefill_tokens=30)


class Paced:
    """Decodes at a fixed rate."""

    def __init__(self, log: list[str], name: str, tokens_per_s: float) -> None:
        self.log, self.name, self.rate, self.rows = log, name, tokens_per_s, 0

    def open(self, prompts):
        self.rows = len(prompts)
        assert {len(prompt) for prompt in prompts} == {SIZES.prompt_tokens}
        assert max(map(max, prompts)) < SIZES.vocabulary

    def step(self, steps):
        self.log.append(self.name)
        return self.rows * steps, self.rows * steps / self.rate

    def prefill(self, prompt):
        self.log.append(self.name)
        return len(prompt), len(prompt) / self.rate

    def close(self):
        self.rows = 0

    def shutdown(self):
        self.log.append("shutdown")


def test_engines_take_turns_and_ratios_follow():
    log: list[str] = []
    cases = measure([Paced(log, "ours", 200.0), Paced(log, "peer", 100.0)], SIZES)
    assert log == ["ours", "peer"] * (3 * (SIZES.rounds + 1))
    assert [(case["kind"], case["batch"]) for case in cases] == [("decode", 1), ("decode", 4), ("prefill", 1)]
    assert all(case["ratio"] == pytest.approx(2.0) for case in cases)
    assert cases[2]["ok"] is True


def test_without_a_peer_there_is_no_ratio():
    cases = measure([Paced([], "ours", 200.0)], SIZES)
    assert all(case["ratio"] is case["peer_tokens_per_s"] is case["ok"] is None for case in cases)


def test_a_missed_target():
    cases = measure([Paced([], "ours", 79.0), Paced([], "peer", 100.0)], SIZES)
    assert cases[-1]["ok"] is False


@pytest.fixture
def script(tmp_path, monkeypatch):
    def write(body: str) -> None:
        path = tmp_path / "peer.py"
        path.write_text(textwrap.dedent(body))
        monkeypatch.setitem(peers.SCRIPTS, "vllm", path)

    return write


ECHO = """
    import json, os, sys
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps({"tokens": command.get("steps", 0), "seconds": 0.5}), flush=True)
"""


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0]


def test_a_process_computes_only_when_asked(script, tmp_path):
    script(ECHO)
    peer = start_peer(f"vllm:{sys.executable}", tmp_path, 1, 4, 64)
    pid = peer._process.pid
    try:
        peer.open([[1, 2]])
        assert peer.step(7) == (7, 0.5)
        for _ in range(500):
            if state_of(pid) == "T":
                break
            time.sleep(0.01)
        assert state_of(pid) == "T"
    finally:
        peer.shutdown()
    assert peer._process.returncode is not None


def test_a_peer_that_breaks_says_why(script, tmp_path):
    script("raise SystemExit('no such library')")
    with pytest.raises(PeerFailed, match="no such library"):
        start_peer(f"vllm:{sys.executable}", tmp_path, 1, 4, 64)
    with pytest.raises(PeerFailed, match="No such file"):
        start_peer(f"vllm:{tmp_path / 'python'}", tmp_path, 1, 4, 64)


@pytest.mark.parametrize("spec", ["vllm", "other:python", "vllm:"])
def test_a_wrong_peer(tmp_path, spec):
    with pytest.raises(ValueError, match="expected vllm"):
        start_peer(spec, tmp_path, 1, 4, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.tiny_models import build, byte_tokenizer

    path = tmp_path_factory.mktemp("model")
    build("llama").save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def test_our_engine_on_a_tiny_model(folder, monkeypatch):
    monkeypatch.setattr("kaiseki.bench.engine.Sizes", lambda vocabulary, rounds: SIZES)
    monkeypatch.setattr("kaiseki.bench.engine.measure_peaks", lambda threads: Peaks(1.0, 1.0))
    result = run(folder, None, threads=1, rounds=5)
    result = json.loads(json.dumps(result, allow_nan=False))
    assert [case["batch"] for case in result["cases"]] == [1, 4, 1]
    for case in result["cases"]:
        assert case["tokens_per_s"] > 0
        assert 0 < case["limit"]["products_share"] <= 1
        assert case["limit"]["words"]


def test_weights_are_counted_with_the_head_apart(folder):
    from tests.tiny_models import SIZES as SHAPE
    from tests.tiny_models import VOCAB

    weights = count_weights(folder)
    hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    layer = hidden * hidden * 3 + 3 * hidden * inner  # q and o whole, k and v half each
    assert (weights.body, weights.head) == (layer * SHAPE["num_hidden_layers"], hidden * VOCAB)


def test_peaks_are_positive():
    peaks = measure_peaks(threads=1, repeats=1, size=64, megabytes=1)
    assert peaks.gflops > 0
    assert peaks.gb_s > 0


def test_a_product_is_seen_in_the_profile():
    import torch

    a = torch.rand(256, 256)

    def multiply() -> tuple[int, float]:
        for _ in range(20):
            a @ a
        return 20, 0.01

    limit = find_limit(multiply, 20, 20, Weights(256 * 256, 0), Peaks(1e6, 1e6))
    assert limit.gflops > 0
    assert limit.products_share > 0


def test_without_products_there_are_no_rates():
    limit = find_limit(lambda: (1, 0.01), 1, 1, Weights(10, 10), Peaks(1.0, 1.0))
    assert limit.gflops is limit.gb_s is None
    assert "no matrix products" in limit.words
