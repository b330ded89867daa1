"""The embedded engine in a process of its own.

A forward takes the interpreter's lock again after each of its hundreds of operations. Beside a busy HTTP
server it waits for that lock again and again, and the steps that meet an arriving request are late by
half; in a process of its own it has the interpreter to itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer

from kaiseki.core.decision import I32, Decision, StepResult
from kaiseki.core.protocols import Capabilities
from kaiseki.engines.embedded import wire
from kaiseki.engines.embedded.batch import BlockTables
from kaiseki.engines.embedded.checks import check_config
from kaiseki.engines.embedded.text import TextCodec
from kaiseki.engines.embedded.work import GenerationWork

END_S = 10.0
"""How long the process may take to end once the pipe is closed; then it is killed."""


class EngineDied(RuntimeError):
    """The engine's process is gone; the message says how it ended."""


class ProcessEngine:
    """An `Engine` like `EmbeddedEngine`, whose model is loaded and run by another process.

    One thread at a time may use it; `encode`, `render_chat` and `shutdown` may be called from any. On this
    side are the tokenizer and the block tables, which are sent along with each decision.
    """

    def __init__(
        self, child: Child, ready: wire.Message, codec: TextCodec, config: Any, tables: BlockTables
    ) -> None:
        """`ready` is what the child said when it had loaded the model. See `load`."""
        self.codec = codec
        self.config = config
        self._capabilities: Capabilities
        self._capabilities, self.shape, self.eos = ready
        self._child = child
        self._tables = tables
        self._outstanding: deque[tuple[I32, I32]] = deque()

    @classmethod
    def load(cls, folder: str | Path, *, tables: BlockTables, **options: Any) -> ProcessEngine:
        """Load a Hugging Face model folder in a new process.

        Args:
            tables: block tables of rows, asked when a decision is executed.
            options: as for `EmbeddedEngine.load`, but for the clock, which is `time.monotonic_ns`: it
                is the same in all processes.

        Raises:
            UnsupportedModel, OSError, ValueError: as `EmbeddedEngine.load`.
            EngineDied: the process ended while it loaded the model.
        """
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        check_config(config)  # which the child does too, seconds later
        child = Child({"folder": folder, **options})
        try:
            ready = child.answer()
            codec = TextCodec(AutoTokenizer.from_pretrained(folder, local_files_only=True))
        except BaseException:
            child.end()
            raise
        return cls(child, ready, codec, config, tables)

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine`."""
        return self._capabilities

    @property
    def pid(self) -> int:
        """Id of the process that computes."""
        return self._child.process.pid

    def open(self, row: int, work: GenerationWork) -> None:
        """See `Engine`. That the process is gone is no fault of this request: `execute` tells.

        Raises:
            ValueError: the prompt is empty.
        """
        self._child.send((wire.OPEN, row, wire.pack_work(work)))

    def close(self, row: int) -> None:
        """See `Engine`."""
        self._child.send((wire.CLOSE, row))

    def execute(self, decision: Decision) -> None:
        """See `Engine`.

        Raises:
            EngineDied: the process is gone.
        """
        rows, tables = decision.rows.copy(), np.empty((0, 0), np.int32)
        if rows.size:
            ends = decision.starts + decision.tokens
            tables = np.asarray(self._tables.tables(rows, ends), np.int32)
        if not self._child.send((wire.EXECUTE, *wire.pack_decision(decision, tables))):
            raise self._child.death()
        self._outstanding.append((rows, decision.epochs.copy()))

    def collect(self) -> StepResult:
        """See `Engine`.

        Raises:
            EngineDied: the process is gone, and with it the result.
        """
        rows, epochs = self._outstanding.popleft()
        return wire.unpack_result(self._child.take(wire.STEP), rows, epochs)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return self.codec.encode(text)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation; see `TextCodec.render_chat`."""
        return self.codec.render_chat(messages)

    def warm_up(self, tokens: int = 256) -> None:
        """See `EmbeddedEngine.warm_up`; nothing may be outstanding.

        Raises:
            EngineDied: the process is gone.
        """
        self._child.send((wire.WARM_UP, tokens))
        self._child.answer()

    def watch(self, on_death: Callable[[EngineDied], None]) -> None:
        """Have this called, on a thread of its own, when the process ends without having been told to.

        While nothing runs, nobody would notice otherwise until the next request is lost.
        """
        threading.Thread(
            target=self._child.watch, args=(on_death,), name="kaiseki-engine-watch", daemon=True
        ).start()

    def shutdown(self) -> None:
        """End the process; steps in flight are lost. Does nothing when it has ended already."""
        self._child.end()


class Child:
    """The process of an engine, and the line to it.

    It is started afresh rather than forked, since this process has threads, and without
    `multiprocessing.Process`, which would run the main script of whoever uses this a second time. It
    ends when the pipe is closed, however this process comes to its end.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Start loading an engine with these options of `EmbeddedEngine.load`."""
        ours, theirs = Pipe()
        entry = f"from kaiseki.engines.embedded.child import main; main({theirs.fileno()})"
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", entry],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"PYTHONPATH": path},
            )
        self._line = wire.Line(ours)
        self._ending = False
        self.send((options,))

    def send(self, message: wire.Message) -> bool:
        """Send a message; False when the process is gone."""
        try:
            self._line.send(message)
        except wire.Gone:
            return False
        return True

    def answer(self) -> wire.Message:
        """Wait until what was asked for is done; what goes wrong with it is raised here.

        Raises:
            EngineDied: the process is gone.
        """
        try:
            what, *details = self._line.receive()
        except wire.Gone:
            raise self.death() from None
        if what == wire.FAILED:
            error: Exception = details[0]
            raise error
        assert what == wire.DONE, what
        return tuple(details)

    def take(self, wanted: str) -> wire.Message:
        """Wait for a message of this kind, the only one that can come now.

        Raises:
            EngineDied: the process is gone, or broken.
        """
        try:
            what, *details = self._line.receive()
        except wire.Gone:
            raise self.death() from None
        if what == wire.FAILED:
            raise self._failure(details[0])
        assert what == wanted, what
        return tuple(details)

    def death(self) -> EngineDied:
        """The error to raise when the other end of the line has turned out to be closed."""
        try:
            while True:  # its last words may be behind results that nobody wants any more
                what, *details = self._line.receive()
                if what == wire.FAILED:
                    return self._failure(details[0])
        except wire.Gone:
            return EngineDied(f"the engine's process {self._how()}")

    def watch(self, on_death: Callable[[EngineDied], None]) -> None:
        """Wait for the end of the process, and tell unless it was asked for."""
        self.process.wait()
        if not self._ending:
            on_death(EngineDied(f"the engine's process {self._how()}"))

    def end(self) -> None:
        """Hang up and wait for the end."""
        self._ending = True
        self._line.close()
        self._wait()

    def _failure(self, error: Exception) -> EngineDied:
        """Of a process that could still say what went wrong."""
        return EngineDied(f"the engine's process failed: {type(error).__name__}: {error}")

    def _how(self) -> str:
        code = self._wait()
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def _wait(self) -> int:
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
