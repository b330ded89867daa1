"""What must hold after every move of a `World`, whatever was done to it."""

from __future__ import annotations

import numpy as np
from tests.core.world import Client, Flight, World
from tests.harness import check_consistent

from kaiseki.core.decision import Decision, StepResult
from kaiseki.core.lanes import DEMOTED_LANE, LANE_WEIGHT, LANES
from kaiseki.core.protocols import F_TOKENS
from kaiseki.core.reasons import Finish, Outcome, Reason
from kaiseki.core.table import NO_ROW, State
from kaiseki.memory.layout import LANE

REFUSABLE = (Reason.HOPELESS, Reason.LATE_GAPS)


def audit(world: World) -> None:
    """Everything that can be seen between two moves."""
    check_consistent(world.scheduler, world.pool)
    for client in world.open():
        check_client(world, client)
    check_queues(world)
    check_blocks(world)
    check_shares(world)
    s = world.scheduler
    assert sorted(s.life.ids) == sorted(c.id for c in world.open())
    assert s.in_flight == len(world.flights)


def check_client(world: World, client: Client) -> None:
    """One row against what its client and the card know."""
    t, row = world.scheduler.table, client.row
    assert world.scheduler.life.ids[client.id] == row
    state = State(int(t.state[row]))
    assert client.running == (state == State.RUNNING), f"{client.id} is {state.name}"
    assert int(t.outputs[row]) == len(client.tokens)
    mine = [
        (flight.decision, i)
        for flight in world.flights
        for i, owner in enumerate(flight.owners)
        if owner == (client, client.life)
    ]
    assert int(t.pending[row]) == sum(int(d.samples[i]) for d, i in mine)
    if not client.running:
        assert not mine and int(t.computed[row]) == int(t.confirmed[row]) == 0
        assert int(t.inflight_slot[row]) == -1
    elif mine:
        newest, i = mine[-1]
        assert int(t.inflight_slot[row]) == newest.slot
        assert int(t.computed[row]) == int(newest.starts[i] + newest.tokens[i])
    else:
        assert int(t.inflight_slot[row]) == -1
        assert int(t.computed[row]) == int(t.confirmed[row])
    if state == State.HELD:
        parent = int(t.fork_of[row])
        assert parent != NO_ROW, f"{client.id} is held for nobody"
        assert world.of_row(parent).id == client.job.request.fork_of
        assert t.confirmed[parent] < t.prompt[parent], f"{client.id} could share its sibling's prompt"


def check_queues(world: World) -> None:
    """Who waits is in the queue of its tenant, adapter and lane, or has just arrived; nobody else is."""
    s = world.scheduler
    arrived = s.waiting._arrived
    waiting = np.flatnonzero(s.table.state == State.WAITING)
    assert len(s.waiting) == waiting.size and len(set(arrived)) == len(arrived)
    assert s.waiting.tokens == s.table.prompt[waiting].sum()
    waiting = np.setdiff1d(waiting, arrived)
    by_key, by_start = s.waiting._by_key, s.waiting._by_start
    assert np.flatnonzero(by_key.nodes["queue"] >= 0).tolist() == waiting.tolist()
    queue, kinds = by_key.nodes["queue"][waiting], s.waiting._kinds
    assert (queue // (LANES * kinds) * LANES + queue % LANES == s.table.group[waiting]).all()
    assert (queue // LANES % kinds == s.table.adapter[waiting] + 1).all()
    assert (s.table.group[waiting] // LANES == s.table.tenant[waiting]).all()
    late = s.table.group[waiting] % LANES == DEMOTED_LANE
    assert (late == s.table.demoted[waiting]).all()
    sizes = np.bincount(by_key.nodes["queue"][waiting], minlength=by_key.sizes.size)
    assert sizes.tolist() == by_key.sizes.tolist()
    assert set(np.flatnonzero(by_start.nodes["queue"] >= 0).tolist()) <= set(waiting.tolist())


def check_blocks(world: World) -> None:
    """Only running rows hold blocks, enough for what is computed; what waits for a step waits no longer."""
    pool, t = world.pool, world.scheduler.table
    lanes = pool._state.requests[:, LANE]
    holds = np.flatnonzero(lanes >= 0)
    assert set(holds.tolist()) <= set(t.running_rows().tolist()), "a row that does not run holds blocks"
    rows = t.running_rows()
    pool.tables(rows, t.computed[rows])  # raises where a row holds fewer
    free, live, limbo = pool.free_blocks(), pool.live_blocks(), pool.stats().limbo_blocks
    assert free + live + limbo == pool.total_blocks
    assert limbo == 0 or world.flights, "blocks wait for a step, but none is in flight"


def check_shares(world: World) -> None:
    """The bounds of docs/fairness.md, where nobody lacks room or an adapter."""
    adapters = world.scheduler.adapters
    if world.shape.policy.fair and world.shape.roomy and len(adapters.names) <= adapters.slots:
        books = world.books
        assert books.worst <= books.bound(world.depth) * (1 + 1e-9)
        assert books.worst_lane <= books.lane_bound(world.depth) * (1 + 1e-9)


def check_decision(world: World, d: Decision) -> None:
    """A decision that can be carried out, charges what it predicts, and leaves nobody without a reason."""
    s = world.scheduler
    rows = d.rows.tolist()
    assert len(set(rows)) == len(rows) and not set(rows) & set(d.preempted.tolist())
    assert (d.tokens >= 1).all() and (d.epochs == s.table.epoch[d.rows]).all()
    policy = world.shape.policy
    if policy.chunked:
        assert d.tokens.sum() <= (policy.budget_tokens or s.settings.max_slot_tokens)
    charged, lanes = charges_since(world, world.charged)
    predicted = 0.0
    if rows:
        flight = s._inflight[d.slot]
        predicted = float(flight.charged.sum())
        assert abs(predicted - d.predicted_ns) <= 1.0 + 1e-9 * predicted
        # Who comes back after a stop may find all but its last token in the cache.
        back = np.array([world.of_row(row).id not in world.before.running for row in rows])
        prefills = d.tokens.sum() - np.count_nonzero(is_decode(world, d) & ~back)
        assert flight.features[F_TOKENS] == prefills
    assert np.isclose(charged.sum(), predicted) and np.isclose(lanes.sum(), predicted)
    assert (charged >= -1e-3).all()
    if s.in_flight == 0 and world.open():
        world.idle += 1
        assert world.idle < 2, "requests are open, nothing is in flight, and nothing was decided twice"
    else:
        world.idle = 0
    check_let_go(world, d.preempted)
    for client in world.open():
        check_reason(world, client, d)


def check_let_go(world: World, stopped: np.ndarray) -> None:
    """Nobody waits for the prompt of a sibling that has just lost it."""
    t = world.scheduler.table
    held = t.state == State.HELD
    assert not np.isin(t.fork_of[held], stopped).any(), "a fork is held for a row that was stopped"


def is_decode(world: World, d: Decision) -> np.ndarray:
    found: np.ndarray = (d.starts >= world.scheduler.table.prompt[d.rows]) & (d.tokens == 1)
    return found


def check_reason(world: World, client: Client, d: Decision) -> None:
    """Whoever got nothing can be told why."""
    t, row = world.scheduler.table, client.row
    if t.state[row] == State.WAITING:
        assert int(t.tenant[row]) in world.cutoffs, f"nothing says why {client.id} waits"
    elif client.running and row not in d.rows and client.id not in world.before.in_flight:
        if world.disjoint and t.outputs[row] > 0:
            return  # a decode whose turn is a later slot of the pipeline: see `core.staging`
        reason = Reason(int(t.last_reason[row]))
        assert reason not in (Reason.NONE, Reason.SELECTED), f"nothing says why {client.id} got nothing"


def check_result(world: World, result: StepResult, flight: Flight) -> None:
    """What was predicted is replaced by what was measured, void chunks included."""
    charged, lanes = charges_since(world, None)
    measured = float(result.ended_ns - result.started_ns)
    expected = measured - flight.decision.predicted_ns
    assert abs(charged.sum() - expected) <= 2.0 and abs(lanes.sum() - expected) <= 2.0


def charges_since(world: World, now: tuple[np.ndarray, np.ndarray] | None) -> tuple[np.ndarray, np.ndarray]:
    """Card time charged per tenant and per lane since the move began; `now`: counters at its end."""
    fair, before = world.scheduler.fairness, world.before
    counter, lane_counter = now if now is not None else (fair.counter, fair.lane_counter)
    n = before.counter.size
    tenants = (counter[:n] - before.counter) * fair.weight[:n]
    lanes = lane_counter[: n * LANES] - before.lane_counter
    return tenants, lanes * np.tile(LANE_WEIGHT, n) * np.repeat(fair.weight[:n], LANES)


def check_endings(world: World) -> None:
    """After everything has ended: nothing is left, and everybody got what was theirs, once."""
    s = world.scheduler
    assert not world.open() and world.pool.free_blocks() == world.pool.total_blocks
    assert s.table.open_rows == 0 and s.table.running_count == 0 and s.in_flight == 0
    assert not s.life.ids and not s.life.names and not s.life._held
    assert len(s.waiting) == 0 and s.waiting.tokens == 0
    assert not s.fairness.open_requests.any() and not world.engine._scripts
    for client in world.clients.values():
        check_ending(client)


def check_ending(client: Client) -> None:
    """One outcome; the output that was scripted, whatever the schedule."""
    ending, script = client.ending, client.job.script
    assert ending is not None
    length = min(script.output_tokens, script.max_tokens)
    expected = [script.token(i) for i in range(length)]
    assert ending.outputs == len(client.tokens)
    assert np.isclose(ending.service_ns, client.service_ns)
    if ending.outcome == Outcome.COMPLETED:
        assert client.tokens == expected
        assert ending.finish == (Finish.STOP if script.output_tokens <= script.max_tokens else Finish.LENGTH)
    else:
        assert client.tokens == expected[: len(client.tokens)] and ending.finish == Finish.NONE
    if ending.outcome == Outcome.FAILED:
        assert script.breaks_at >= 0 and not script.retryable
    if ending.outcome == Outcome.EXPIRED:
        assert ending.reason in REFUSABLE
