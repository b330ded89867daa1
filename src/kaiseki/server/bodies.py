"""The request bodies of the OpenAI API, as far as they are supported.

Unknown fields are tolerated. Fields that would change the answer and can't be honoured are refused by
name (`UNSUPPORTED`), unless they hold a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kaiseki.engines.embedded.work import SamplingParams
from kaiseki.server.errors import invalid, unsupported

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "audio": (),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "web_search_options": (),
    "suffix": ("",),
    "echo": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
}
"""Fields that are refused, each with the values beside null that are harmless."""

SYSTEM_ROLES = {"developer": "system"}
ROLES = ("system", "developer", "user", "assistant")


def _as_list(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


Strings = Annotated[list[str], Field(max_length=16), BeforeValidator(_as_list)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    """Nothing is converted: a number in quotes is an error, as with OpenAI."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream carries beside the tokens."""

    include_usage: bool | None = None


class AgentHints(Body):
    """Hints of NVIDIA Dynamo's clients."""

    priority: int | None = None


class NvExt(Body):
    """NVIDIA's extension object."""

    agent_hints: AgentHints | None = None


class Generate(Body):
    """What chat and text completions have in common."""

    model: str
    n: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Strings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    nvext: NvExt | None = None

    def check(self) -> None:
        """What spans fields, and what can't be done.

        Raises:
            ApiError: names the field.
        """
        for name, value in (self.model_extra or {}).items():
            harmless = UNSUPPORTED.get(name)
            if harmless is not None and value is not None and value not in harmless:
                raise unsupported(name, f"{name} = {value!r:.60}")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "only allowed when 'stream' is true")
        if any(not text for text in self.stop or ()):
            raise invalid("stop", "a stop string must not be empty", self.stop)

    @property
    def choices(self) -> int:
        """Outputs per prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def agent_priority(self) -> int | None:
        """`nvext.agent_hints.priority`."""
        hints = self.nvext.agent_hints if self.nvext else None
        return hints.priority if hints else None

    def certain_tokens(self, max_tokens: int) -> int:
        """Output tokens that will be produced whatever the model says."""
        if self.ignore_eos and not self.stop and not self.stop_token_ids:
            return max_tokens
        return max(1, self.min_tokens or 0)

    def sampling(self, max_tokens: int, logprobs: int | None, index: int) -> SamplingParams:
        """Sampling of one choice; choices with a seed get different but repeatable ones."""
        if (self.min_tokens or 0) > max_tokens:
            raise invalid("min_tokens", f"must not exceed max_tokens ({max_tokens})", self.min_tokens)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            seed=None if self.seed is None else (self.seed + index) % 2**63,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens is not False,
        )


TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART}]}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
TEXT = {"type": "string", "minLength": 1}
PROMPT = {"anyOf": [TEXT, IDS, {"type": "array", "items": {"anyOf": [TEXT, IDS]}, "minItems": 1}]}
"""For the API's own description; the code looks at the values itself, to say more of what is wrong."""


class ChatMessage(Body):
    """One message; only text content can be answered."""

    role: Annotated[str, Field(json_schema_extra={"enum": list(ROLES)})]
    content: Annotated[Any, Field(json_schema_extra=CONTENT)] = None


class ChatRequest(Generate):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "only allowed when 'logprobs' is true", self.top_logprobs)

    @property
    def wanted_tokens(self) -> int | None:
        """Most output tokens, when the client said so."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives per token, None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def plain_messages(self) -> list[dict[str, str]]:
        """Role and text of each message, as chat templates take them."""
        return [_plain(message, f"messages[{i}]") for i, message in enumerate(self.messages)]


class CompletionRequest(Generate):
    """POST /v1/completions."""

    prompt: Annotated[Any, Field(json_schema_extra=PROMPT)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, 1, self.choices):
            raise unsupported("best_of", "best_of above n")

    @property
    def wanted_tokens(self) -> int:
        """Most output tokens; 16 when the client did not say, as with OpenAI."""
        return self.max_tokens or 16

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives per token, None for no log-probabilities."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if _is_ids(prompt):
            return [prompt]
        if isinstance(prompt, list) and prompt and all(isinstance(p, str) or _is_ids(p) for p in prompt):
            return prompt
        raise invalid(
            "prompt", "must be a string, a list of strings, or one or more lists of token ids", prompt
        )


def _plain(message: ChatMessage, where: str) -> dict[str, str]:
    if message.role not in ROLES:
        raise invalid(f"{where}.role", f"allowed: {', '.join(ROLES)}", message.role)
    for name in ("tool_calls", "function_call"):
        if (message.model_extra or {}).get(name):
            raise unsupported(f"{where}.{name}", "Calling tools")
    text = "\n".join(_texts(message.content, f"{where}.content"))
    return {"role": SYSTEM_ROLES.get(message.role, message.role), "content": text}


def _texts(content: Any, where: str) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    if not isinstance(content, list):
        raise invalid(where, "must be a string or a list of text parts", content)
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise unsupported(f"{where}[{i}]", f"Content of type {kind!r:.40}")
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise invalid(f"{where}[{i}]", 'must be {"type": "text", "text": ...}', part)
        yield text


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int for v in value)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
