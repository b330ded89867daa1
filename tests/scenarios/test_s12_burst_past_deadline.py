"""s12: 1,294 requests arrive in a burst; 1,126 pass their deadline while queued."""

from __future__ import annotations

from tests.harness import LARGE, START_NS, Bench, job

from kaiseki.core.reasons import Finish, Outcome, Reason
from kaiseki.core.requests import OnLate, ServiceClass
from kaiseki.core.settings import SchedulerSettings

ARRIVE, IN_TIME = 1_294, 168
PROMPT, OUTPUT = 400, 8


def test_the_expired_are_answered_before_any_prefill_is_spent_on_them() -> None:
    prompt_ns = LARGE[3] * PROMPT
    ttft_ns = int(IN_TIME * prompt_ns * 1.1)  # time for about 168 prompts
    hurried = ServiceClass("hurried", ttft_ns=ttft_ns, on_late=OnLate.EXPIRE)
    settings = SchedulerSettings(max_batch_size=256, max_slot_tokens=5 * PROMPT)  # whole prompts per slot
    bench = Bench("kaiseki", weights=LARGE, blocks=20_000, settings=settings)
    bench.run([job(f"r{i}", PROMPT, OUTPUT, cls=hurried) for i in range(ARRIVE)])
    bench.check_end()
    everyone = list(bench.served.values())
    expired = [s for s in everyone if s.outcome == Outcome.EXPIRED]
    completed = [s for s in everyone if s.outcome == Outcome.COMPLETED]
    assert len(expired) + len(completed) == ARRIVE
    assert abs(len(completed) - IN_TIME) < 20
    for served in completed:
        assert len(served.tokens) == OUTPUT
    for served in expired:
        assert not served.tokens and served.end.finish == Finish.NONE, "a token marked `length` is no answer"
        assert served.end.reason == Reason.HOPELESS and served.end.retry_after_s is not None
        story = bench.driver.history.story(served.job.request.id)
        assert story is not None and story.ending is not None
        assert story.ending.admitted_ns == -1, "prefill was spent on a request that had to expire"
        assert story.ending.service_ns == 0.0
        assert served.end.time_ns <= START_NS + ttft_ns, "told only after its time was up"
