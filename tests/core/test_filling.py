"""Filling one slot: each limit binds where it should, and says by how much."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kaiseki.core.adapters import ADAPTER
from kaiseki.core.costs import predict_ns
from kaiseki.core.entries import ENTRY
from kaiseki.core.filling import (
    N_RULES,
    R_BLOCK,
    R_BOUND_NS,
    R_CHUNKED,
    R_DECODES_NS,
    R_EXEMPT,
    R_HARD_LAG,
    R_HEADROOM,
    R_LAG,
    R_QUANTUM,
    R_STRICT,
    fill,
    no_features,
)
from kaiseki.core.lanes import LANES
from kaiseki.core.limits import L_ADMISSION, L_BLOCKS, L_ROWS, L_SOLE, L_STARVING, L_TOKENS, N_LIMITS
from kaiseki.core.protocols import N_FEATURES
from kaiseki.core.reasons import Reason

BLOCK = 16
# 10 ns a slot, 1 ns a decode, 1 ns a prefill token.
PLANES = np.array([10.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]).reshape(1, 1, N_FEATURES)


@dataclass
class E:
    """One candidate."""

    need: int
    decode: bool = False
    bound: bool = False
    waiting: bool = True
    start: int = 0
    pins: int = 0
    copy: int = 0
    tenant: int = 0
    lane: int = 0


@dataclass
class Filled:
    chunk: list[int]
    reason: list[Reason]
    short: list[float]
    features: np.ndarray
    limits: np.ndarray
    counter: np.ndarray = field(default_factory=lambda: np.zeros(1))


def decode(start: int = 100, **more: int) -> E:
    return E(1, decode=True, waiting=False, start=start, **more)


def offer(
    entries: list[E],
    tokens: float = 1e9,
    rows: float = 1e9,
    blocks: float = 1e9,
    admission: float = 1e9,
    bound_ns: float = np.inf,
    decodes_ns: float = np.inf,
    headroom: float = 1.0,
    quantum: int = 16,
    starving: bool = False,
    sole: bool = False,
    chunked: bool = True,
    strict: bool = False,
    lag: float = np.inf,
    hard_lag: float = np.inf,
    exempt: int = -1,
    deep: list[int] | None = None,
    lane_counter: list[float] | None = None,
    counter: list[float] | None = None,
    weight: list[float] | None = None,
) -> Filled:
    given = np.zeros(len(entries), ENTRY)
    for name in ("decode", "bound", "waiting", "start", "need", "pins", "copy", "tenant"):
        given[name] = [getattr(e, name) for e in entries]
    given["row"], given["open"], given["adapter"] = np.arange(len(entries)), True, -1
    given["whole"] = [-(-(e.start + e.need) // BLOCK) - -(-e.start // BLOCK) + e.copy for e in entries]
    limits = np.zeros(N_LIMITS)
    limits[[L_TOKENS, L_ROWS, L_BLOCKS, L_ADMISSION]] = tokens, rows, blocks, admission
    limits[[L_STARVING, L_SOLE]] = starving, sole
    rules = np.zeros(N_RULES)
    rules[[R_HEADROOM, R_BOUND_NS, R_QUANTUM, R_BLOCK]] = headroom, bound_ns, quantum, BLOCK
    rules[R_DECODES_NS] = decodes_ns
    rules[[R_CHUNKED, R_STRICT, R_LAG, R_HARD_LAG, R_EXEMPT]] = chunked, strict, lag, hard_lag, exempt
    features, counters = no_features(), np.array(counter or [0.0, 0.0, 0.0])
    weights, more = np.array(weight or [1.0, 1.0, 1.0]), np.zeros(3, np.int32)
    given["group"] = given["tenant"] * LANES + [e.lane for e in entries]
    lanes = np.array(lane_counter or [0.0] * 3 * LANES)
    fill(
        given, features, no_features(), PLANES, rules, limits, counters, weights, more,
        np.array(deep or [0, 0, 0]), lanes, np.zeros(lanes.size, np.int32), np.zeros(lanes.size, np.int64),
        np.zeros(0, ADAPTER),
    )  # fmt: skip
    reasons = [Reason(r) for r in given["reason"].tolist()]
    return Filled(given["chunk"].tolist(), reasons, given["short"].tolist(), features, limits, counters)


def test_without_limits_everybody_gets_all() -> None:
    done = offer([decode(), E(500), E(3)])
    assert done.chunk == [1, 500, 3] and set(done.reason) == {Reason.SELECTED}
    assert predict_ns(PLANES, done.features) == 10 + 1 + 503


def test_the_token_budget_is_filled_and_the_last_chunk_rounded_down() -> None:
    done = offer([decode(), E(300), E(300), E(300)], tokens=512)
    assert done.chunk == [1, 300, 208, 0]  # 211 left, a multiple of 16
    assert done.reason[3] in (Reason.NO_TOKENS, Reason.SELECTED)
    assert offer([E(300), E(40)], tokens=340).chunk == [300, 40], "a chunk that completes is not rounded"


def test_the_time_bound_is_kept_with_headroom() -> None:
    done = offer([decode(), E(1000)], bound_ns=211.0)
    assert done.chunk == [1, 192]  # 200 fit
    tight = offer([decode(), E(1000)], bound_ns=211.0, headroom=2.0)
    assert predict_ns(PLANES, tight.features) * 2.0 <= 211.0 and tight.chunk[1] > 0
    after = offer([decode(), E(192), E(1000)], bound_ns=204.0)
    assert after.chunk[2] == 0 and after.reason[2] == Reason.NO_TIME and after.short[2] == 1000


def test_decodes_over_the_bound_pause() -> None:
    done = offer([decode() for _ in range(5)], bound_ns=13.0)
    assert done.chunk == [1, 1, 1, 0, 0]
    assert done.reason[3:] == [Reason.DECODE_BOUND] * 2 and done.short[3] == 1.0


def test_a_decode_whose_tbt_binds_pauses_for_the_bare_prediction_only() -> None:
    binding = [decode(bound=True) for _ in range(5)]
    done = offer([*binding, E(need=100)], bound_ns=13.0, headroom=1.5, decodes_ns=14.0)
    assert done.chunk == [1, 1, 1, 1, 0, 0]
    assert done.reason[4:] == [Reason.DECODE_BOUND, Reason.NO_TIME] and done.short[4] == 1.0


def test_alone_something_always_goes() -> None:
    assert offer([decode()], bound_ns=1.0).chunk == [1]
    assert offer([E(1000)], bound_ns=1.0, quantum=64).chunk == [64]
    assert offer([E(5)], bound_ns=1.0, quantum=64).chunk == [5]


def test_a_starving_prefill_gets_one_quantum_once() -> None:
    entries = [decode(), E(100), E(100)]
    assert offer(entries, bound_ns=11.0).chunk == [1, 0, 0]
    assert offer(entries, bound_ns=11.0, starving=True).chunk == [1, 16, 0]


def test_no_row_left() -> None:
    done = offer([E(10, waiting=False), E(10), E(10)], rows=1)
    assert done.chunk == [10, 10, 0] and done.reason[2] == Reason.NO_ROW and done.short[2] == 1.0


def test_blocks_cut_a_chunk_to_what_can_be_written() -> None:
    done = offer([E(100, start=24, waiting=False)], blocks=2)
    assert done.chunk == [40]  # 8 in the block it has and two more
    done = offer([E(33, start=0), decode(start=16)], blocks=3)
    assert done.chunk == [33, 0] and done.reason[1] == Reason.NO_KV
    assert done.short[1] == 1.0
    none = offer([E(64, waiting=False)], blocks=0)
    assert none.reason == [Reason.NO_KV] and none.short == [4.0], "short by blocks, not by tokens"
    assert offer([decode(start=15)], blocks=0).chunk == [1], "its block has room"


def test_cached_blocks_that_are_taken_and_copies_count() -> None:
    assert offer([E(16, start=64, pins=4)], blocks=4).reason == [Reason.NO_KV]
    assert offer([E(16, start=64, pins=4)], blocks=5).chunk == [16]
    done = offer([E(1, start=20, copy=1)], blocks=0)
    assert done.chunk == [0] and done.reason == [Reason.NO_KV] and done.short == [1.0]
    assert offer([E(1, start=20, copy=1)], blocks=1).limits[L_BLOCKS] == 0


def test_the_watermark_holds_back_whole_prompts_but_never_the_only_request() -> None:
    done = offer([E(64), E(64)], admission=7)
    assert done.chunk == [64, 0] and done.reason[1] == Reason.WATERMARK and done.short[1] == 1.0
    assert offer([E(64), E(64)], admission=0, sole=True).chunk == [64, 0]
    assert offer([E(64, waiting=False)], admission=-5).chunk == [64], "it is in already"


def test_strict_order_ends_at_the_first_that_does_not_fit() -> None:
    entries = [E(64), E(640), E(16)]
    loose, strict = offer(entries, admission=10), offer(entries, admission=10, strict=True)
    assert loose.chunk == [64, 0, 16]
    assert strict.chunk == [64, 0, 0] and strict.reason[2] == Reason.BEHIND


def test_whole_prompts_only() -> None:
    assert offer([E(300), E(300)], tokens=512, chunked=False).chunk == [300, 0]


def test_a_tenant_too_far_ahead_waits_until_the_others_have_caught_up() -> None:
    entries = [E(100, tenant=0), E(100, tenant=1), E(50, tenant=1)]
    done = offer(entries, counter=[500.0, 0.0], lag=400.0, bound_ns=300.0)
    assert done.chunk == [100, 100, 50], "tenant 1 was charged 110 for its first, so 0 is within 400 again"
    held = offer(entries, counter=[500.0, 0.0], lag=400.0, tokens=100)
    assert held.chunk == [0, 100, 0]
    far = offer(entries, counter=[5000.0, 0.0], lag=400.0)
    assert far.chunk[1:] == [100, 50] and far.chunk[0] == 100, "nobody of tenant 1 is left to wait for"


def test_the_gate_says_by_how_much_and_does_not_hold_decodes() -> None:
    entries = [decode(tenant=0), E(100, tenant=0), E(900, tenant=1), E(900, tenant=1)]
    done = offer(entries, counter=[5000.0, 0.0], lag=400.0, tokens=101)
    assert done.chunk[0] == 1 and done.reason[1] in (Reason.FAIR_SHARE, Reason.NO_TOKENS)
    assert done.chunk[2] > 0


def test_charges_are_divided_by_weight() -> None:
    done = offer([E(100, tenant=0), E(100, tenant=1)], weight=[1.0, 4.0, 1.0])
    assert done.counter.tolist() == [110.0, 25.0, 0.0]


def test_who_cannot_be_granted_does_not_hold_others_back() -> None:
    entries = [E(1600, tenant=1), E(16, tenant=0)]
    done = offer(entries, counter=[5000.0, 0.0], lag=400.0, admission=10)
    assert done.chunk == [0, 16] and done.reason[0] == Reason.WATERMARK


def test_a_decode_pauses_only_when_its_tenant_is_further_ahead_than_the_hard_lag() -> None:
    behind = E(500, tenant=1)
    far = offer([decode(), behind], tokens=100, counter=[1000.0, 0.0, 0.0], lag=100.0, hard_lag=200.0)
    assert far.chunk == [0, 96] and far.reason[0] == Reason.FAIR_SHARE and far.short[0] > 0
    near = offer([decode(), behind], tokens=100, counter=[150.0, 0.0, 0.0], lag=100.0, hard_lag=200.0)
    assert near.chunk[0] == 1, "decodes run on past the lag of prefills"
    spared = offer([decode(), behind], counter=[1000.0, 0.0, 0.0], lag=100.0, hard_lag=np.inf)
    assert spared.chunk[0] == 1, "an engine that cannot pause a decode is not asked to"


def test_a_lane_further_ahead_than_the_lag_waits_for_the_others_of_its_tenant() -> None:
    ahead = [1000.0] + [0.0] * (3 * LANES - 1)
    done = offer([E(300), E(300, lane=3)], tokens=100, lag=100.0, lane_counter=ahead)
    assert done.chunk == [0, 96] and done.reason[0] == Reason.LANE_SHARE
    assert done.short[0] >= 1000 - 100 - 110, "ahead by what the other has not caught up, less the lag"
    other = offer([E(300), E(300, lane=3, tenant=1)], tokens=100, lag=100.0, lane_counter=ahead)
    assert other.chunk[0] == 96, "lanes are compared inside a tenant only"
