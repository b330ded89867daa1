"""Step times from what `vllm bench` writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kaiseki.calibrate.vllm_bench import BadResult, Sent, lone_batches, read, served_steps
from kaiseki.cost.calibrated import Calibrated
from kaiseki.cost.features import chunk_features

SLOT_S, DECODE_S, TOKEN_S, CONTEXT_S = 0.010, 0.0005, 0.0001, 1e-7


def step_s(contexts: list[int], prompts: list[int]) -> float:
    return SLOT_S + DECODE_S * len(contexts) + TOKEN_S * sum(prompts) + CONTEXT_S * sum(contexts)


def benchmark(requests: int = 60, rate: float = 6.0, seed: int = 1, jitter_s: float = 0.0003) -> dict:
    """A result as the benchmark writes it, of an engine that computes whole prompts beside its decodes."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum(rng.exponential(1 / rate, requests))
    prompts, outputs = rng.integers(20, 800, requests), rng.integers(2, 60, requests)
    tokens: list[list[float]] = [[] for _ in range(requests)]
    now, waiting, running = 0.0, list(range(requests)), []
    while waiting or running:
        if not running and starts[waiting[0]] > now:
            now = starts[waiting[0]]
        new = [i for i in waiting if starts[i] <= now]
        waiting = waiting[len(new) :]
        now += step_s([prompts[i] + len(tokens[i]) for i in running], [prompts[i] for i in new])
        running += new
        for i in running:
            tokens[i].append(now + rng.uniform(0, jitter_s))
        running = [i for i in running if len(tokens[i]) < outputs[i]]
    return {
        "model_id": "some/model",
        "input_lens": prompts.tolist(),
        "output_lens": outputs.tolist(),
        "start_times": starts.tolist(),
        "ttfts": [t[0] - s for t, s in zip(tokens, starts, strict=True)],
        "itls": [np.diff(t).tolist() for t in tokens],
        "latencies": [t[-1] - s for t, s in zip(tokens, starts, strict=True)],
    }


SHORT = {"input_lens": [9], "start_times": [0.0], "ttfts": [0.1], "itls": [[0.1, 0.1]], "latencies": [0.3]}


def write(folder: Path, document: object, name: str = "result.json") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_steps_of_a_served_load_are_found_again(tmp_path: Path) -> None:
    profile = read([write(tmp_path, benchmark())], [])
    model = Calibrated(profile)
    for contexts, prompts in (([300] * 4, []), ([500] * 2, [400]), ([], [600])):
        f = chunk_features(contexts, [0] * len(prompts), prompts)
        assert model.iteration_ns(f) / 1e9 == pytest.approx(step_s(contexts, prompts), rel=0.1)
    assert profile.fit_error.median < 0.05
    assert "some/model" in profile.source


def test_a_step_that_may_hold_part_of_a_prompt_is_left_out() -> None:
    streaming = Sent(100, 0.0, np.arange(1, 21) / 10)
    in_two_parts = Sent(500, 0.55, np.array([0.8, 0.9]))  # sent in step 5, so it could have begun in step 6
    lengths = [round(s, 3) for _, s in served_steps([streaming])]
    assert lengths == [0.1] * 19
    kept = list(served_steps([streaming, in_two_parts]))
    assert len(kept) == 17 and all(f[2] == 0 for f, _ in kept)  # no chunk that is known


def test_whole_batches_give_a_prompt_and_decodes() -> None:
    prefill, decode = lone_batches(8, 512, {1: 0.5, 101: 2.5})
    assert prefill[0].tolist() == chunk_features([], [0] * 8, [512] * 8).tolist() and prefill[1] == 0.5
    assert decode[0].tolist() == chunk_features([512 + 51] * 8).tolist()
    assert decode[1] == pytest.approx(0.02)


def test_served_and_lone_results_together(tmp_path: Path) -> None:
    one = write(tmp_path, {"avg_latency": 1.0, "latencies": [0.05, 0.05], "percentiles": {}}, "one.json")
    two = write(tmp_path, {"avg_latency": 1.0, "latencies": [1.2], "percentiles": {}}, "two.json")
    served = write(tmp_path, benchmark())
    alone = read([served], [])
    assert read([served, one, two], ["4x100+1", "4x100+101"]).samples == alone.samples + 2


@pytest.mark.parametrize(
    "document,shapes,message",
    [
        ("[", [], "not JSON"),
        ({"hello": 1}, [], "no result of"),
        ({"mean_ttft_ms": 1.0}, [], "no input_lens.*--save-detailed"),
        ({**benchmark(3), "itls": [[1.0]]}, [], "one entry for each request"),
        ({**benchmark(3), "ttfts": [1.0, "x", 2.0]}, [], "ttfts: must be numbers"),
        (SHORT, [], "2 samples; need 14"),
        ({"latencies": [1.0]}, [], "give --vllm-shape"),
        ({"latencies": [1.0]}, ["8x512"], "must be BATCHxINPUT"),
        ({"latencies": [1.0]}, ["8x512+128"], "different OUTPUT"),
        (benchmark(40), ["8x512+128"], "fewer results"),
    ],
)
def test_what_can_not_be_used_is_told(
    tmp_path: Path, document: object, shapes: list[str], message: str
) -> None:
    with pytest.raises(BadResult, match=message):
        read([write(tmp_path, document)], shapes)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadResult, match=r"none\.json: No such file"):
        read([tmp_path / "none.json"], [])
