"""Random histories of a pool against the plain model (`driver`, `model`)."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.memory.driver import Driver

SEEDS = st.integers(0, 2**16).map(random.Random)


class PoolMachine(RuleBasedStateMachine):
    driver = None

    @initialize(
        total=st.integers(3, 40),
        page=st.sampled_from([1, 2, 4]),
        hashing=st.booleans(),
        hint=st.integers(1, 8),
        eviction=st.sampled_from(["arc", "lru"]),
        placement=st.sampled_from(["pages", "runs"]),
        host=st.sampled_from([0, 4, 12]),
    )
    def start(self, **shape):
        self.driver = Driver(**shape)

    @rule(rng=SEEDS)
    def submit(self, rng):
        self.driver.submit(rng)

    @rule(rng=SEEDS)
    def attach(self, rng):
        self.driver.attach(rng)

    @rule(rng=SEEDS)
    def pin(self, rng):
        self.driver.pin(rng)

    @rule(rng=SEEDS)
    def fork(self, rng):
        self.driver.fork(rng)

    @rule(rng=SEEDS)
    def decide(self, rng):
        self.driver.decide(rng)

    @rule(rng=SEEDS)
    def collect(self, rng):
        self.driver.collect(rng)

    @rule(rng=SEEDS)
    def stop(self, rng):
        self.driver.stop(rng)

    @rule(rng=SEEDS)
    def swap(self, rng):
        self.driver.swap(rng)

    @rule(rng=SEEDS)
    def forget(self, rng):
        self.driver.forget(rng)

    @invariant()
    def agrees(self):
        if self.driver:
            self.driver.check()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.parametrize("seed", range(40))
def test_long_history(seed):
    """Long enough for every block to be evicted many times; the machine above is better at small cases."""
    rng = random.Random(seed)
    driver = Driver.any(rng)
    for _ in range(250):
        getattr(driver, rng.choice(driver.MOVES))(rng)
        driver.check()
    assert driver.pool.stats().allocations > driver.pool.total_blocks
