"""How long steps take on this machine, measured before the first request.

A few made-up requests run through a scheduler of their own in chunks and batches of different sizes; a
non-negative least-squares fit of the step times is where the online cost model starts from.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from kaiseki.core.decision import F64
from kaiseki.core.protocols import F_SLOT, N_FEATURES, Capabilities, Engine, KVSpace
from kaiseki.core.requests import Request
from kaiseki.core.scheduler import Scheduler
from kaiseki.core.settings import SchedulerSettings
from kaiseki.engines.driver import Driver
from kaiseki.engines.embedded.work import GenerationWork, SamplingParams
from kaiseki.policies.fcfs import Fcfs

GUESS_NS = np.array([1e6, 1e5, 1e5, 1e5, 1e2, 1e1, 1e1])
"""Only to have some model while measuring; the scheduling does not depend on it."""

ROUNDS = ((1, 256, 256, 6), (4, 64, 64, 6), (8, 16, 128, 6), (2, 192, 32, 2), (1, 96, 96, 2))
"""(requests, prompt tokens, token budget of a slot, output tokens) of each round."""

LEAST_SHARE = 1e-3
"""A term that the fit finds no time for keeps this part of a typical step, so that it can be learnt."""


class _Recorder:
    """A cost model that only writes down what it is told."""

    def __init__(self) -> None:
        self.features: list[F64] = []
        self.measured: list[int] = []

    def planes(self) -> F64:
        return GUESS_NS.reshape(1, 1, -1)

    def headroom(self) -> float:
        return 1.0

    def observe(self, features: F64, measured_ns: int) -> None:
        self.features.append(features.copy())
        self.measured.append(measured_ns)


def step_weights(engine: Engine, pool: KVSpace, capabilities: Capabilities) -> F64:
    """float64[N_FEATURES], ns per unit of feature; the pool and the engine are left empty."""
    recorder = _Recorder()
    rng = np.random.default_rng(0)
    room = min(capabilities.max_context_tokens, pool.total_blocks * pool.block_tokens)
    for number, (requests, prompt, budget, output) in enumerate(ROUNDS):
        prompt = max(1, min(prompt, room // requests - output - pool.block_tokens))
        output = min(output, room - prompt)
        if output < 1:
            continue
        policy = Fcfs(budget_tokens=budget)
        settings = SchedulerSettings(watermark_ratio=1.0)
        driver = Driver(Scheduler(policy, pool, recorder, capabilities, settings), engine)
        sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        for i in range(requests):
            ids = rng.integers(1, 100, prompt).tolist()
            request = Request(f"measure-{number}-{i}", prompt, output)
            driver.submit(request, GenerationWork(ids, sampling), lambda update: None)
        driver.run_until_idle()
    return fit(np.array(recorder.features), np.array(recorder.measured, np.float64))


def fit(features: F64, measured_ns: F64) -> F64:
    """Weights, all above 0, that make relative errors small."""
    if not features.size:
        return GUESS_NS.copy()
    weights, _ = nnls(features / measured_ns[:, None], np.ones(len(measured_ns)))
    typical = float(np.median(measured_ns))
    used = features.max(axis=0)
    least = np.where(used > 0, LEAST_SHARE * typical / np.maximum(used, 1.0), GUESS_NS)
    least[F_SLOT] = max(least[F_SLOT], LEAST_SHARE * typical)
    assert weights.shape == (N_FEATURES,)
    fitted: F64 = np.maximum(weights, least)
    return fitted
