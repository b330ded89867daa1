"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from kaiseki.engines.embedded.work import TokenLogprob, TokenOutput
from kaiseki.server.bodies import ChatRequest
from kaiseki.server.envelope import request_id
from kaiseki.server.errors import invalid
from kaiseki.server.generation import Generation, Piece
from kaiseki.server.service import Service
from kaiseki.server.slo import SLO_HEADER
from kaiseki.server.sse import EventStream, event
from kaiseki.server.timing import Stamps


async def chat_completions(http: HttpRequest, service: Service) -> Response:
    """Answer a conversation, whole or as a stream."""
    body, asked = await service.read(http, ChatRequest)
    messages = body.plain_messages()

    def encode() -> list[int]:
        try:
            return service.model.render_chat(messages)
        except ValueError as error:
            raise invalid("messages", str(error)) from None

    size = sum(len(message["content"].encode()) for message in messages)
    generation = await service.generate(
        http, body, asked, [encode], size, body.wanted_tokens, body.wanted_logprobs
    )
    head = {"id": f"chatcmpl-{request_id(http)}", "created": int(time.time()), "model": service.model.name}
    headers = {SLO_HEADER: asked.slo}
    if body.stream:
        stamps = Stamps(http.headers, asked.arrival_ns)
        events = _events(generation, head | {"object": "chat.completion.chunk"}, body, stamps)
        return EventStream(events, lambda: service.close_generation(generation), headers)
    try:
        whole = await generation.complete()
    finally:
        service.close_generation(generation)
    choices = [_choice(piece, body) for piece in whole.values()]
    document = head | {"object": "chat.completion", "choices": choices, "usage": generation.usage()}
    return JSONResponse(document, headers=headers)


async def _events(
    generation: Generation, head: dict[str, Any], body: ChatRequest, stamps: Stamps
) -> AsyncGenerator[bytes, None]:
    if body.include_usage:
        head["usage"] = None
    for index in range(len(generation.jobs)):
        yield event(head | {"choices": [_delta(index, {"role": "assistant", "content": ""}, None, None)]})
    async for pieces in generation.pieces():
        data = b""
        for piece in pieces:
            stamp = stamps.of(piece)
            if piece.text or piece.finish or stamp or (body.logprobs and piece.tokens):
                delta = {"content": piece.text} if piece.text else {}
                choice = _delta(piece.index, delta, piece.finish, _logprobs(piece, body))
                data += event(head | {"choices": [choice]} | stamp)
        if data:
            yield data
    if body.include_usage:
        yield event(head | {"choices": [], "usage": generation.usage()})


def _delta(index: int, delta: dict[str, Any], finish: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _choice(piece: Piece, body: ChatRequest) -> dict[str, Any]:
    return {
        "index": piece.index,
        "message": {"role": "assistant", "content": piece.text, "refusal": None},
        "logprobs": _logprobs(piece, body),
        "finish_reason": piece.finish,
    }


def _logprobs(piece: Piece, body: ChatRequest) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    return {"content": [_token(token) for token in piece.tokens], "refusal": None}


def _token(token: TokenOutput) -> dict[str, Any]:
    chosen = token.chosen or TokenLogprob(token.token_id, token.text, float("-inf"))
    return _candidate(chosen) | {"top_logprobs": [_candidate(top) for top in token.top]}


def _candidate(candidate: TokenLogprob) -> dict[str, Any]:
    return {
        "token": candidate.text,
        "logprob": max(candidate.logprob, -9999.0),  # JSON has no infinity; OpenAI writes this number
        "bytes": list(candidate.text.encode()),
    }
