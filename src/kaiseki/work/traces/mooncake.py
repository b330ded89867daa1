"""Mooncake traces (FAST'25), JSON lines with an id per block of 512 prompt tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kaiseki.work.batches import BLOCK_TOKENS
from kaiseki.work.traces.errors import Spot
from kaiseki.work.traces.lines import lines
from kaiseki.work.traces.records import Record

KEYS = ("timestamp", "input_length", "output_length")
IDS = "hash_ids"
MAX_ID = 2**63 - 1


def records(path: Path) -> Iterator[Record]:
    """The requests of a file; those without `hash_ids` share no prefix that is known.

    Raises:
        OSError: it can't be read.
        TraceError: it is wrong somewhere.
    """
    for number, line in lines(path):
        spot = Spot(str(path), number)
        values = _values(spot, line)
        prompt_tokens = spot.whole_tokens(KEYS[1], values[KEYS[1]])
        yield Record(
            spot,
            spot.time_ns(KEYS[0], values[KEYS[0]], 1e-3, "milliseconds"),
            KEYS[0],
            str(values[KEYS[0]]),
            prompt_tokens,
            spot.whole_tokens(KEYS[2], values[KEYS[2]]),
            _ids(spot, values[IDS], prompt_tokens) if IDS in values else (),
        )


def _values(spot: Spot, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise spot.error("line", line, f"one complete JSON object ({error})") from None
    if not isinstance(values, dict):
        raise spot.error("line", line, f"a JSON object with {', '.join(KEYS)}")
    for key in KEYS:
        if key not in values:
            raise spot.error(key, "nothing", f"each line has {', '.join(KEYS)}")
    return values


def _ids(spot: Spot, ids: Any, prompt_tokens: int) -> list[int]:
    blocks = -(-prompt_tokens // BLOCK_TOKENS)
    if not isinstance(ids, list) or len(ids) != blocks:
        found = f"{len(ids)} ids" if isinstance(ids, list) else ids
        raise spot.error(IDS, found, f"{blocks} ids, one per {BLOCK_TOKENS} tokens of input_length")
    for one in ids:
        if type(one) is not int or not 0 <= one <= MAX_ID:
            raise spot.error(IDS, one, f"whole numbers from 0 to {MAX_ID}")
    return ids
