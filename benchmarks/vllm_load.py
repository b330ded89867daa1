"""One load through vLLM's own OpenAI server: fcfs and priority at their best token budget against Kaiseki.

    python -m benchmarks.vllm_load --vllm PYTHON [--seconds 90] [--full] [--json FILE]

The rule is that of `kaiseki demo`: targets and the sustainable rate are measured first, then the same
arrivals of two tenants, 1.3 times what vLLM sustains, go to a server of each kind. PYTHON is that of an
environment with vLLM and Kaiseki. Without `--full` the baselines get one budget, the largest whose steps keep
the gap target. Times are taken by the client, since vLLM says none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from rich.console import Console

from kaiseki.demo.client import Answer, Clients, Exchange
from kaiseki.demo.narrator import Narrator
from kaiseki.demo.prompts import BATCH, Prompt, encoder
from kaiseki.demo.report import document
from kaiseki.demo.run import OURS, Demo, Options, model_name
from kaiseki.demo.serving import POOL_TOKENS, ServerFailed, until_signalled
from kaiseki.demo.tables import PLAIN_WIDTH, show
from kaiseki.models import resolve_model

MODEL = "smollm2-135m-instruct"
BLOCK_TOKENS = 32
MAX_MODEL_LEN = 2048
MAX_SEQS = 32
STEP_TOKENS = 512
"""Of Kaiseki, which sizes its steps itself; the baselines get a budget."""
START_TIMEOUT_S = 600.0


class TimedExchange(Exchange):
    """Stamps each event as it arrives."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self._sent_ms = 0.0
        self._events: list[tuple[float, bytes]] = []

    async def run(self, client: httpx.AsyncClient, model: str) -> None:
        """See `Exchange`."""
        body = {
            "model": model,
            "messages": self.prompt.messages,
            "max_completion_tokens": self.prompt.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "priority": 1 if self.prompt.cls == BATCH else 0,
        }
        self._sent_ms = now_ms()
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                self._status = response.status_code
                self._request_id = response.headers.get("x-kaiseki-request-id", "")
                async for line in response.aiter_lines():
                    self._events.append((now_ms(), line.encode()))
        except httpx.TransportError:
            return

    def answer(self) -> Answer:
        """See `Exchange`."""
        answer = Answer(self.prompt, self._request_id, self._status, arrival_ms=self._sent_ms)
        if self._status != 200:
            answer.error = f"http_{self._status}"
            return answer
        times: list[float] = []
        for at_ms, line in self._events:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            answer.error = answer.error or ("error" if "error" in event else "")
            done = (event.get("usage") or {}).get("completion_tokens", 0)
            times += [at_ms] * (done - len(times))
            answer.finished = answer.finished or any(c.get("finish_reason") for c in event.get("choices", ()))
        answer.token_ms = np.array(times)
        return answer


class TimedClients(Clients):
    """Clients of a vLLM server."""

    exchange = TimedExchange

    async def explain(self, cls: str, request_id: str) -> None:
        """Nothing: that needs a recording."""


def now_ms() -> float:
    """The client's clock."""
    return time.monotonic_ns() / 1e6


def command(python: str, folder: Path, wanted: Mapping[str, Any], settings: Path, port: int) -> list[str]:
    """The server's command line for the settings of a run of the demo."""
    scheduling = wanted["scheduling"]
    budget = scheduling.get("budget_tokens")
    given = {
        "model": folder,
        "served-model-name": model_name(MODEL),
        "host": "127.0.0.1",
        "port": port,
        "dtype": "float32",
        "max-model-len": MAX_MODEL_LEN,
        "block-size": BLOCK_TOKENS,
        "max-num-seqs": MAX_SEQS,
        "num-gpu-blocks-override": POOL_TOKENS // BLOCK_TOKENS,
        "max-num-batched-tokens": budget or STEP_TOKENS,
    }
    if scheduling["policy"] == OURS:
        given["scheduler-cls"] = "kaiseki.engines.vllm.KaisekiScheduler"
        given["middleware"] = "kaiseki.engines.vllm.middleware.KaisekiMiddleware"
        given["additional-config"] = json.dumps({"kaiseki": str(settings)})
    else:
        given["scheduling-policy"] = scheduling["policy"]
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *options]


def launcher(python: str, folder: Path) -> Any:
    """Starts servers for the demo."""

    @asynccontextmanager
    async def launch(wanted: Mapping[str, Any]) -> AsyncIterator[str]:
        with tempfile.TemporaryDirectory() as scratch, socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            settings, log = Path(scratch, "kaiseki.yaml"), Path(scratch, "log")
            kept = {key: wanted[key] for key in ("scheduling", "classes", "tenants")}
            settings.write_text(yaml.safe_dump(kept))
            env = os.environ | {
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "HF_HUB_OFFLINE": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "KAISEKI_RUN_DIR": str(Path(scratch, "run")),
            }
            arguments = command(python, folder, wanted, settings, port)
            with log.open("wb") as out:
                process = subprocess.Popen(arguments, stdout=out, stderr=out, env=env)
            try:
                await ready(f"http://127.0.0.1:{port}/health", process, log)
                yield f"http://127.0.0.1:{port}"
            finally:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()

    return launch


async def ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server takes requests.

    Raises:
        ServerFailed: it ended, or takes too long; with the end of its log.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    async with httpx.AsyncClient(trust_env=False) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if (await client.get(url)).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.5)
    raise ServerFailed(f"the server is not there:\n{log.read_text(errors='replace')[-3000:]}")


def main() -> None:
    """Run it and print the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", required=True, metavar="PYTHON")
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    folder = resolve_model(MODEL)
    options = Options(MODEL, tuple(range(1, args.seeds + 1)), args.seconds, args.full)
    demo = Demo(options, launcher(args.vllm, folder), encoder(folder), Narrator(console), TimedClients)
    found = asyncio.run(until_signalled(demo.run()))
    result = document(found, options)
    show(result, console)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
