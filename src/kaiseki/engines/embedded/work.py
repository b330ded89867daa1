"""What a request asks of the embedded engine, and what each of its tokens brings back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LEAST_TEMPERATURE = 1e-5
"""Divided by less, logits could leave the range of float32, and one token has all the weight anyway."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are chosen and when the output ends.

    Attributes:
        max_tokens: most output tokens, >= 1.
        min_tokens: end-of-sequence, stop tokens and stop strings can't end the output before this many.
        temperature: below `LEAST_TEMPERATURE` takes the most likely token; sampling otherwise.
        top_p: smallest set of most likely tokens whose probability reaches this, in (0, 1].
        top_k: number of most likely tokens to sample from; 0 or less for all.
        min_p: least probability, relative to the most likely token's, in [0, 1].
        repetition_penalty: divides (multiplies, when negative) logits of tokens in prompt or output; > 0.
        presence_penalty: subtracted once from logits of tokens that are in the output.
        frequency_penalty: subtracted from a logit for each time its token is in the output.
        seed: same seed, prompt and settings give the same output whatever runs beside it; None is random.
        stop: strings that end the output; they are not part of it.
        stop_token_ids: token ids that end the output.
        ignore_eos: go on after end-of-sequence tokens.
        logprobs: number of most likely alternatives to report with each token (0 for the token alone);
            None for no log-probabilities.
        skip_special_tokens: leave special tokens out of the text.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Refuse settings that have no meaning."""
        _check(self.max_tokens >= 1, "max_tokens must be at least 1")
        _check(0 <= self.min_tokens <= self.max_tokens, "min_tokens must be between 0 and max_tokens")
        _check(self.temperature >= 0, "temperature must not be negative")
        _check(0 < self.top_p <= 1, "top_p must be above 0 and at most 1")
        _check(0 <= self.min_p <= 1, "min_p must be between 0 and 1")
        _check(self.repetition_penalty > 0, "repetition_penalty must be above 0")
        _check(self.logprobs is None or self.logprobs >= 0, "logprobs must not be negative")
        _check(all(self.stop), "a stop string must not be empty")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < LEAST_TEMPERATURE

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class GenerationWork:
    """One generation: token ids of the prompt, at least one, and how to go on from there."""

    prompt_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A candidate for an output position and its natural log-probability under the model alone."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """What a client gets with one output token.

    Attributes:
        token_id: the token.
        text: what it adds to the text. Empty while a character is incomplete or a stop string may have
            begun, so the texts of a finished output joined together are the whole text.
        chosen: its log-probability, if asked for.
        top: the most likely candidates, best first, if asked for.
    """

    token_id: int
    text: str
    chosen: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


def _check(ok: bool, message: str) -> None:
    """Raise ValueError with `message` unless ok."""
    if not ok:
        raise ValueError(message)
