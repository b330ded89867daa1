"""Open a trace of any known format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from kaiseki.work.arrivals import Arrivals
from kaiseki.work.batches import Batch
from kaiseki.work.sessions import Delay
from kaiseki.work.shaping import Shape
from kaiseki.work.traces import azure, burstgpt, mooncake, sharegpt
from kaiseki.work.traces.errors import Spot
from kaiseki.work.traces.records import batches
from kaiseki.work.weaving import Script, weave

Format = Literal["mooncake", "azure", "burstgpt", "sharegpt"]
READERS = {"mooncake": mooncake.records, "azure": azure.records, "burstgpt": burstgpt.records}
SNIFFED_BYTES = 4096
THINKING = Delay(60.0, 1.0, 3600.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """When the conversations of a trace without times take place.

    Attributes:
        arrivals: when conversations start.
        delay: from an answer to the next question.
        seed: for both.
        count_tokens: tokens of a text.
    """

    arrivals: Arrivals
    delay: Delay = THINKING
    seed: int = 0
    count_tokens: sharegpt.CountTokens = sharegpt.estimate_tokens


def load(
    path: Path,
    format: Format | Literal["auto"] = "auto",
    shape: Shape | None = None,
    timing: Timing | None = None,
) -> Iterator[Batch]:
    """The requests of a trace, read as they are asked for.

    Args:
        path: the file.
        format: what it is; `auto` looks at its beginning.
        shape: changes to rate, number and lengths.
        timing: needed for `sharegpt`, which has no times.

    Raises:
        OSError: the file can't be read.
        TraceError: at once when the format can't be told or times are missing, otherwise when reading
            comes to what is wrong.
    """
    found = detect(path) if format == "auto" else format
    if found == "sharegpt":
        if timing is None:
            raise Spot(str(path), 1).error("time", "none in ShareGPT files", "a rate of arrivals beside it")
        stream = _conversations(path, timing)
    else:
        stream = batches(path, READERS[found](path))
    return (shape or Shape()).apply(stream)


def detect(path: Path) -> Format:
    """The format of a file by its beginning.

    Raises:
        OSError: it can't be read.
        TraceError: it is empty or none of the known ones.
    """
    with path.open("rb") as file:
        text = file.read(SNIFFED_BYTES).decode("utf-8-sig", "replace").lstrip()
    head = text.split("\n", 1)[0].strip()
    if text.startswith("{"):
        return "mooncake"
    if text.startswith("["):
        return "sharegpt"
    columns = [cell.strip(' "') for cell in head.split(",")]
    if azure.COLUMNS[0] in columns:
        return "azure"
    if burstgpt.COLUMNS[0] in columns:
        return "burstgpt"
    allowed = (
        f"mooncake (JSON lines with {', '.join(mooncake.KEYS)}), azure (CSV with {', '.join(azure.COLUMNS)}),"
        f" burstgpt (CSV with {', '.join(burstgpt.COLUMNS)}) or sharegpt (a JSON array of conversations)"
    )
    raise Spot(str(path), 1).error("format", head or "an empty file", allowed)


def _conversations(path: Path, timing: Timing) -> Iterator[Batch]:
    for_arrivals, for_delays = np.random.default_rng(timing.seed).spawn(2)
    starts = chain.from_iterable(timing.arrivals.times_ns(for_arrivals))
    conversations = sharegpt.conversations(path, timing.count_tokens)
    scripts = (_script(turns, timing.delay, for_delays) for turns in conversations)
    return weave(((int(start), script) for script, start in zip(scripts, starts, strict=False)), first_id=0)


def _script(turns: list[tuple[int, int]], delay: Delay, rng: np.random.Generator) -> Script:
    new_tokens, output_tokens = map(list, zip(*turns, strict=True))
    delay_ns = [0, *delay.draw_ns(rng, len(turns) - 1).tolist()]
    return Script(new_tokens, output_tokens, delay_ns, np.zeros(0, np.int64))
