"""What goes between the server's process and the engine's: one pipe, pickled tuples.

Both ends are of the same release and trust each other. Bytes and plain tuples are sent: to pickle arrays
and the classes around them takes several times as long, and the interpreter's lock meanwhile.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kaiseki.core.decision import I32, Decision, StepResult
from kaiseki.engines.embedded.work import GenerationWork, TokenLogprob, TokenOutput

Message = tuple[Any, ...]
"""The name of what is asked or answered, and what belongs to it."""

OPEN, CLOSE, EXECUTE, WARM_UP = "open", "close", "execute", "warm up"
DONE, STEP, FAILED = "done", "step", "failed"
"""Answers: what was asked for has been done; a step's result; an exception, after which there is no more."""


class Gone(Exception):
    """There is nobody at the other end any more."""


class Line:
    """One end of the pipe. One thread receives, any may send."""

    def __init__(self, connection: Connection) -> None:
        """`connection` is this object's from now on."""
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            Gone: the other end is closed.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError as error:
            raise Gone from error

    def receive(self) -> Message:
        """Wait for a message, without holding the interpreter's lock.

        Raises:
            Gone: the other end is closed, and nothing that it sent is left.
        """
        try:
            data = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise Gone from error
        message: Message = pickle.loads(data)
        return message

    def close(self) -> None:
        """Hang up; once is enough."""
        self._connection.close()


def pack_work(work: GenerationWork) -> GenerationWork:
    """The same work, with a prompt that is quick to send.

    Raises:
        ValueError: the prompt is empty.
    """
    prompt = np.asarray(work.prompt_ids, np.int32)
    if not prompt.size:
        raise ValueError("a prompt needs at least one token")
    return replace(work, prompt_ids=prompt)  # type: ignore[arg-type]


def pack_decision(decision: Decision, tables: I32) -> Message:
    """A decision and where the KV of its rows is, without what an engine does not look at."""
    d = decision
    ints = (d.rows, d.tokens, d.starts, d.epochs, d.swaps, d.copies, tables)
    return (d.slot, np.asarray(d.samples, np.bool_).tobytes(), *(_bytes(numbers) for numbers in ints))


def unpack_decision(message: Message) -> tuple[Decision, I32]:
    """What `pack_decision` was given; the arrays can't be written to."""
    slot, samples, rows, tokens, starts, epochs, swaps, copies, tables = message
    row_ids = _ints(rows)
    decision = Decision(
        slot,
        row_ids,
        _ints(tokens),
        _ints(starts),
        np.frombuffer(samples, np.bool_),
        _ints(epochs),
        swaps=_ints(swaps).reshape(-1, 3),
        copies=_ints(copies).reshape(-1, 2),
    )
    return decision, _ints(tables).reshape(row_ids.size, -1) if row_ids.size else _ints(tables)


def pack_result(result: StepResult) -> Message:
    """A result without what the other end knows: its rows and epochs are the decision's."""
    r = result
    vectors = (r.new_tokens, r.token_ids, r.finish, r.failed, r.retryable)
    payloads = None if r.payloads is None else [_pack_outputs(outputs) for outputs in r.payloads]
    return (r.slot, *(v.tobytes() for v in vectors), r.started_ns, r.ended_ns, r.message, r.swap_ns, payloads)


def unpack_result(message: Message, rows: I32, epochs: I32) -> StepResult:
    """What `pack_result` was given, for the decision that had these rows and epochs."""
    slot, new_tokens, token_ids, finish, failed, retryable, started, ended, text, swap_ns, payloads = message
    return StepResult(
        slot,
        rows,
        epochs,
        _ints(new_tokens).copy(),
        _ints(token_ids).copy(),
        np.frombuffer(finish, np.int8).copy(),
        np.frombuffer(failed, np.bool_).copy(),
        np.frombuffer(retryable, np.bool_).copy(),
        started,
        ended,
        text,
        swap_ns,
        None if payloads is None else [_unpack_outputs(outputs) for outputs in payloads],
    )


def _bytes(numbers: I32) -> bytes:
    return np.asarray(numbers, np.int32).tobytes()


def _ints(data: bytes) -> I32:
    return np.frombuffer(data, np.int32)


def _pack_outputs(outputs: Iterable[TokenOutput] | None) -> list[Message] | None:
    """Each output as (token, text), with its log-probabilities if there are any."""
    if outputs is None:
        return None
    return [
        (o.token_id, o.text)
        if o.chosen is None and not o.top
        else (o.token_id, o.text, _pack_logprob(o.chosen), [_pack_logprob(t) for t in o.top])
        for o in outputs
    ]


def _unpack_outputs(packed: list[Message] | None) -> tuple[TokenOutput, ...] | None:
    if packed is None:
        return None
    return tuple(TokenOutput(*p) if len(p) == 2 else _with_logprobs(*p) for p in packed)


def _with_logprobs(token: int, text: str, chosen: Message | None, top: list[Message]) -> TokenOutput:
    best = tuple(TokenLogprob(*t) for t in top)
    return TokenOutput(token, text, None if chosen is None else TokenLogprob(*chosen), best)


def _pack_logprob(logprob: TokenLogprob | None) -> Message | None:
    return None if logprob is None else (logprob.token_id, logprob.text, logprob.logprob)
