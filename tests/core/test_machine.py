"""Random histories of a scheduler: every rule of the core, attacked in any order at any depth."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.conformance.workloads import CLASSES
from tests.core.audits import audit, check_decision, check_endings, check_result
from tests.core.world import Shape, World
from tests.harness import BUILT_IN

from kaiseki.core.requests import ServiceClass
from kaiseki.core.settings import SchedulerSettings
from kaiseki.policies.registry import load

STARVING_SLOTS = 4
"""Few, so that starving for that long is within reach of a short history."""
OTHERS = tuple(name for name in BUILT_IN if name != "kaiseki")


class SchedulerMachine(RuleBasedStateMachine):
    """Moves of clients, of the owner of the scheduler and of the card; audits after each."""

    depth = 0
    policies: tuple[str, ...] = ("kaiseki",)
    world: World

    @initialize(
        data=st.data(),
        roomy=st.booleans(),
        learns=st.booleans(),
        adapter_slots=st.sampled_from((0, 1, 2)),
        seed=st.integers(0, 2**16),
    )
    def start(self, data: st.DataObject, roomy: bool, learns: bool, adapter_slots: int, seed: int) -> None:
        draw = data.draw
        limits = SchedulerSettings(
            max_batch_size=32 if roomy else draw(st.integers(1, 5)),
            fairness_window=draw(st.sampled_from((1, 3))),
            watermark_ratio=1.0 if roomy else draw(st.sampled_from((0.5, 0.8, 1.0))),
            quantum_tokens=draw(st.sampled_from((1, 4, 16))),
            max_slot_tokens=draw(st.sampled_from((16, 64))),
            window=64 if roomy else draw(st.sampled_from((1, 3, 64))),
            max_passes=draw(st.sampled_from((1, 64))),
            max_waiting=0 if roomy else draw(st.sampled_from((0, 0, 6))),
            slo_lambda=draw(st.sampled_from((0.1, 10.0))),
        )
        name, budget = draw(st.sampled_from(self.policies)), draw(st.sampled_from((None, 16, 64)))
        policy = load(name, starving_slots=STARVING_SLOTS, budget_tokens=budget)
        page = 4 if roomy else draw(st.sampled_from((2, 4)))
        blocks = 640 if roomy else draw(st.integers(8, 32))
        shape = Shape(policy, self.depth, blocks, page, roomy, learns, adapter_slots, limits, seed)
        self.world = World(shape, audit, check_decision, check_result)

    @rule(
        length=st.integers(1, 60),
        outputs=st.integers(1, 12),
        stops=st.none() | st.integers(1, 12),
        breaks=st.none() | st.none() | st.integers(0, 40),
        retryable=st.booleans(),
        shared=st.sampled_from((0, 8, 40)),
        hashed=st.booleans(),
        tenant=st.sampled_from("abc"),
        cls=st.sampled_from(CLASSES),
        priority=st.integers(-1, 1),
        adapter=st.sampled_from((None, "x", "y", "z")),
    )
    def submit(
        self,
        length: int,
        outputs: int,
        stops: int | None,
        breaks: int | None,
        retryable: bool,
        shared: int,
        hashed: bool,
        tenant: str,
        cls: ServiceClass,
        priority: int,
        adapter: str | None,
    ) -> None:
        self.world.submit(
            length,
            outputs,
            None if stops is None else min(stops, outputs),
            shared,
            breaks_at=-1 if breaks is None else breaks,
            retryable=retryable,
            hashed=hashed,
            tenant=tenant,
            cls=cls,
            priority=priority,
            adapter=adapter if self.world.shape.adapter_slots else None,
        )

    @rule(count=st.integers(2, 6), length=st.sampled_from((5, 30, 60)), tenant=st.sampled_from("abc"))
    def submit_burst(self, count: int, length: int, tenant: str) -> None:
        for _ in range(count):
            self.world.submit(length, 6, tenant=tenant)

    @rule(which=st.integers(0, 20), outputs=st.integers(1, 8), tenant=st.sampled_from("abc"))
    def submit_fork(self, which: int, outputs: int, tenant: str) -> None:
        clients = list(self.world.clients.values())
        if clients:
            self.world.submit(0, outputs, fork_of=clients[-1 - which % len(clients)], tenant=tenant)

    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        clients = list(self.world.clients.values())
        if clients:
            self.world.cancel(clients[-1 - which % len(clients)])

    @rule(name=st.sampled_from("abc"), weight=st.sampled_from((0.5, 1.0, 3.0)))
    def set_tenant(self, name: str, weight: float) -> None:
        self.world.set_tenant(name, weight)

    @rule(ms=st.sampled_from((1, 10, 100)))
    def wait(self, ms: int) -> None:
        self.world.wait(ms)

    @rule(work_limit=st.none() | st.integers(1, 3))
    def decide(self, work_limit: int | None) -> None:
        self.world.decide(work_limit)

    @rule()
    def collect(self) -> None:
        self.world.collect()

    @rule(slots=st.integers(1, 6))
    def serve(self, slots: int) -> None:
        for _ in range(slots):
            while self.world.scheduler.in_flight <= self.depth:
                decision = self.world.decide()
                if decision is None or decision.empty:
                    break
            self.world.collect()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            check_endings(self.world)


def machine(depth: int, policies: tuple[str, ...]) -> type:
    case = type("Machine", (SchedulerMachine,), {"depth": depth, "policies": policies}).TestCase
    case.settings = settings(max_examples=30, stateful_step_count=30)
    return case


TestKaisekiAtDepth0 = machine(0, ("kaiseki",))
TestKaisekiAtDepth1 = machine(1, ("kaiseki",))
TestKaisekiAtDepth3 = machine(3, ("kaiseki",))
TestOthersAtDepth0 = machine(0, OTHERS)
TestOthersAtDepth1 = machine(1, OTHERS)
TestOthersAtDepth3 = machine(3, OTHERS)
