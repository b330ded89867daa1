"""Starting the process of an engine, and the line to it; light, so that it can be started before all else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe

from kaiseki.engines.embedded import wire

END_S = 10.0
"""How long the process may take to end once the pipe is closed; then it is killed."""


class EngineDied(RuntimeError):
    """The engine's process is gone; the message says how it ended."""


class Child:
    """The process of an engine, and the line to it.

    It is started afresh rather than forked, since this process has threads, and without
    `multiprocessing.Process`, which would run the main script of whoever uses this a second time. It
    ends when the pipe is closed, however this process comes to its end.
    """

    def __init__(self) -> None:
        """Start it. It loads its libraries, and then waits for the options of `EmbeddedEngine.load`."""
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
