"""Make the instances that `kaiseki bench matching` measures: chunks to be placed on cards.

    python benchmarks/matching_instances.py [FOLDER]

One file per family: the first twenty seeds that give an instance tight in time and KV, the same on every
run. Requests are those of a mixed service: prompts and outputs log-normal, weights 1, 2 and 4, slack up to
two time scales of urgency. A chunk is worth its urgency times its tokens, so worth grows with what it takes:
were all worth the same, taking the smallest first would be nearly exact, and the comparison empty.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import numpy as np

from kaiseki.bench.matching import slack
from kaiseki.bench.matching_exact import Instance, solve

FOLDER = Path(__file__).parent / "instances" / "matching"
SEEDS = 20
SIZES = {"small": (24, 3), "large": (512, 8)}
US_PER_TOKEN = 115  # prefill of Llama-2-70B on 8 A100
TAU_US = 1_000_000
BLOCK = 16
MOST_SLACK = 0.001  # of the LP; more, and one of the capacities would not matter


def capacities(value, time, kv):
    """Time and KV of a card such that both bind and about half of the chunks are admitted.

    With prices at which all chunks together pay as much for time as for KV, the half that is worth most
    for its price fills one large card exactly; `cards` equal ones share that.
    """
    chunks, cards = value.shape
    density = value / (time / time.sum() + kv / kv.sum())
    best = density.argmax(1)
    chosen = np.argsort(-density.max(1))[: chunks // 2]
    return tuple(int(use[chosen, best[chosen]].sum() / cards) for use in (time, kv))


def make(chunks: int, cards: int, affinity: bool, seed: int):
    """value f4[n, m], time i4[n, m] in us, kv i4[n, m] in blocks, and the capacities i4[m] of a card."""
    rng = np.random.default_rng([seed, chunks, cards])
    prompt = np.clip(rng.lognormal(np.log(600), 1.0, chunks), 32, 6000).astype(int)
    output = np.clip(rng.lognormal(np.log(250), 0.9, chunks), 16, 2000).astype(int)
    urgency = rng.choice([1, 2, 4], chunks) * np.exp(-rng.uniform(0, 2, chunks))
    cached = np.zeros((chunks, cards), int)
    if affinity:
        groups = max(chunks // 8, 3)
        length = rng.integers(16, 128, groups) * BLOCK
        holds = np.zeros((groups, cards), bool)
        for group in range(groups):
            holds[group, rng.choice(cards, rng.integers(1, 3), replace=False)] = True
        popularity = 1 / np.arange(1, groups + 1)
        of = rng.choice(groups, chunks, p=popularity / popularity.sum())
        shares = rng.random(chunks) < 0.6
        most = (prompt * 4 // 5) // BLOCK * BLOCK  # a fifth of a prompt at least is its own
        cached = np.where(holds[of] & shares[:, None], np.minimum(length[of], most)[:, None], 0)
    time = (prompt[:, None] - cached) * US_PER_TOKEN
    kv = -(-(prompt + output) // BLOCK)[:, None] - cached // BLOCK
    value = (urgency * (prompt + output))[:, None] * np.exp(-time / TAU_US)
    time_of_card, kv_of_card = capacities(value, time, kv)
    return {
        "value": value.astype(np.float32),
        "time": time.astype(np.int32),
        "kv": kv.astype(np.int32),
        "time_of_card": np.full(cards, time_of_card, np.int32),
        "kv_of_card": np.full(cards, kv_of_card, np.int32),
    }


def is_tight(made) -> bool:
    """The LP leaves nothing of time or KV unused on any card, and admits about half of the chunks."""
    rooms = made["time_of_card"], made["kv_of_card"]
    instance = Instance(*(a.astype(float) for a in (made["value"], made["time"], made["kv"], *rooms)))
    relaxed = solve(instance, whole=False)
    admitted = relaxed.shares.sum() / len(instance.value)
    return max(slack(instance, relaxed).values()) < MOST_SLACK and 0.4 < admitted < 0.6


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for size, (chunks, cards) in SIZES.items():
        for affinity in (False, True):
            kept = {}
            for seed in count():
                made = make(chunks, cards, affinity, seed)
                if is_tight(made):
                    kept[seed] = made
                if len(kept) == SEEDS:
                    break
            stacked = {name: np.stack([one[name] for one in kept.values()]) for name in made}
            path = folder / f"{size}-{'affinity' if affinity else 'plain'}.npz"
            np.savez_compressed(path, seed=np.array(list(kept), np.int32), **stacked)
            print(f"{path.name}: seeds up to {seed}, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
