"""Is the simulator right about a real server? The same load on both, and the figures side by side.

    python -m benchmarks.fidelity [--minutes 10] [--runs 3] [--profile FILE] [--policy P]
                                  [--record DIR] [--replay DIR] [--json [FILE]]

Measures this machine (`kaiseki calibrate`) unless a profile is given. Then a mixed load of two tenants, short
chats and long documents, with a burst every minute that overfills the queue, goes several times to a
`kaiseki serve` of its own. What arrived when and how long the outputs were is replayed by the simulator, with
the same policy, classes, pool, queue limit and quantum. The machine should have nothing else to do.

`--record` keeps the runs, `--replay` compares recorded ones with the simulator as it is now. Exits with 1 if
a figure of all requests is off by more than is allowed: P50 10 %, P99 20 %, the number refused 5 %, or the
spread of the real runs where that is more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from kaiseki.cost.calibrated import Profile
from kaiseki.cost.cards import load_card
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.features import chunk_features
from kaiseki.cost.hf_config import load_model
from kaiseki.cost.profiled import Profiled
from kaiseki.demo.attainment import Targets
from kaiseki.demo.client import Answer, Clients, Exchange
from kaiseki.demo.load import Arrival
from kaiseki.demo.prompts import BATCH, CLASSES, INTERACTIVE, PromptMaker, encoder
from kaiseki.demo.run import model_name
from kaiseki.demo.serving import CLASS_TRAITS, KEYS, POOL_TOKENS, QUANTUM_TOKENS, TENANTS, serve, settings
from kaiseki.engines.embedded.text import TextCodec
from kaiseki.models import DEFAULT_MODEL, quiet, resolve_model
from kaiseki.observe.percentiles import percentiles
from kaiseki.policies.registry import load as load_policy
from kaiseki.sim import cluster
from kaiseki.sim.run import Case, simulate
from kaiseki.work.batches import Batch
from kaiseki.work.classes import Plan
from kaiseki.work.shaping import Shape

BUSY = 0.45
"""Offered work outside of bursts, of what the profile says can be done."""
INTERACTIVE_SHARE = 0.5
BURST_EVERY_S = 60.0
BURST = {INTERACTIVE: 16, BATCH: 4}
MAX_WAITING = 12
TOGETHER = 8
"""Decodes in a typical step."""
ALLOWED = {"p50": 0.10, "p99": 0.20}
ALLOWED_REFUSED = 0.05
LONGEST_CHAT = 300
"""Tokens of a prompt; those of documents are more."""


@dataclass(frozen=True)
class Record:
    """One request of a real run: what the simulator needs, and what came of it. Times are ms of one clock."""

    cls: str
    arrival_ms: float
    prompt_tokens: int
    output_tokens: int
    ended: str
    token_ms: list[float]


@dataclass(frozen=True)
class Scene:
    """What a run and its simulation have in common."""

    profile: str
    policy: str
    targets: dict[str, dict[str, float | None]]

    def limits(self) -> dict[str, Targets]:
        return {cls: Targets(**found) for cls, found in self.targets.items()}


def timing_of(profile: Profile) -> Profiled:
    return Profiled(Deployment(load_model("smollm2-135m"), load_card("cpu")), profile)


def scene(profile_path: Path, policy: str) -> Scene:
    """Targets from the profile, as generous as those of `kaiseki demo`."""
    timing = timing_of(Profile.load(profile_path))
    step_ms = timing.iteration_ns(chunk_features([64] * TOGETHER)) / 1e6
    chat_ms = timing.iteration_ns(chunk_features([], [0], [64])) / 1e6
    document_ms = timing.iteration_ns(chunk_features([], [0], [750])) / 1e6 + 12 * step_ms
    targets = {
        INTERACTIVE: Targets(ttft_ms=5 * chat_ms + step_ms, tbt_ms=2 * step_ms),
        BATCH: Targets(deadline_ms=8 * document_ms),
    }
    return Scene(str(profile_path.resolve()), policy, {cls: asdict(t) for cls, t in targets.items()})


def arrivals(maker: PromptMaker, timing: Profiled, seconds: float, seed: int = 1) -> list[Arrival]:
    """Poisson arrivals of both classes, and bursts."""
    rng = np.random.default_rng(seed)
    each_ns = timing.iteration_ns(chunk_features([200] * TOGETHER)) / TOGETHER
    found: list[Arrival] = []
    for cls, share in ((INTERACTIVE, INTERACTIVE_SHARE), (BATCH, 1 - INTERACTIVE_SHARE)):
        sample = [maker.make(cls) for _ in range(50)]
        prefill = [timing.iteration_ns(chunk_features([], [0], [p.prompt_tokens])) for p in sample]
        work_s = np.mean(prefill + np.array([p.output_tokens for p in sample]) * each_ns) / 1e9
        count = int(BUSY * share * seconds / work_s)
        found += [Arrival(float(t), maker.make(cls)) for t in rng.uniform(0, seconds, count)]
        for start in np.arange(BURST_EVERY_S / 2, seconds, BURST_EVERY_S):
            found += [Arrival(float(start + rng.uniform(0, 1)), maker.make(cls)) for _ in range(BURST[cls])]
    return sorted(found, key=lambda arrival: arrival.at_s)


async def real_run(wanted: dict[str, Any], load: list[Arrival], codec: TextCodec) -> list[Record]:
    """Serve the load once."""
    async with serve(wanted) as url, Clients(url, model_name(wanted["engine"]["model"]), KEYS) as clients:
        maker = PromptMaker(encoder(resolve_model(DEFAULT_MODEL, progress=quiet)), seed=10**6)
        for cls in (BATCH, INTERACTIVE, BATCH, INTERACTIVE):  # so that nothing is done for the first time
            await clients.ask(maker.make(cls))
        begin, sent = time.monotonic(), []
        for arrival in load:
            await asyncio.sleep(max(0.0, begin + arrival.at_s - time.monotonic()))
            sent.append((time.monotonic() * 1e3, *clients.begin(arrival.prompt)))
        await asyncio.gather(*(task for _, _, task in sent))
        return [_record(at_ms, exchange, codec) for at_ms, exchange, _ in sent]


def _record(at_ms: float, exchange: Exchange, codec: TextCodec) -> Record:
    answer: Answer = exchange.answer()
    prompt = answer.prompt
    return Record(
        prompt.cls,
        answer.arrival_ms if answer.token_ms.size else at_ms,
        len(codec.render_chat(prompt.messages)),
        answer.token_ms.size if answer.finished else prompt.output_tokens,
        "completed" if answer.finished else answer.error or "broken",
        answer.token_ms.tolist(),
    )


def server_settings(scene: Scene) -> dict[str, Any]:
    wanted = settings(DEFAULT_MODEL, scene.policy, None, scene.limits())
    wanted["engine"]["profile"] = scene.profile
    wanted["scheduling"]["max_waiting"] = MAX_WAITING
    return wanted


def simulated(scene: Scene, run: list[Record], seed: int) -> dict[str, Any]:
    """The same requests in the simulator."""
    start = min(r.arrival_ms for r in run)
    ordered = sorted(run, key=lambda r: r.arrival_ms)
    batch = Batch.of(
        0,
        [round((r.arrival_ms - start) * 1e6) for r in ordered],
        [r.prompt_tokens for r in ordered],
        [r.output_tokens for r in ordered],
    )
    described = cluster.Cluster(
        model="smollm2-135m",
        pools=[
            cluster.Pool(
                name="here", card="cpu", profile=scene.profile, kv_blocks=POOL_TOKENS // 16,
                max_batch_size=1024, max_waiting=MAX_WAITING,
            )
        ],
    )  # fmt: skip

    def stream(shape: Shape) -> Iterator[Batch]:
        return shape.apply([batch])

    fleet = cluster.fleet(described)
    case = Case(stream, plan(scene), fleet, seed=seed, exact_outputs=True)
    case = case.with_settings(quantum_tokens=QUANTUM_TOKENS)
    found = simulate(case, load_policy(scene.policy))
    kept = {"all": found, **found["classes"]}
    return {
        name: {
            "ttft_ms": f["ttft_ms"],
            "tbt_ms": f["tbt_ms"],
            "refused": f["refused"] + f["expired"],
            "demoted": f["demoted"],
            "requests": f["requests"],
        }
        for name, f in kept.items()
    }


def plan(scene: Scene) -> Plan:
    """The server's classes and tenants; the classes' prompts differ in length."""
    wanted = server_settings(scene)
    tenants = {name: {"weight": weight, "class": cls} for cls, (name, weight) in TENANTS.items()}
    chat, documents = TENANTS[INTERACTIVE][0], TENANTS[BATCH][0]
    rules = [{"when": f"input_tokens <= {LONGEST_CHAT}", "tenant": chat}, {"tenant": documents}]
    assert set(wanted["classes"]) == set(CLASS_TRAITS)
    return Plan.model_validate({"classes": wanted["classes"], "tenants": tenants, "assign": rules})


def figures(run: list[Record]) -> dict[str, Any]:
    """Of a real run, as the simulator counts."""
    found = {}
    for name in ("all", *CLASSES):
        mine = [r for r in run if name in ("all", r.cls)]
        gaps = np.concatenate([np.diff(r.token_ms) for r in mine if r.token_ms] or [[]])
        first = [r.token_ms[0] - r.arrival_ms for r in mine if r.token_ms]
        found[name] = {
            "ttft_ms": percentiles(first) if first else None,
            "tbt_ms": percentiles(gaps) if gaps.size else None,
            "refused": sum(r.ended != "completed" for r in mine),
            "requests": len(mine),
        }
    return found


def compare(real: list[dict[str, Any]], sim: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Medians over the runs; the spread is the real runs' range over their median."""
    for name in ("all", *CLASSES):
        for metric in ("ttft_ms", "tbt_ms"):
            for q, allowed in ALLOWED.items():
                mine, theirs = ([f[name][metric][q] for f in side if f[name][metric]] for side in (real, sim))
                if mine and theirs:
                    yield _row(name, f"{metric} {q}", mine, theirs, allowed)
        mine, theirs = ([float(f[name]["refused"]) for f in side] for side in (real, sim))
        yield _row(name, "refused", mine, theirs, ALLOWED_REFUSED)


def _row(name: str, metric: str, real: list[float], sim: list[float], allowed: float) -> dict[str, Any]:
    middle, modelled = median(real), median(sim)
    spread = (max(real) - min(real)) / middle if middle else 0.0
    error = modelled / middle - 1 if middle else float(modelled != 0)
    allowed = max(allowed, spread)
    return {
        "class": name,
        "metric": metric,
        "real": real,
        "simulated": sim,
        "error": error,
        "spread": spread,
        "allowed": allowed,
        "ok": abs(error) <= allowed,
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("class", "figure", "real runs", "simulated", "error", "spread", "allowed", ""):
        table.add_column(heading, justify="left" if heading in ("class", "figure", "") else "right")
    last = ""
    for row in rows:
        table.add_row(
            row["class"] if row["class"] != last else "",
            row["metric"],
            " ".join(f"{v:.0f}" for v in row["real"]),
            " ".join(f"{v:.0f}" for v in row["simulated"]),
            f"{row['error']:+.1%}",
            f"{row['spread']:.1%}",
            f"{row['allowed']:.1%}",
            "" if row["ok"] else "off",
        )
        last = row["class"]
    console.print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--policy", default="kaiseki")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--json", nargs="?", const="-")
    return parser.parse_args()


def record(options: argparse.Namespace, console: Console) -> tuple[Scene, list[list[Record]]]:
    """Serve the load as often as asked."""
    path = options.profile
    if path is None:
        from kaiseki.commands.calibrate import calibrate

        path = Path("profile.json")
        calibrate(out=path, server=True)
    shared = scene(path, options.policy)
    folder = resolve_model(DEFAULT_MODEL, progress=quiet)
    codec = TextCodec(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    seconds = options.minutes * 60
    load = arrivals(PromptMaker(encoder(folder), seed=1), timing_of(Profile.load(path)), seconds)
    runs = []
    for i in range(options.runs):
        console.print(f"run {i + 1} of {options.runs}: {len(load)} requests over {seconds:.0f} s")
        runs.append(asyncio.run(real_run(server_settings(shared), load, codec)))
    return shared, runs


def main() -> None:
    options = _options()
    console = Console(stderr=options.json == "-", width=110)
    if options.replay is not None:
        kept = json.loads((options.replay / "runs.json").read_text())
        shared = Scene(**kept["scene"])
        if options.profile is not None:
            shared = Scene(str(options.profile.resolve()), shared.policy, shared.targets)
        runs = [[Record(**r) for r in run] for run in kept["runs"]]
    else:
        shared, runs = record(options, console)
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
        document = {"scene": asdict(shared), "runs": [[asdict(r) for r in run] for run in runs]}
        (options.record / "runs.json").write_text(json.dumps(document))
    real = [figures(run) for run in runs]
    sim = [simulated(shared, run, seed) for seed, run in enumerate(runs, 1)]
    rows = list(compare(real, sim))
    show(rows, console)
    if options.json:
        text = json.dumps(
            {"rows": rows, "real": real, "simulated": sim, "ok": all(r["ok"] for r in rows)}, indent=2
        )
        print(text) if options.json == "-" else Path(options.json).write_text(text + "\n")
    sys.exit(not all(row["ok"] for row in rows if row["class"] == "all"))


if __name__ == "__main__":
    main()
