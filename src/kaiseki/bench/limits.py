"""What limits the embedded engine in a case: where its time goes, and how near the machine's peaks it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise"})
NEAR_PEAK = 0.7
"""From this part of a peak on, the peak is named as the limit."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the machine does at most with these threads.

    Attributes:
        gflops: float32 matrix product of large matrices, 10^9 operations per second.
        gb_s: reading from memory, 10^9 bytes per second.
    """

    gflops: float
    gb_s: float


@dataclass(frozen=True, slots=True)
class Weights:
    """How many weights a step multiplies with.

    Attributes:
        body: for every token.
        head: for every token that is sampled.
    """

    body: int
    head: int


@dataclass(frozen=True, slots=True)
class Limit:
    """Of one case.

    Attributes:
        products_share: part of the time in matrix products.
        gflops, gb_s: of these products: operations, and bytes of weights read, per second of theirs; None
            when the profiler saw none.
        words: what that means.
    """

    products_share: float
    gflops: float | None
    gb_s: float | None
    words: str

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure_peaks(threads: int, repeats: int = 5, size: int = 1536, megabytes: int = 512) -> Peaks:
    """Medians of a large matrix product and of a sum over memory that no cache holds."""
    import torch

    torch.set_num_threads(threads)
    a = torch.rand(size, size)
    long = torch.rand(megabytes * 2**18)
    product = _median_s(lambda: a @ a, repeats)
    reading = _median_s(long.sum, repeats)
    return Peaks(2 * size**3 / product / 1e9, 4 * long.numel() / reading / 1e9)


def find_limit(
    run: Callable[[], tuple[int, float]], steps: int, sampled: int, weights: Weights, peaks: Peaks
) -> Limit:
    """Run a case once under a profiler.

    Args:
        run: does `steps` steps; returns tokens and seconds.
        steps: how often the weights are read.
        sampled: output tokens, for which the head is computed.
        weights: what is multiplied with, 4 bytes each.
        peaks: the machine's.
    """
    from torch.profiler import ProfilerActivity, profile

    config = _all_threads()
    with (
        _compiled_products() as compiled,
        profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler,
    ):
        tokens, seconds = run()
    seen = sum(e.self_cpu_time_total for e in profiler.key_averages() if e.key in PRODUCTS) / 1e6
    products_s = seen + sum(compiled)
    if not products_s:
        return Limit(0.0, None, None, "the profiler saw no matrix products")
    gflops = 2.0 * (weights.body * tokens + weights.head * sampled) / products_s / 1e9
    gb_s = 4.0 * (weights.body + weights.head) * steps / products_s / 1e9
    share = min(products_s / seconds, 1.0)
    return Limit(share, gflops, gb_s, _in_words(share, gflops / peaks.gflops, gb_s / peaks.gb_s))


@contextmanager
def _compiled_products() -> Iterator[list[float]]:
    """Seconds of each call of the engine's own products, which the profiler does not see."""
    from kaiseki.engines.embedded import layers, linear

    took: list[float] = []

    def timed(product: Callable[..., None]) -> Callable[..., None]:
        def call(*arrays: object) -> None:
            begin = time.perf_counter()
            product(*arrays)
            took.append(time.perf_counter() - begin)

        return call

    places = ((linear, "product"), (layers, "gated_product"))
    plain = [getattr(module, name) for module, name in places]
    for (module, name), product in zip(places, plain, strict=True):
        setattr(module, name, timed(product))
    try:
        yield took
    finally:
        for (module, name), product in zip(places, plain, strict=True):
            setattr(module, name, product)


def count_weights(folder: Path) -> Weights:
    """Count a model's weights; where the head has none of its own, it shares those of the embedding.

    Raises:
        OSError: the folder has no weights.
    """
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    sizes = {name: int(np.prod(shape)) for name, shape in shapes.items() if len(shape) == 2}
    if not sizes:
        raise OSError(f"no weights in {folder}")
    embedding = sum(size for name, size in sizes.items() if "embed_tokens" in name)
    head = sizes.get("lm_head.weight", embedding)
    return Weights(sum(sizes.values()) - embedding - (head if "lm_head.weight" in sizes else 0), head)


def _in_words(share: float, compute: float, memory: float) -> str:
    if share < 0.5:
        return f"attention and what surrounds it: matrix products are {share:.0%} of the time"
    if memory >= compute and memory >= NEAR_PEAK:
        reason = f"memory: weights are read at {memory:.0%} of its bandwidth"
    elif compute >= NEAR_PEAK:
        reason = f"arithmetic: {compute:.0%} of the peak"
    else:
        reason = f"at {compute:.0%} of peak arithmetic and {memory:.0%} of memory bandwidth"
    return f"matrix products, {share:.0%} of the time, {reason}"


def _all_threads() -> Any:
    """The engine computes on a thread of its own, which the profiler has to see."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)


def _median_s(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[1:]))
