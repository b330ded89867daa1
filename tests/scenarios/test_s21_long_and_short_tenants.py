"""s21: two tenants of equal weight at the same request rate, one with prompts of 32 K tokens, one with 200.

Guards theorem 1 of docs/fairness.md, and that a key stays one tenant however many client ids it sends.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.harness import START_NS, Bench, S, job

from kaiseki.config import key_digest, parse
from kaiseki.core.settings import SchedulerSettings
from kaiseki.core.table import State
from kaiseki.policies.registry import load
from kaiseki.server.identity import Directory

# 5 ms a slot, 0.05 ms a prefill token: a long prompt takes 1.6 s and 200 tokens 10 ms.
CARD = np.array([5e6, 0.1e6, 0.0, 0.05e6, 0.0, 0.0, 0.0])
LONG, SHORT, PER_SECOND = 32_000, 200, 80
FROM_NS, UNTIL_NS = START_NS + 2 * S, START_NS + 8 * S
"""In between both have more to do than they get."""
SETTINGS = f"""
tenants:
  long: {{api_key_sha256: [{key_digest("long-key")}]}}
  short: {{api_key_sha256: [{key_digest("short-key")}]}}
  gateway: {{api_key_sha256: [{key_digest("gateway-key")}], trusted: true}}
"""
DIRECTORY = Directory(parse(SETTINGS), "0.0.0.0")


def as_key(key: str, ids: int) -> Callable[[int], str]:
    """Whom the nth request of a client is charged to that spreads its requests over so many ids."""
    headers = {"authorization": f"Bearer {key}"}
    return lambda n: DIRECTORY.caller({**headers, "x-llm-d-inference-fairness-id": f"id{n % ids}"}).charged


def service_ns(bench: Bench, prefix: str) -> float:
    """Card time that the requests whose names begin so have had."""
    stories = [bench.driver.history.story(name) for name in bench.served if name.startswith(prefix)]
    done = sum(s.ending.service_ns for s in stories if s is not None and s.ending is not None)
    table, life = bench.scheduler.table, bench.scheduler.life
    rows = [row for row, name in life.names.items() if name.startswith(prefix)]
    assert (table.state[rows] != State.FREE).all()
    return float(done + table.service_ns[rows].sum())


def services_ns(
    policy: str, depth: int, long: Callable[[int], str], short: Callable[[int], str]
) -> tuple[float, float, Bench]:
    """What the long and the short prompts had in the time in which all want more, and the bench."""
    settings = SchedulerSettings(fairness_window=10, max_slot_tokens=1024)
    bench = Bench(load(policy), depth, blocks=8_192, block_tokens=64, weights=CARD, settings=settings)
    count = PER_SECOND * int((UNTIL_NS - START_NS) / S)
    jobs = [
        job(f"{kind}{n}", tokens, 1, START_NS + n * S // PER_SECOND, tenant=of(n))
        for kind, tokens, of in (("long", LONG, long), ("short", SHORT, short))
        for n in range(count)
    ]
    bench.run([j for j in jobs if j.request.arrival_ns < FROM_NS], until_ns=FROM_NS)
    before = service_ns(bench, "long"), service_ns(bench, "short")
    bench.run([j for j in jobs if j.request.arrival_ns >= FROM_NS], until_ns=UNTIL_NS)
    return service_ns(bench, "long") - before[0], service_ns(bench, "short") - before[1], bench


def apart_ns(bench: Bench, depth: int) -> float:
    """2 (H + G + epsilon + R): no grant and no correction is more than what the longest slots take."""
    slot = max(r.ended_ns - r.started_ns for r in bench.engine.results)
    return 2 * (bench.scheduler.fairness.hard_lag_ns + (depth + 2) * slot)


@pytest.mark.parametrize(("splits", "ids"), [("long", 1), ("long", 20), ("short", 20)])
@pytest.mark.parametrize("depth", [0, 1])
def test_they_get_equal_card_time_and_splitting_gains_nothing(depth: int, splits: str, ids: int) -> None:
    many = {"long": 1, "short": 1, splits: ids}
    long, short, bench = services_ns(
        "kaiseki", depth, as_key("long-key", many["long"]), as_key("short-key", many["short"])
    )
    bound = apart_ns(bench, depth)
    assert bound < 0.5 * (UNTIL_NS - FROM_NS), "the bound must say something"
    assert abs(long - short) <= bound
    assert long + short > 0.95 * (UNTIL_NS - FROM_NS), "the card idled"


def test_twenty_ids_that_are_believed_would_gain() -> None:
    """A gateway's ids are tenants of their own, so what the test above holds together is the key."""
    long, short, _ = services_ns("kaiseki", 0, as_key("gateway-key", 20), as_key("short-key", 1))
    assert long > 5 * short


def test_a_bare_queue_gives_nearly_all_to_the_long_prompts() -> None:
    long, short, _ = services_ns("fcfs", 0, as_key("long-key", 1), as_key("short-key", 1))
    assert long > 20 * short
