"""Serve for a while with the pool nearly full and half of the clients leaving: does anything stay behind?

    python benchmarks/soak.py [--minutes 15] [--clients 64] [--model NAME] [--json [FILE]]

Starts `kaiseki serve` with a pool so small that the clients fill it, by default on a tiny model with random
weights, so that connections come by the tens of thousands. Every client asks for one completion after the
other on a connection of its own; half of them leave at a random moment. Every ten seconds one line: memory
of the server's and the engine's process, and the mean share of the pool that requests hold. Exits with 1
when a check fails:

- every answer is a 200, and the pool was as full as wanted;
- at the end all blocks are free and no request is open;
- over the second half memory grows by less than MOST_GROWTH per 1,000 connections (least squares). The
  server remembers the last requests and slots for `kaiseki explain`, some 50 MB. Unless that is full by
  half-time, growth is shown but not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from scipy.stats import linregress

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_S = 10.0
MOST_GROWTH = 0.2  # MB per 1,000 connections, a tenth of what each leaves in the history until that is full
FULL_AFTER = 30_000  # connections, of which some are no requests: history and rings are full by then
LEAST_USE = 0.9  # of the pool, mean over the run but for its first sample; what is aimed at is 0.95
READY_S, IDLE_S = 300.0, 60.0
CONFIG = """
engine: {{model: {model}, threads: 1, max_context: 512}}
memory: {{pool_tokens: 2048, block_size: 8, watermark_ratio: 1.0}}
"""


@dataclass
class Sample:
    """State of things: seconds since the start, connections so far, memory in MB, share of the pool held."""

    t_s: float
    connections: int
    server_mb: float
    engine_mb: float
    pool_use: float


@dataclass
class Seen:
    """What became of the clients."""

    statuses: Counter[int] = field(default_factory=Counter)
    left: int = 0
    lost: int = 0

    @property
    def connections(self) -> int:
        return sum(self.statuses.values()) + self.left + self.lost


def model_folder(folder: Path) -> Path:
    """The tiny model of the tests."""
    sys.path.insert(0, str(ROOT))
    from tests.server.served import make_folder

    return make_folder(folder)


@contextmanager
def server(model: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`kaiseki serve`, once it is ready, and its URL."""
    config = folder / "soak.yaml"
    config.write_text(CONFIG.format(model=model))
    kaiseki = str(Path(sys.executable).with_name("kaiseki"))
    line = [kaiseki, "serve", "--config", str(config), "--port", "0"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said:
            raise SystemExit("the server did not start")
        yield process, said.split()[-1]
    finally:
        process.terminate()
        process.wait()


def rss_mb(pid: int) -> float:
    """Memory of a process that is in use now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def child_of(pid: int) -> int:
    """The process that this one started."""
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and f"\nPPid:\t{pid}\n" in (path / "status").read_text():
            return int(path.name)
    raise SystemExit("the server has no process for its engine")


def visitors() -> httpx.AsyncClient:
    """A connection for each request: one that is kept may be closed just when it is used again."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=READY_S, limits=limits)


async def client(http: httpx.AsyncClient, url: str, model: str, rng: random.Random, seen: Seen) -> None:
    """One request; a coin says whether to stay until it is answered."""
    topic = rng.choice(("red ", "green ", "blue ", "grey "))
    body = {
        "model": model,
        "prompt": topic * rng.randint(1, 30) + str(rng.random()),
        "max_tokens": rng.randint(4, 60),
        "stream": rng.random() < 0.7,
        "ignore_eos": True,
    }
    leaves = rng.random() < 0.5
    try:
        async with asyncio.timeout(rng.expovariate(4.0) if leaves else None):
            status = await ask(http, url, body, rng.randint(0, 60) if leaves else None)
    except TimeoutError:
        seen.left += 1
    except httpx.HTTPError:
        seen.lost += 1
    else:
        if status is None:
            seen.left += 1
        else:
            seen.statuses[status] += 1


async def clients(url: str, model: str, count: int, until: float, seen: Seen) -> None:
    """So many at any time, each on a connection of its own."""

    async def one_after_the_other(rng: random.Random) -> None:
        while time.monotonic() < until:
            await client(http, url, model, rng, seen)

    async with visitors() as http:
        await asyncio.gather(*(one_after_the_other(random.Random(i)) for i in range(count)))


async def ask(http: httpx.AsyncClient, url: str, body: dict[str, Any], lines: int | None) -> int | None:
    """The status of an answer that was read to its end; None when it was left after so many lines."""
    async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        read = 0
        async for _ in answer.aiter_lines():
            read += 1
            if lines is not None and read > lines:
                return None
        return answer.status_code


async def state(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    document: dict[str, Any] = (await http.get(f"{url}/kaiseki/v1/state")).json()
    return document


async def watch(url: str, pids: tuple[int, int], until: float, seen: Seen) -> list[Sample]:
    """A sample every ten seconds; the pool is looked at twice a second."""
    began, samples = time.monotonic(), []
    async with visitors() as http:
        while time.monotonic() < until:
            held, end = [], time.monotonic() + SAMPLE_S
            while time.monotonic() < end:
                kv = (await state(http, url))["kv"]
                held.append(kv["live_blocks"] / kv["total_blocks"])
                await asyncio.sleep(0.5)
            use, t_s = sum(held) / len(held), time.monotonic() - began
            samples.append(Sample(t_s, seen.connections, rss_mb(pids[0]), rss_mb(pids[1]), use))
            s = samples[-1]
            memory = f"{s.server_mb:10.1f} {s.engine_mb:10.1f}"
            print(f"{s.t_s:6.0f} {s.connections:12,} {memory} {s.pool_use:9.1%}", file=sys.stderr, flush=True)
    return samples


async def settle(url: str) -> dict[str, Any]:
    """The state once nothing is open any more, or after a while."""
    async with visitors() as http:
        end = time.monotonic() + IDLE_S
        while True:
            found = await state(http, url)
            if (found["open"] == 0 and found["kv"]["live_blocks"] == 0) or time.monotonic() > end:
                return found
            await asyncio.sleep(0.1)


def second_half(samples: list[Sample]) -> list[Sample]:
    return samples[len(samples) // 2 :]


def growth(samples: list[Sample], what: str) -> float:
    """MB per 1,000 connections over the second half."""
    half = second_half(samples)
    counts = [s.connections / 1000 for s in half]
    return float(linregress(counts, [getattr(s, what) for s in half]).slope)


async def run(url: str, model: str, pids: tuple[int, int], minutes: float, count: int) -> dict[str, Any]:
    """Everything that was found, as a document."""
    seen, until = Seen(), time.monotonic() + 60 * minutes
    print("   t s  connections  server MB  engine MB  pool use", file=sys.stderr)
    asking = clients(url, model, count, until, seen)
    samples, _ = await asyncio.gather(watch(url, pids, until, seen), asking)
    last = await settle(url)
    kv = last["kv"]
    use = [s.pool_use for s in samples[1:]]
    found = {
        "pool_use": sum(use) / len(use),
        "server_mb_per_1000": growth(samples, "server_mb"),
        "engine_mb_per_1000": growth(samples, "engine_mb"),
    }
    checks: dict[str, bool | None] = {
        "all answers are 200": set(seen.statuses) == {200} and seen.lost == 0,
        f"the pool is {LEAST_USE:.0%} full": found["pool_use"] >= LEAST_USE,
        "all blocks are free": kv["free_blocks"] == kv["total_blocks"] and kv["live_blocks"] == 0,
        "no request is open": (last["open"], last["running"], last["waiting"]) == (0, 0, 0),
    }
    judged = second_half(samples)[0].connections >= FULL_AFTER
    for who in ("server", "engine"):
        small = found[f"{who}_mb_per_1000"] < MOST_GROWTH
        checks[f"the {who} grows by less than {MOST_GROWTH} MB"] = small if judged else None
    return {
        "minutes": minutes,
        "clients": count,
        "connections": seen.connections,
        "statuses": {str(status): n for status, n in seen.statuses.items()},
        "left": seen.left,
        "lost": seen.lost,
        "slots": last["slot"],
        **found,
        "checks": checks,
        "ok": False not in checks.values(),
        "samples": [asdict(s) for s in samples],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--model", help="a name that `kaiseki pull` knows, or a folder")
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="print JSON, or to FILE")
    options = parser.parse_args()
    if options.minutes * 60 < 4 * SAMPLE_S:
        parser.error(f"--minutes must be at least {4 * SAMPLE_S / 60:.1f}, or there is no slope")
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(model_folder(Path(folder) / "tiny"))
        with server(model, Path(folder)) as (process, url):
            pids = process.pid, child_of(process.pid)
            name = Path(model).name
            document = asyncio.run(run(url, name, pids, options.minutes, options.clients))
    statuses = ", ".join(f"{n:,} x {status}" for status, n in document["statuses"].items())
    print(f"{document['connections']:,} connections: {statuses}, {document['left']:,} left", file=sys.stderr)
    for process_name in ("server", "engine"):
        slope = document[f"{process_name}_mb_per_1000"]
        print(f"{process_name}: {slope:+.3f} MB per 1,000 connections, second half", file=sys.stderr)
    for check, ok in document["checks"].items():
        sign = {True: "ok        ", False: "FAILED    ", None: "not judged"}[ok]
        print(f"{sign} {check}", file=sys.stderr)
    if options.json is not None:
        text = json.dumps(document, indent=2) + "\n"
        sys.stdout.write(text) if options.json == "-" else Path(options.json).write_text(text)
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
