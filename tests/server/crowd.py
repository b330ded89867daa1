"""Many clients at once, of which half leave in all the ways that clients leave."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from dataclasses import dataclass, field

import httpx

LEAVES = ("in its head", "in its body", "at once", "at the first byte", "in mid-stream", "by a reset")


@dataclass
class Crowd:
    """What became of the clients: statuses of those who stayed, and how many left in which way."""

    statuses: Counter[int] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    whole: int = 0


async def visit(url: str, clients: int, seed: int, model: str = "tiny") -> Crowd:
    """Let all clients connect, then act; every other one leaves before its answer is complete."""
    crowd, rng = Crowd(), random.Random(seed)
    at = httpx.URL(url)
    together = asyncio.Barrier(clients)

    async def one(i: int) -> None:
        body = {
            "model": model,
            "prompt": "w" * rng.randint(1, 200),
            "max_tokens": rng.randint(2, 40),
            "n": rng.choice((1, 1, 1, 2)),
            "stream": bool(rng.random() < 0.7),
            "ignore_eos": True,
        }
        way = LEAVES[i // 2 % len(LEAVES)] if i % 2 else None
        reader, writer = await asyncio.open_connection(at.host, at.port)
        await together.wait()
        try:
            await _act(reader, writer, json.dumps(body).encode(), way, crowd)
        finally:
            writer.close()

    await asyncio.gather(*(one(i) for i in range(clients)))
    return crowd


async def _act(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, way: str | None, crowd: Crowd
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    sent = head % len(body) + body
    if way == "in its head":
        sent = sent[:20]
    elif way == "in its body":
        sent = sent[:-5]
    writer.write(sent)
    await writer.drain()
    if way in ("at the first byte", "in mid-stream"):
        await reader.read(1 if way == "at the first byte" else 400)
    if way == "by a reset":
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    if way is not None:
        crowd.left[way] += 1
        return
    answer = await reader.read()
    crowd.statuses[int(answer.split(b" ", 2)[1])] += 1
    crowd.whole += b"data: [DONE]" in answer or b'"usage"' in answer
