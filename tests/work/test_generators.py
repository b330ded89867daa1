"""Generators: what they promise, and how near they come to the traces they are fitted to."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.work.streams import column, dispersion, prompt_ids, reuse, same

from kaiseki.work import fits
from kaiseki.work.arrivals import Arrivals, Gamma, OnOff, Profile, diurnal, even_chunks, poisson
from kaiseki.work.batches import BATCH_ROWS, NONE, take
from kaiseki.work.catalogue import CATALOGUE, azure_conversation, chat_sessions, mooncake_conversation
from kaiseki.work.lengths import Lengths, LogNormal, Mixture, Quantiles
from kaiseki.work.prefixes import PrefixTree, SystemPrompts
from kaiseki.work.sessions import Delay, Sessions
from kaiseki.work.traces.opening import load

PROCESSES: list[Arrivals] = [
    poisson(7.0),
    Gamma(7.0, 2.5),
    Gamma(7.0, 0.2),
    Profile((10.0, 0.0, 2.0), 5.0),
    Profile((40_000.0,), 3.0),
    diurnal(5.0, 1.8, period_s=600.0),
    OnOff(30.0, 0.0, 2.0, 6.0),
    OnOff(30.0, 3.0, 2.0, 6.0),
]
CAPPED = st.integers(1, 10_000_000)


def times(process: Arrivals, seed: int, chunks: int = 4) -> np.ndarray:
    return np.concatenate(list(islice(process.times_ns(np.random.default_rng(seed)), chunks)))


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: type(process).__name__)
def test_arrivals_keep_their_rate_and_order(process: Arrivals) -> None:
    arrival_ns = times(process, seed=1)
    assert len(arrival_ns) == 4 * BATCH_ROWS and arrival_ns.dtype == np.int64
    assert (np.diff(arrival_ns) >= 0).all() and arrival_ns[0] >= 0
    assert len(arrival_ns) / arrival_ns[-1] * 1e9 == pytest.approx(process.mean_rps, rel=0.05)
    assert np.array_equal(arrival_ns, times(process, seed=1))
    assert not np.array_equal(arrival_ns, times(process, seed=2))


@pytest.mark.parametrize("cv", [0.2, 1.0, 2.5])
def test_gaps_vary_as_asked(cv: float) -> None:
    gaps = np.diff(times(Gamma(7.0, cv), seed=3))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


def test_the_day_has_its_peak_in_its_first_half() -> None:
    arrival_s = times(diurnal(5.0, 1.8, period_s=600.0), seed=1) * 1e-9
    of_day = arrival_s[arrival_s < arrival_s[-1] // 600 * 600] % 600
    quarters = np.histogram(of_day, 4, (0, 600))[0] / len(of_day)
    high, low = 0.25 + 0.8 / (2 * np.pi), 0.25 - 0.8 / (2 * np.pi)
    assert quarters == pytest.approx([high, high, low, low], abs=0.01)


def test_bursts_are_bursts() -> None:
    assert dispersion(times(OnOff(30.0, 3.0, 20.0, 60.0), seed=1), 10.0) > 20
    assert dispersion(times(poisson(10.0), seed=1), 10.0) == pytest.approx(1, abs=0.2)


@given(st.lists(st.integers(0, 40_000), max_size=12))
def test_chunks_are_even_and_lose_nothing(sizes: list[int]) -> None:
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]) if sizes else []
    chunks = list(even_chunks(iter(parts)))
    assert all(len(chunk) == BATCH_ROWS for chunk in chunks[:-1])
    assert np.array_equal(np.concatenate([*chunks, np.zeros(0, int)]), np.arange(sum(sizes)))


@given(CAPPED, CAPPED, st.floats(1, 1e6), st.floats(0.01, 3))
def test_lognormal_stays_inside_its_bounds(one: int, other: int, median: float, sigma: float) -> None:
    low, high = sorted((one, other))
    try:
        lengths = LogNormal(median, sigma, low, high)
    except ValueError as error:
        assert "inside its bounds" in str(error)
        return
    drawn = lengths.draw(np.random.default_rng(0), 200)
    assert drawn.dtype == np.int32 and drawn.min() >= low and drawn.max() <= high


@pytest.mark.parametrize(
    ("lengths", "mean"),
    [
        (LogNormal(1000, 0.5), 1000 * np.exp(0.125)),
        (Quantiles((0, 0.5, 1), (0, 100, 300)), 125),
        (Mixture(Quantiles((0, 1), (10, 10)), Quantiles((0, 1), (1010, 1010)), 0.08), 90),
    ],
)
def test_lengths_have_their_mean(lengths: Lengths, mean: float) -> None:
    assert lengths.draw(np.random.default_rng(1), 100_000).mean() == pytest.approx(mean, rel=0.02)


@pytest.mark.traces
def test_azure_like_lengths_and_arrivals(shared_traces: Path) -> None:
    """Means within 3 %, quartiles 5 %; variance of counts over windows from 1 s to 5 min within a third."""
    trace = list(load(shared_traces / "azure_conv_2023.csv"))
    made = list(take(azure_conversation().stream(7), 100_000))
    _compare_lengths(trace, made, "prompt_tokens")
    _compare_lengths(trace, made, "output_tokens")
    for window_s in (1, 10, 60, 300):
        asked = dispersion(column(trace, "arrival_ns"), window_s)
        assert dispersion(column(made, "arrival_ns"), window_s) == pytest.approx(asked, rel=1 / 3)
    rate = sum(map(len, made)) / made[-1].arrival_ns[-1] * 1e9
    assert rate == pytest.approx(19_366 / 3501.7, rel=0.02)


@pytest.mark.traces
def test_azure_lognormals_have_the_spread_of_the_trace(shared_traces: Path) -> None:
    """Mean and deviation of the logarithm within 5 %; the bounds cut some of it off."""
    trace = list(load(shared_traces / "azure_conv_2023.csv"))
    for name, made in (("prompt", fits.AZURE_PROMPT_LOGNORMAL), ("output", fits.AZURE_OUTPUT_LOGNORMAL)):
        asked = np.log(column(trace, f"{name}_tokens"))
        drawn = np.log(made.draw(np.random.default_rng(1), 100_000))
        assert (drawn.mean(), drawn.std()) == pytest.approx((asked.mean(), asked.std()), rel=0.05)


@pytest.mark.traces
def test_mooncake_like_lengths_arrivals_and_prefixes(shared_traces: Path) -> None:
    """Lengths as for Azure; counts per minute within 40 %; blocks found within 5 points, branches 2."""
    trace = list(load(shared_traces / "mooncake_conversation.jsonl"))
    made = list(take(mooncake_conversation().stream(7), 40_000))
    _compare_lengths(trace, made, "prompt_tokens")
    _compare_lengths(trace, made, "output_tokens")
    asked = dispersion(column(trace, "arrival_ns"), 60)
    assert dispersion(column(made, "arrival_ns"), 60) == pytest.approx(asked, rel=0.4)
    (found, branching), (made_found, made_branching) = reuse(trace), reuse(take(iter(made), 12_031))
    assert made_found == pytest.approx(found, abs=0.05)
    assert made_branching == pytest.approx(branching, abs=0.02)


@pytest.mark.traces
def test_chat_sessions_are_like_the_conversations_of_mooncake(shared_traces: Path) -> None:
    """Mean prompt within 15 %, blocks found within 8 points: their answers are found again, too."""
    trace = list(load(shared_traces / "mooncake_conversation.jsonl"))
    made = list(take(chat_sessions().stream(7), 40_000))
    mean = column(trace, "prompt_tokens").mean()
    assert column(made, "prompt_tokens").mean() == pytest.approx(mean, rel=0.15)
    assert reuse(take(iter(made), 12_031))[0] == pytest.approx(reuse(trace)[0], abs=0.08)


def _compare_lengths(trace: list, made: list, name: str) -> None:
    asked, drawn = column(trace, name), column(made, name)
    assert drawn.mean() == pytest.approx(asked.mean(), rel=0.03)
    at = (0.25, 0.5, 0.75, 0.9)
    assert np.quantile(drawn, at) == pytest.approx(np.quantile(asked, at), rel=0.05)


@pytest.mark.parametrize("name", CATALOGUE)
def test_named_workloads(name: str) -> None:
    one = list(take(CATALOGUE[name]().stream(5), 20_000))
    assert [batch.first for batch in one] == [0, BATCH_ROWS]
    assert all(map(same, one, take(CATALOGUE[name]().stream(5), 20_000)))
    assert not same(one[0], next(CATALOGUE[name]().stream(6)))
    arrival_ns = column(one, "arrival_ns")
    assert (np.diff(arrival_ns) >= 0).all()
    assert column(one, "prompt_tokens").min() >= 1 and column(one, "output_tokens").min() >= 1
    fast = list(take(CATALOGUE[name](50.0).stream(5), 60_000))
    assert 60_000 / fast[-1].arrival_ns[-1] * 1e9 == pytest.approx(50.0, rel=0.15)


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_stream_of_a_million_takes_the_memory_of_a_batch(name: str) -> None:
    """Under 100 MB beyond the start; requests with block ids, slow when traced, are tried with fewer."""
    requests = 1_000_000 if name == "azure-conversation" else 50_000
    stream = CATALOGUE[name]().stream(1)
    next(stream)
    tracemalloc.start()
    try:
        assert sum(map(len, take(stream, requests))) == requests
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100e6


def test_requests_branch_off_earlier_ones_and_own_their_last_block() -> None:
    tree = PrefixTree(SystemPrompts(3, 2), 0.5, Quantiles((0, 1), (1, 50)), Quantiles((0, 1), (0.2, 0.9)))
    made = next(replace(azure_conversation(), prefixes=tree).stream(2)).head(2000)
    place: dict[int, tuple[int, int]] = {}
    for row in range(len(made)):
        ids = prompt_ids(made, row)
        assert (
            len(ids)
            == made.blocks.offsets[row + 1] - made.blocks.offsets[row]
            == -(-made.prompt_tokens[row] // 512)
        )
        before = [-1, *ids]
        for depth, one in enumerate(ids):
            assert place.setdefault(one, (depth, before[depth])) == (depth, before[depth])
        if made.prompt_tokens[row] > 1:
            assert ids[-1] >= tree.system.ids
    popular = np.bincount([made.blocks.row(i)[0] // 2 for i in range(len(made)) if made.blocks.row(i)[0] < 6])
    assert popular[0] > popular[1] > popular[2]


def test_sessions_grow_and_wait_for_each_other() -> None:
    lengths = Quantiles((0, 1), (10, 2000))
    system = SystemPrompts(4, 3)
    chat = Sessions(
        poisson(3.0), 4.0, lengths, lengths, lengths, Delay(5.0, 1.0, 60.0), system, max_context=9000
    )
    made = next(chat.stream(9))
    prompt, output, follow = made.prompt_tokens, made.output_tokens, made.follow
    assert (prompt + output).max() <= 9000
    followers = np.zeros(len(made), int)
    for row, parent in enumerate(follow.parent.tolist()):
        ids = made.blocks.row(row)
        assert len(ids) == -(-(prompt[row] + output[row]) // 512)
        assert (ids[:3] < 12).all() and (ids[3:] >= 12).all()
        if parent == NONE:
            assert follow.delay_ns[row] == 0
            continue
        followers[parent] += 1
        assert follow.session[row] == follow.session[parent]
        assert prompt[row] > prompt[parent] + output[parent]
        assert made.arrival_ns[row] == made.arrival_ns[parent] + follow.delay_ns[row]
        assert 0 < follow.delay_ns[row] <= 60e9
        old = made.blocks.row(parent)
        assert np.array_equal(ids[: len(old)], old)
    assert (followers <= follow.followers).all()
    assert (follow.followers - followers).sum() < 100  # those whose next turn is in a later batch
    own = [set(made.blocks.row(row)[3:].tolist()) for row in np.flatnonzero(follow.parent == NONE)]
    assert len(set().union(*own)) == sum(map(len, own))


def test_a_session_begins_even_where_its_first_request_does_not_fit() -> None:
    long = Quantiles((0, 1), (100_000, 100_000))
    chat = Sessions(poisson(1.0), 3.0, long, long, long, Delay(5.0, 1.0, 60.0), max_context=1000)
    made = next(chat.stream(0))
    assert set((made.prompt_tokens + made.output_tokens).tolist()) == {1000}
    assert (made.follow.followers == 0).all()


TABLE = Quantiles((0, 1), (1, 2))
SOME = Delay(1, 1, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gamma(0),
        lambda: Gamma(1, float("nan")),
        lambda: Profile((), 1),
        lambda: Profile((0.0,), 1),
        lambda: Profile((1.0, -1.0), 1),
        lambda: Profile((1.0,), 0),
        lambda: diurnal(1, 2.1),
        lambda: diurnal(-1),
        lambda: OnOff(0, 0, 1, 1),
        lambda: OnOff(1, -1, 1, 1),
        lambda: LogNormal(0, 1),
        lambda: LogNormal(10, 1, 0, 5),
        lambda: LogNormal(10, 1, 6, 5),
        lambda: LogNormal(10, 0.1, 1000, 2000),
        lambda: Quantiles((0, 1), (2, 1)),
        lambda: Quantiles((0, 0.5), (1, 2)),
        lambda: Quantiles((0, 1), (1, float("inf"))),
        lambda: Quantiles((0, 1), (1,)),
        lambda: Mixture(TABLE, TABLE, 1.1),
        lambda: SystemPrompts(0),
        lambda: SystemPrompts(1, -1),
        lambda: PrefixTree(SystemPrompts(), 1.5, TABLE, Quantiles((0, 1), (0, 1))),
        lambda: PrefixTree(SystemPrompts(), 0.5, TABLE, TABLE),
        lambda: PrefixTree(SystemPrompts(), 0.5, TABLE, Quantiles((0, 1), (0, 1)), 0),
        lambda: Delay(1, 0, 1),
        lambda: Sessions(poisson(1), 0.5, TABLE, TABLE, TABLE, SOME),
        lambda: Sessions(poisson(1), 2, TABLE, TABLE, TABLE, SOME, max_context=513),
        lambda: Sessions(poisson(1), 2, TABLE, TABLE, TABLE, SOME, block_tokens=0),
    ],
)
def test_settings_out_of_range(make) -> None:
    with pytest.raises(ValueError):
        make()
