"""What is refused at submit, and the figures it comes with."""

from __future__ import annotations

import pytest
from tests.harness import LARGE, MS, START_NS, Bench, job

from kaiseki.core.protocols import Capabilities
from kaiseki.core.reasons import Outcome, Reason
from kaiseki.core.requests import OnLate, ServiceClass
from kaiseki.core.settings import SchedulerSettings


def test_what_never_fits_is_refused_with_both_numbers() -> None:
    """s08: prompt + max_tokens fits the model and not the KV pool."""
    bench = Bench(blocks=69, capabilities=Capabilities(max_context_tokens=4096))
    fits = bench.submit(job("fits", 1000, 104))
    over = bench.submit(job("over", 1000, 105))
    bench.run()
    assert over.outcome == Outcome.REFUSED and over.end.reason == Reason.NEVER_FITS
    assert over.end.numbers == {"tokens": 1105, "pool_tokens": 1104, "need_blocks": 70, "pool_blocks": 69}
    assert over.end.retry_after_s is None
    assert fits.outcome == Outcome.COMPLETED
    bench.check_end()


def test_longer_than_the_model_is_refused_whatever_the_pool() -> None:
    bench = Bench(capabilities=Capabilities(max_context_tokens=100))
    over = bench.submit(job("over", 90, 11))
    bench.submit(job("fits", 90, 10))
    bench.run()
    assert over.end.reason == Reason.TOO_LONG
    assert over.end.numbers == {"tokens": 101, "max_context_tokens": 100}
    bench.check_end()


@pytest.mark.parametrize("limits", [{"max_waiting": 3}, {"max_waiting_tokens": 350}])
def test_a_full_queue_refuses_with_a_time_to_try_again(limits: dict[str, int]) -> None:
    bench = Bench(settings=SchedulerSettings(max_batch_size=1, **limits), weights=LARGE)
    served = [bench.submit(job(f"r{i}", 100, 2)) for i in range(5)]
    bench.run()
    assert [s.outcome for s in served] == [Outcome.COMPLETED] * 3 + [Outcome.REFUSED] * 2
    end = served[4].end
    assert end.reason == Reason.QUEUE_FULL and end.numbers == {"waiting": 3, "waiting_tokens": 300}
    assert end.retry_after_s is not None and end.retry_after_s >= 1.0
    bench.check_end()


def test_what_even_an_idle_card_cannot_do_in_time_is_refused_only_if_it_would_be_dropped() -> None:
    hopeless = ServiceClass("hopeless", ttft_ns=100 * MS, on_late=OnLate.EXPIRE)
    demoted = ServiceClass("demoted", ttft_ns=100 * MS, on_late=OnLate.DEMOTE)
    dated = ServiceClass("dated", deadline_ns=300 * MS, on_late=OnLate.EXPIRE)
    bench = Bench(weights=LARGE)
    refused = bench.submit(job("a", 1000, 2, cls=hopeless))
    kept = bench.submit(job("b", 1000, 2, cls=demoted))
    late_last = bench.submit(job("c", 100, 20, cls=dated))
    cached = bench.submit(job("d", 1000, 2, cls=hopeless, block_hashes=(b"x" * 32,)))
    bench.run()
    assert refused.end.reason == Reason.HOPELESS
    assert refused.end.numbers["least_ms"] == pytest.approx(26 + 115)
    assert refused.end.numbers["target_ms"] == 100
    assert kept.outcome == Outcome.COMPLETED and kept.end.demoted
    assert late_last.end.outcome == Outcome.REFUSED
    assert cached.outcome == Outcome.EXPIRED, "it might have been cached, so it was let in"
    bench.check_end()


def test_lengths_and_ids_are_checked() -> None:
    scheduler = Bench().scheduler
    good = job("a", 1, 1).request
    scheduler.submit(good, START_NS)
    with pytest.raises(ValueError, match="already open"):
        scheduler.submit(good, START_NS)
    for prompt, outputs in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be >= 1"):
            scheduler.submit(job("b", prompt, outputs).request, START_NS)
    assert scheduler.cancel("nobody", START_NS) is False
