"""What goes between the server's process and the engine's: one pipe, pickled tuples.

Both ends are of the same release and trust each other. Arrays and plain tuples are sent, since the
classes around them take several times as long to pickle, and the interpreter's lock meanwhile.
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
    return (d.slot, d.rows, d.tokens, d.starts, d.samples, d.epochs, d.copies, tables)


def unpack_decision(message: Message) -> tuple[Decision, I32]:
    """What `pack_decision` was given."""
    slot, rows, tokens, starts, samples, epochs, copies, tables = message
    return Decision(slot, rows, tokens, starts, samples, epochs, copies=copies), tables


def pack_result(result: StepResult) -> Message:
    """A result without what the other end knows: its rows and epochs are the decision's."""
    r = result
    payloads = None if r.payloads is None else [_pack_outputs(outputs) for outputs in r.payloads]
    return (
        r.slot,
        r.new_tokens,
        r.token_ids,
        r.finish,
        r.failed,
        r.retryable,
        r.started_ns,
        r.ended_ns,
        r.message,
        payloads,
    )


def unpack_result(message: Message, rows: I32, epochs: I32) -> StepResult:
    """What `pack_result` was given, for the decision that had these rows and epochs."""
    slot, new_tokens, token_ids, finish, failed, retryable, started, ended, text, payloads = message
    return StepResult(
        slot,
        rows,
        epochs,
        new_tokens,
        token_ids,
        finish,
        failed,
        retryable,
        started,
        ended,
        text,
        None if payloads is None else [_unpack_outputs(outputs) for outputs in payloads],
    )


def _pack_outputs(outputs: Iterable[TokenOutput] | None) -> list[Message] | None:
    if outputs is None:
        return None
    return [(o.token_id, o.text, _pack_logprob(o.chosen), tuple(map(_pack_logprob, o.top))) for o in outputs]


def _unpack_outputs(packed: list[Message] | None) -> tuple[TokenOutput, ...] | None:
    if packed is None:
        return None
    return tuple(
        TokenOutput(token, text, chosen and TokenLogprob(*chosen), tuple(TokenLogprob(*t) for t in top))
        for token, text, chosen, top in packed
    )


def _pack_logprob(logprob: TokenLogprob | None) -> Message | None:
    return None if logprob is None else (logprob.token_id, logprob.text, logprob.logprob)
