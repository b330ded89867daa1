"""The whole stack on a tiny model with random weights, served over a real socket."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
from tests.tiny_models import SIZES, byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from kaiseki.config import key_digest, parse
from kaiseki.server.app import create_app
from kaiseki.server.build import Stack, build
from kaiseki.server.run import DrainingServer, bind, url_of

GENEROUS_S = 120.0
"""For what happens at once unless the machine is busy with something else."""
CONTEXT = 4096
POOL = 3000
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
CONFIG = """
engine: {{model: {folder}, threads: 1, own_process: false}}
memory: {{pool_tokens: {pool}, block_size: 8}}
scheduling: {{max_waiting_tokens: 3500}}
classes: {{hurried: {{ttft_ms: 0.001, on_late: expire}}}}
tenants:
  acme: {{api_key_sha256: [{acme}], classes: [hurried]}}
  labs: {{api_key_sha256: [{labs}]}}
  boss: {{operator: true, api_key_sha256: [{boss}]}}
"""


def make_folder(out: Path) -> Path:
    """A model folder: a token per byte, two layers."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES | {"max_position_embeddings": CONTEXT})).save_pretrained(out)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out)
    return out


def config_for(folder: Path) -> str:
    """Settings with three tenants and their keys."""
    keys = {name: key_digest(name) for name in ("acme", "labs", "boss")}
    return CONFIG.format(folder=folder, pool=POOL, **keys)


@dataclass
class Served:
    """A running server, and what is behind it."""

    stack: Stack
    url: str

    def openai(self, key: str = "acme") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, body: Any, key: str = "acme", timeout: float = 60, **headers: str) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/completions",
            content=body if isinstance(body, bytes) else json.dumps(body),
            headers={"authorization": f"Bearer {key}"} | headers,
            timeout=timeout,
        )

    def get(self, path: str, key: str = "boss") -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers={"authorization": f"Bearer {key}"}, timeout=60)

    def idle(self) -> bool:
        state = self.stack.driver.snapshot()
        return (state["open"], state["running"], state["waiting"], state["kv"]["live_blocks"]) == (0, 0, 0, 0)


def until(condition: Callable[[], bool], seconds: float = GENEROUS_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@contextmanager
def serving(config: str) -> Iterator[Served]:
    """A server with these settings, until the end of the block."""
    settings = parse(config)
    stack = build(settings)
    listener = bind("127.0.0.1", 0)
    ready = threading.Event()
    app = create_app(stack.driver, stack.text, settings, stack.backlog)
    server = DrainingServer(app, 5.0, ready.set)
    url = url_of(listener)
    stack.driver.start()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert ready.wait(GENEROUS_S)
        yield Served(stack, url)
    finally:
        server.should_exit = True
        thread.join(GENEROUS_S)
        stack.close()
