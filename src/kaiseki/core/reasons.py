"""Closed vocabularies: why something happened, and how a request ended.

Every enum member carries one sentence for people (`.sentence`) and one label for metrics and
JSON (`.label`). Recorders and explainers store the integer.
"""

from __future__ import annotations

from enum import IntEnum


class _Worded(IntEnum):
    """An integer enum whose members also carry a sentence for people."""

    sentence: str

    def __new__(cls, value: int, sentence: str = "") -> _Worded:
        member = int.__new__(cls, value)
        member._value_ = value
        member.sentence = sentence
        return member

    @property
    def label(self) -> str:
        """Lower-case name, used as a metric label and in JSON."""
        return self.name.lower()


class Outcome(_Worded):
    """How a request ended. Exactly one per request; `demoted` is a flag beside it."""

    OPEN = 0, "still in progress"
    COMPLETED = 1, "finished with all its output"
    REFUSED = 2, "refused before any work was spent on it"
    EXPIRED = 3, "dropped because it could no longer meet its deadline"
    FAILED = 4, "ended by an error in the engine"
    CANCELLED = 5, "cancelled by its client"


class Finish(_Worded):
    """What an engine says about the last token of a request in a step."""

    NONE = 0, "more tokens to come"
    STOP = 1, "a stop token or stop string was produced"
    LENGTH = 2, "max_tokens was reached"


class Event(_Worded):
    """What happened to a request, as kept by the flight recorder."""

    SUBMITTED = 0, "entered the waiting queue"
    REFUSED = 1, "was refused"
    ADMITTED = 2, "was given its first chunk since it last waited"
    PASSED_OVER = 3, "was looked at and not taken"
    PREEMPTED = 4, "lost its KV blocks and went back to the queue"
    PAUSED = 5, "was running and got nothing in this slot"
    FIRST_TOKEN = 6, "produced its first token"
    DEMOTED = 7, "became best effort because its SLO could no longer be met"
    EXPIRED = 8, "was dropped as it could no longer meet its deadline"
    FINISHED = 9, "finished"
    FAILED = 10, "failed"
    CANCELLED = 11, "was cancelled"
    REKEYED = 12, "got a new place in the queue"
    RETRIED = 13, "went back to the queue after an engine error"
    RESUMED = 14, "was running without progress and got a chunk again"


class Reason(_Worded):
    """Why a request was taken, passed over, paused, preempted or refused."""

    NONE = 0, "no reason recorded"
    SELECTED = 1, "its key was among the best and everything it needs was free"
    NO_ROW = 2, "the batch already holds max_batch_size requests"
    NO_KV = 3, "not enough free KV blocks"
    WATERMARK = 4, "live KV blocks would exceed watermark_ratio of the pool"
    NO_TIME = 5, "the slot's time bound was already filled by more urgent work"
    NO_TOKENS = 6, "the slot's token budget was already filled"
    FAIR_SHARE = 7, "its tenant is further ahead of its share than the fairness lag allows"
    BEHIND = 8, "others with a better key were ahead of it"
    BATCH_CLOSED = 9, "the policy admits a new batch only when the last one has ended"
    DECODE_BOUND = 10, "running decodes alone exceed the tightest TBT, so the least urgent pause"
    HELD_FOR_FORK = 11, "waits for its sibling to compute the prompt they share"
    IN_FLIGHT = 12, "its last chunk is still in flight and the engine takes disjoint rows"
    FORCED_BY_GROWTH = 13, "a running request needed its next KV block and this one cost least to stop"
    PURCHASED = 14, "a more urgent request was worth more than what stopping this one costs"
    DECIDE_TIMEOUT = 15, "the decision reached its work limit before looking at it"
    NEVER_FITS = 16, "prompt and output together exceed the whole KV pool"
    TOO_LONG = 17, "prompt and output together exceed the model's context length"
    QUEUE_FULL = 18, "the waiting queue is full"
    DRAINING = 19, "the server is shutting down and takes no new work"
    HOPELESS = 20, "one of its targets could no longer be met, even alone on an idle card"
    LATE_GAPS = 21, "more gaps between its tokens were late than its SLO allows"
    ENGINE_ERROR = 22, "the engine raised an error on its chunk"
    CLIENT_GONE = 23, "its client disconnected or cancelled"
    STALE = 24, "its result was dropped because the request was preempted or ended meanwhile"
    QUEUE_EMPTY = 25, "nothing was waiting"
    ADAPTER = 26, "its LoRA adapter is not loaded, and running requests need those that are"
    CHAMPION_RESERVE = 27, "kept free so that the oldest running request can always finish"
    SLOT_RUNNING = 28, "a slot was already being executed, and the next decision comes after it"
    LANE_SHARE = 29, "its tenant's requests of this size are further ahead than the fairness lag allows"
    OVER_STEP = 30, "the policy computes a text in one piece, and this one may exceed what a step can take"
    BACK_OFF = 31, "the engine failed on it, and the next try comes after a pause"
    ENGINE_FAILING = 32, "the engine fails on every request, and no more are taken until a probe works"
    KV_COMING = 33, "its KV is on the way from the replica that computed its prompt"
    NO_ADAPTERS = 34, "the engine loads no adapters, and only the base model can be asked for"
