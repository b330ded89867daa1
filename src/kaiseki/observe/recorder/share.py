"""Who used my share? What each tenant got of a replica in a span of time, and why one of them waited.

A step's time is split among its chunks as the scheduler does it: by their marginal costs, scaled to the
measured whole. The costs are fitted to the recorded steps, so that it works for recordings of any engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from kaiseki.core.decision import F64, I32, Bool
from kaiseki.observe.explain import Kept, waits_of
from kaiseki.observe.recorder.layout import Kind
from kaiseki.observe.recorder.past import history_of, submitted
from kaiseki.observe.recorder.reading import Frame, Recording
from kaiseki.observe.recorder.when import clock_of

OTHERS = "others"


class Step(NamedTuple):
    """One slot that was executed.

    Attributes:
        slot: its number.
        ended_ns: when its result came.
        took_ns: measured.
        seqs: int64[n], arrival sequences of its requests; -1 where the recording does not say.
        tokens, starts: int32[n].
        decodes: bool[n].
    """

    slot: int
    ended_ns: int
    took_ns: int
    seqs: npt.NDArray[np.int64]
    tokens: I32
    starts: I32
    decodes: Bool


def steps(frames: list[Frame]) -> Iterator[Step]:
    """What was executed, in order."""
    seqs, prompts = np.full(256, -1, np.int64), np.zeros(256, np.int64)
    open_: dict[int, dict[str, npt.NDArray[Any]]] = {}
    for frame in frames:
        found = frame.sections()
        if frame.kind in (Kind.OPENED, Kind.KEYFRAME):
            requests = found["requests"]
            most = int(requests["row"].max(initial=-1))
            if most >= seqs.size:
                seqs = np.concatenate([seqs, np.full(most + 1, -1, np.int64)])
                prompts = np.concatenate([prompts, np.zeros(most + 1, np.int64)])
            seqs[requests["row"]], prompts[requests["row"]] = requests["seq"], requests["prompt"]
        elif frame.kind == Kind.DECIDED and found["rows"].size:
            rows = found["rows"]
            known = rows < seqs.size
            found["seqs"] = np.where(known, seqs[rows * known], -1)
            found["decodes"] = (found["starts"] >= prompts[rows * known]) & (found["tokens"] == 1)
            open_[frame.slot] = found
        elif frame.kind == Kind.APPLIED and frame.slot in open_:
            d, step = open_.pop(frame.slot), found["step"][0]
            ended = int(step["ended_ns"])
            took = ended - int(step["started_ns"])
            yield Step(frame.slot, ended, took, d["seqs"], d["tokens"], d["starts"], d["decodes"])


def marginal_ns(done: list[Step]) -> F64:
    """float64[4]: fitted ns per step, per decode, per token of its context, per prefill token."""
    features = np.array(
        [
            (1.0, s.decodes.sum(), s.starts[s.decodes].sum(dtype=np.float64), s.tokens[~s.decodes].sum())
            for s in done
        ]
    ).reshape(-1, 4)
    scale = np.maximum(features.max(axis=0, initial=1.0), 1.0)
    found: F64 = nnls(features / scale, np.array([float(s.took_ns) for s in done]))[0] / scale
    return found


def split_ns(step: Step, cost: F64) -> F64:
    """float64[n]: each chunk's part of a step's measured time."""
    _, decode, context, token = cost
    each = np.where(step.decodes, decode + context * step.starts, token * step.tokens)
    total = float(each.sum())
    return each * (step.took_ns / total) if total > 0 else np.full(each.size, step.took_ns / each.size)


@dataclass(slots=True)
class Got:
    """What one tenant got."""

    card_ns: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    requests: set[int] = field(default_factory=set)


def explain_tenant(
    recording: Recording,
    tenant: str,
    from_ns: int | None = None,
    to_ns: int | None = None,
    name_others: bool = True,
) -> dict[str, Any] | None:
    """The document of a tenant (keys as documented for `kaiseki explain --tenant`), None if it is unknown.

    Args:
        recording: where to look.
        tenant: its name.
        from_ns, to_ns: the span, by the recording's clock; all of the recording when not given.
        name_others: whether other tenants are told apart.
    """
    begin = recording.first_ns if from_ns is None else from_ns
    end = recording.last_ns if to_ns is None else to_ns
    names = {
        s.seq: s.request.tenant
        for frame in recording.of_kind(Kind.OPENED, Kind.KEYFRAME, Kind.REFUSED)
        for s in submitted(frame.sections())
    }
    if tenant not in names.values():
        return None
    weights = dict(recording.about.get("weights", {}))
    if not name_others:
        weights = {
            tenant: weights.get(tenant, 1.0),
            OTHERS: sum(w for n, w in weights.items() if n != tenant),
        }
        names = {seq: name if name == tenant else OTHERS for seq, name in names.items()}
    within = [s for s in steps(recording.frames) if begin < s.ended_ns <= end]
    got = _got(within, names)
    whole = sum(g.card_ns for g in got.values())
    active = sum(weights.get(name, 1.0) for name in got)
    shares = [
        {
            "tenant": name,
            "card_ms": round(g.card_ns / 1e6, 3),
            "share": round(g.card_ns / whole, 4) if whole else None,
            "entitled": round(weights.get(name, 1.0) / active, 4),
            "prompt_tokens": g.prompt_tokens,
            "output_tokens": g.output_tokens,
            "requests": len(g.requests),
        }
        for name, g in sorted(got.items(), key=lambda item: -item[1].card_ns)
    ]
    waits, many = _waits(recording, tenant, names, begin, end)
    document = {
        "tenant": tenant,
        "from": clock_of(recording, begin),
        "to": clock_of(recording, end),
        "slots": len(within),
        "card_ms": round(whole / 1e6, 3),
        "idle_ms": round(max(0.0, (end - begin) - whole) / 1e6, 3),
        "shares": shares,
        "requests": many,
        "waits": waits,
    }
    return document | {"summary": _summary(document)}


def _got(within: list[Step], names: dict[int, str]) -> dict[str, Got]:
    cost = marginal_ns(within)
    got: dict[str, Got] = {}
    for step in within:
        for seq, ns, tokens, decode in zip(
            step.seqs.tolist(), split_ns(step, cost).tolist(), step.tokens.tolist(), step.decodes.tolist(),
            strict=True,
        ):  # fmt: skip
            g = got.setdefault(names.get(seq, "unknown"), Got())
            g.card_ns += ns
            g.requests.add(seq)
            if decode:
                g.output_tokens += 1
            else:
                g.prompt_tokens += tokens
    return got


def _waits(
    recording: Recording, tenant: str, names: dict[int, str], begin: int, end: int
) -> tuple[list[dict[str, Any]], int]:
    """By reason and tenant in whose favour: all waiting of requests that were open in the span; how many."""
    history = history_of(recording)
    kept, sums, many = Kept(history, of_many=True), Counter[tuple[str, str, str | None]](), 0
    for story in history.stories():
        over = story.ending.ended_ns if story.ending is not None else recording.last_ns
        if story.request.tenant != tenant or story.refusal is not None:
            continue
        if story.request.arrival_ns > end or over < begin:
            continue
        many += 1
        for wait in waits_of(history, kept, story, min(end, over)):
            other = None if wait.yielded_to is None else history.story(wait.yielded_to)
            favoured = None if other is None else names.get(other.seq)
            sums[wait.reason.label, wait.reason.sentence, favoured] += wait.ns
    told = [
        {"reason": label, "ms": round(ns / 1e6, 3), "yielded_to": favoured, "detail": sentence}
        for (label, sentence, favoured), ns in sums.most_common()
    ]
    return told, many


def _summary(d: dict[str, Any]) -> str:
    mine = next((s for s in d["shares"] if s["tenant"] == d["tenant"]), None)
    if mine is None:
        text = f"{d['tenant']} got nothing"
    else:
        text = f"{d['tenant']} got {mine['share'] or 0:.0%} of the card's busy time"
        text += f" and was entitled to {mine['entitled']:.0%} by weight"
    others = [f"{s['tenant']} {s['share'] or 0:.0%}" for s in d["shares"] if s is not mine][:3]
    if others:
        text += f"; {', '.join(others)} went to others"
    whole = sum(w["ms"] for w in d["waits"])
    if whole:
        first = d["waits"][0]
        text += (
            f"; its {d['requests']} requests waited {whole:.0f} ms, {first['ms'] / whole:.0%} of it because"
        )
        text += f" {first['detail']}"
        if first["yielded_to"] is not None:
            text += f", in favour of {first['yielded_to']}"
    return text + "."
