"""Step times from results of `vllm bench`, which has clients' times only.

`vllm bench serve --save-result --save-detailed` keeps when each request was sent and each of its tokens came.
Tokens that came together were made by one step, and the time since those before them is what it took. Which
prompts it computed is known where they came during the step before and had their first token from this one;
steps in which a prompt may have been computed in part are left out.

`vllm bench latency` keeps how long a whole batch took, without saying which: `BATCHxINPUT+OUTPUT` does.
Results that differ in OUTPUT alone give the time of a decode; one with an OUTPUT of 1, that of a prompt.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.core.protocols import N_FEATURES
from kaiseki.cost.calibrated import Profile, calibrate
from kaiseki.cost.features import chunk_features

DETAILS = ("input_lens", "start_times", "ttfts", "itls")
TOGETHER = 0.25
"""Tokens whose times differ by less than this part of the median gap came from one step."""

Sample = tuple[F64, float]
"""Features, and seconds."""


class BadResult(ValueError):
    """A file is no result of `vllm bench`, or lacks what is needed; the message names it."""


def read(paths: Sequence[Path], shapes: Sequence[str]) -> Profile:
    """A profile from results.

    Args:
        paths: of `serve` and of `latency`.
        shapes: `BATCHxINPUT+OUTPUT` of each of `latency`, in their order.

    Raises:
        BadResult: a file can't be read or used, or all of them have too few steps.
    """
    samples: list[Sample] = []
    batches: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    models: list[str] = []
    left = list(shapes)
    for path in paths:
        document = _load(path)
        if "latencies" in document and "ttfts" not in document:
            if not left:
                raise BadResult(f"{path}: is of `vllm bench latency`; give --vllm-shape BATCHxINPUT+OUTPUT")
            batch, prompt, output = _shape(left.pop(0))
            batches[batch, prompt][output] = float(np.median(_numbers(path, document, "latencies")))
        else:
            samples += served_steps(_requests(path, document))
            models.append(str(document.get("model_id", path.name)))
    if left:
        raise BadResult(f"--vllm-shape {left[0]}: there are fewer results of `vllm bench latency`")
    for (batch, prompt), seconds in batches.items():
        samples += lone_batches(batch, prompt, seconds)
    try:
        features, took = [f for f, _ in samples], [s * 1e9 for _, s in samples]
        source = f"{', '.join(dict.fromkeys(models)) or 'one model'}, vLLM, results of its benchmarks"
        return calibrate(np.array(features).reshape(-1, N_FEATURES), took, source)
    except ValueError as error:
        raise BadResult(f"{', '.join(map(str, paths))}: {error}") from None


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: its prompt, tokens, when it was sent, and when each token came, s."""

    prompt: int
    start: float
    tokens: F64


def _load(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadResult(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise BadResult(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict) or not {"latencies", "ttfts", "mean_ttft_ms"} & document.keys():
        raise BadResult(f"{path}: no result of `vllm bench serve` or `vllm bench latency`")
    return document


def _numbers(path: Path, document: dict[str, Any], key: str) -> F64:
    try:
        found = np.asarray(document[key], np.float64)
    except (ValueError, TypeError):
        raise BadResult(f"{path}: {key}: must be numbers") from None
    if found.ndim != 1 or not found.size or not np.isfinite(found).all():
        raise BadResult(f"{path}: {key}: must be numbers, one or more")
    return found


def _shape(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)\+([1-9]\d*)", text)
    if not found:
        raise BadResult(f"--vllm-shape {text!r}: must be BATCHxINPUT+OUTPUT, such as 8x512+128")
    return int(found[1]), int(found[2]), int(found[3])


def _requests(path: Path, document: dict[str, Any]) -> list[Sent]:
    missing = [key for key in DETAILS if key not in document]
    if missing:
        raise BadResult(f"{path}: no {missing[0]}; `vllm bench serve` keeps it with --save-detailed")
    prompts, starts, firsts = (_numbers(path, document, key) for key in DETAILS[:3])
    gaps = document["itls"]
    if not isinstance(gaps, list) or not len(prompts) == len(starts) == len(firsts) == len(gaps):
        raise BadResult(f"{path}: {', '.join(DETAILS)}: must have one entry for each request")
    sent = []
    for i, (prompt, start, first) in enumerate(zip(prompts, starts, firsts, strict=True)):
        if first > 0 and prompt >= 1:  # others failed
            later = _numbers(path, {f"itls[{i}]": gaps[i]}, f"itls[{i}]") if gaps[i] else np.empty(0)
            sent.append(Sent(int(prompt), start, start + first + np.concatenate([[0.0], np.cumsum(later)])))
    return sent


def served_steps(sent: Sequence[Sent]) -> Iterator[Sample]:
    """Steps of which it is known what they computed."""
    gaps = np.concatenate([np.diff(s.tokens) for s in sent]) if sent else np.empty(0)
    if not gaps.size:
        return
    ends, step_of = _steps(sent, TOGETHER * float(np.median(gaps)))
    decoding: dict[int, list[int]] = defaultdict(list)  # step -> contexts
    computed: dict[int, list[Sent]] = defaultdict(list)  # step -> requests whose prompt it completed
    running = np.zeros(len(ends) + 1, np.int64)  # decodes that the step should have
    unclear = np.zeros(len(ends), np.bool_)
    for request, steps in zip(sent, step_of, strict=True):
        first, last = int(steps[0]), int(steps[-1])
        computed[first].append(request)
        running[first + 1] += 1
        running[last + 1] -= 1
        for n, step in enumerate(steps[1:].tolist(), 1):
            decoding[step].append(request.prompt + n)
        known = int(np.searchsorted(ends, request.start))  # the step under way when it was sent
        if first > known + 1:
            unclear[known + 1 : first + 1] = True
    running = np.cumsum(running)
    for step in range(1, len(ends)):
        contexts, new = decoding[step], computed[step]
        if unclear[step] or len(contexts) != running[step]:
            continue
        begin = ends[step - 1] if contexts else max(ends[step - 1], min(r.start for r in new))
        if any(r.start > begin for r in new):
            continue
        lengths = [r.prompt for r in new]
        yield chunk_features(contexts, [0] * len(new), lengths), float(ends[step] - begin)


def _steps(sent: Sequence[Sent], together: float) -> tuple[F64, list[Any]]:
    """Ends of the steps, and for each request int64[tokens], the steps of its tokens."""
    times = np.concatenate([s.tokens for s in sent])
    order = np.argsort(times, kind="stable")
    step = np.empty(len(times), np.int64)
    step[order] = np.cumsum(np.diff(times[order], prepend=times[order[0]]) > together)
    ends = np.full(int(step.max()) + 1, np.inf)
    np.minimum.at(ends, step, times)
    return ends, np.split(step, np.cumsum([len(s.tokens) for s in sent])[:-1])


def lone_batches(batch: int, prompt: int, seconds: dict[int, float]) -> Iterator[Sample]:
    """Steps of batches that are alike but for the length of their outputs.

    Args:
        batch, prompt: requests, and tokens of each prompt.
        seconds: of the whole, by tokens of output.

    Raises:
        BadResult: there is one length only, of several tokens.
    """
    lengths = sorted(seconds)
    if lengths == [lengths[0]] and lengths[0] > 1:
        text = f"--vllm-shape {batch}x{prompt}+{lengths[0]}: needs another result with a different OUTPUT"
        raise BadResult(text)
    if lengths[0] == 1:
        yield chunk_features([], [0] * batch, [prompt] * batch), seconds[1]
    for few, many in pairwise(lengths):
        context = prompt + (few + many) / 2
        took = (seconds[many] - seconds[few]) / (many - few)
        if took > 0:
            yield chunk_features([context] * batch), took
