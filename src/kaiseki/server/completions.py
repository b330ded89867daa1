"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from kaiseki.server.bodies import CompletionRequest
from kaiseki.server.envelope import request_id
from kaiseki.server.generation import Generation, Piece
from kaiseki.server.service import Encode, Service
from kaiseki.server.slo import SLO_HEADER
from kaiseki.server.sse import EventStream, event
from kaiseki.server.timing import Stamps


async def completions(http: HttpRequest, service: Service) -> Response:
    """Continue one or more texts, whole or as a stream."""
    body, asked = await service.read(http, CompletionRequest)
    prompts = body.prompts()
    size = sum(len(p.encode()) if isinstance(p, str) else 4 * len(p) for p in prompts)
    generation = await service.generate(
        http,
        body,
        asked,
        [_encoder(service, prompt) for prompt in prompts],
        size,
        body.wanted_tokens,
        body.wanted_logprobs,
    )
    head = {
        "id": f"cmpl-{request_id(http)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.model.name,
    }
    headers = {SLO_HEADER: asked.slo}
    if body.stream:
        stamps = Stamps(http.headers, asked.arrival_ns)
        events = _events(generation, head, body, stamps)
        return EventStream(events, lambda: service.close_generation(generation), headers)
    try:
        whole = await generation.complete()
    finally:
        service.close_generation(generation)
    choices = [_choice(piece, body, 0) for piece in whole.values()]
    return JSONResponse(head | {"choices": choices, "usage": generation.usage()}, headers=headers)


def _encoder(service: Service, prompt: str | list[int]) -> Encode:
    if isinstance(prompt, str):
        return lambda: service.model.encode(prompt)
    return lambda: prompt


async def _events(
    generation: Generation, head: dict[str, Any], body: CompletionRequest, stamps: Stamps
) -> AsyncGenerator[bytes, None]:
    if body.include_usage:
        head["usage"] = None
    offsets = [0] * len(generation.jobs)
    async for pieces in generation.pieces():
        data = b""
        for piece in pieces:
            stamp = stamps.of(piece)
            if piece.text or piece.finish or stamp or (body.logprobs is not None and piece.tokens):
                choice = _choice(piece, body, offsets[piece.index])
                data += event(head | {"choices": [choice]} | stamp)
                offsets[piece.index] += len(piece.text)
        if data:
            yield data
    if body.include_usage:
        yield event(head | {"choices": [], "usage": generation.usage()})


def _choice(piece: Piece, body: CompletionRequest, offset: int) -> dict[str, Any]:
    return {
        "index": piece.index,
        "text": piece.text,
        "logprobs": None if body.logprobs is None else _logprobs(piece, offset),
        "finish_reason": piece.finish,
    }


def _logprobs(piece: Piece, offset: int) -> dict[str, Any]:
    """Parallel lists; `text_offset` counts characters of the output so far."""
    offsets = []
    for token in piece.tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.chosen.text if token.chosen else token.text for token in piece.tokens],
        "token_logprobs": [max(t.chosen.logprob, -9999.0) if t.chosen else None for t in piece.tokens],
        "top_logprobs": [{top.text: max(top.logprob, -9999.0) for top in t.top} for t in piece.tokens],
        "text_offset": offsets,
    }
