"""The engine's own process: what runs at the other end of `ProcessEngine`."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from kaiseki.core.decision import I32, StepResult, empty_i32
from kaiseki.engines.embedded import wire
from kaiseki.engines.openmp import spin_briefly

if TYPE_CHECKING:
    from kaiseki.engines.embedded.engine import EmbeddedEngine

log = logging.getLogger(__name__)

SWITCH_S = 0.0005
"""How long a step may hold the interpreter while the next decision waits to be taken in, and vice versa."""


def main(descriptor: int) -> NoReturn:
    """Serve the process at the other end of a pipe until it hangs up or is gone, then end at once.

    Signals that end a server are for the parent, which drains; a Ctrl-C in a terminal reaches both.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    spin_briefly()  # before Torch is loaded
    sys.setswitchinterval(SWITCH_S)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    line = wire.Line(Connection(descriptor))
    code = 0
    try:
        _serve(line)
    except wire.Gone:
        pass
    except Exception as error:
        log.exception("the engine's process failed")
        code = 1
        _report(line, error)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End without waiting for a step that nobody wants any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(line: wire.Line) -> None:
    try:
        tables = SentTables()
        load = _loader()  # takes seconds, in which the parent has other things to do
        engine = load(**line.receive()[0], tables=tables)
    except Exception as error:
        if isinstance(error, wire.Gone):
            raise
        _report(line, error)
        return
    _keep()
    line.send((wire.DONE, engine.capabilities, engine.shape, engine.eos))
    Servant(line, engine, tables).run()


def _loader() -> Callable[..., EmbeddedEngine]:
    from transformers.utils import logging as transformers_logging

    from kaiseki.engines.embedded.engine import EmbeddedEngine

    transformers_logging.disable_progress_bar()
    return EmbeddedEngine.load


def _keep() -> None:
    """What is loaded stays: looking through it for garbage would stop a step for a quarter second."""
    gc.collect()
    gc.freeze()


def _report(line: wire.Line, error: Exception) -> None:
    """Tell the parent of an error that ends this process."""
    with suppress(wire.Gone):
        line.send((wire.FAILED, portable(error)))


def portable(error: Exception) -> Exception:
    """The error itself if it survives being sent, otherwise the nearest one of a plain kind."""
    try:
        again = pickle.loads(pickle.dumps(error))
        if type(again) is type(error) and str(again) == str(error):
            return error
    except Exception:
        log.debug("%s cannot be sent", type(error).__name__)
    for kind in (OSError, ValueError):
        if isinstance(error, kind):
            return kind(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


class SentTables:
    """Stands in for the memory pool: the tables that came with the decision which is being started."""

    def __init__(self) -> None:
        self.sent: I32 = empty_i32()

    def tables(self, rows: I32, ends: I32) -> I32:
        """See `BlockTables`."""
        return self.sent


class Servant:
    """Does what comes down the line, in order.

    Results are sent by the thread that runs the steps, each before the next step begins; everything else
    happens on the thread that receives, so that whoever sends is not kept waiting by a step.
    """

    def __init__(self, line: wire.Line, engine: EmbeddedEngine, tables: SentTables) -> None:
        """`tables` are the engine's."""
        self._line = line
        self._engine = engine
        self._tables = tables

    def run(self) -> NoReturn:
        """Go on for ever.

        Raises:
            Gone: the other end hung up.
        """
        while True:
            self._obey(*self._line.receive())

    def _obey(self, what: str, *details: Any) -> None:
        if what == wire.EXECUTE:
            decision, self._tables.sent = wire.unpack_decision(details)
            self._engine.start(decision).add_done_callback(self._send_result)
        elif what == wire.OPEN:
            self._engine.open(*details)
        elif what == wire.CLOSE:
            self._engine.close(*details)
        elif what == wire.WARM_UP:
            self._engine.warm_up(*details)
            _keep()
            self._line.send((wire.DONE,))
        else:
            raise AssertionError(what)

    def _send_result(self, future: Future[StepResult]) -> None:
        """Send a result; whatever goes wrong here would be lost, and the other end wait for ever."""
        try:
            self._line.send((wire.STEP, *wire.pack_result(future.result())))
        except wire.Gone:
            _leave(0)
        except BaseException as error:
            log.exception("the engine's process failed")
            _report(self._line, error if isinstance(error, Exception) else RuntimeError(repr(error)))
            _leave(1)
