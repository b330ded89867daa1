"""The embedded engine in a process of its own.

A forward takes the interpreter's lock again after each of its hundreds of operations. Beside a busy HTTP
server it waits for that lock again and again; in a process of its own it has the interpreter to itself,
and when it ends the server is still there to say so.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer

from kaiseki.core.decision import I32, Decision, StepResult
from kaiseki.core.protocols import Capabilities
from kaiseki.engines.embedded import wire
from kaiseki.engines.embedded.batch import BlockTables
from kaiseki.engines.embedded.checks import check_config
from kaiseki.engines.embedded.child_process import Child, EngineDied
from kaiseki.engines.embedded.text import TextCodec
from kaiseki.engines.embedded.work import GenerationWork


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
    def load(
        cls, folder: str | Path, *, tables: BlockTables, child: Child | None = None, **options: Any
    ) -> ProcessEngine:
        """Load a Hugging Face model folder in a new process.

        Args:
            child: the process, started before by who had something else to do meanwhile.
            tables: block tables of rows, asked when a decision is executed.
            options: as for `EmbeddedEngine.load`, but for the clock, which is `time.monotonic_ns`: it
                is the same in all processes.

        Raises:
            UnsupportedModel, OSError, ValueError: as `EmbeddedEngine.load`.
            EngineDied: the process ended while it loaded the model.
        """
        child = child or Child()
        try:
            child.send(({"folder": folder, **options},))
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            check_config(config)  # which the child does too, seconds later
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
