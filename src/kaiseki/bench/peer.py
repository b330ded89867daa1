"""Another engine in a process of its own, stopped whenever it is not its turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

SCRIPTS = {"vllm": Path(__file__).with_name("vllm_peer.py")}
STOP_TIMEOUT_S = 10.0
TAIL_LINES = 20


class PeerFailed(RuntimeError):
    """The peer did not start or broke; the message has the end of its log."""


class Peer(Protocol):
    """An engine that decodes a batch step by step, or computes one prompt, and says how long it took."""

    def open(self, prompts: list[list[int]]) -> None:
        """Begin sequences and compute their prompts and first tokens."""
        ...

    def step(self, steps: int) -> tuple[int, float]:
        """Decode all sequences so many times: (tokens, seconds)."""
        ...

    def prefill(self, prompt: list[int]) -> tuple[int, float]:
        """Compute one prompt up to its first token: (tokens, seconds)."""
        ...

    def close(self) -> None:
        """End the sequences."""
        ...

    def shutdown(self) -> None:
        """End the engine."""
        ...


class ProcessPeer:
    """A peer over a line protocol; see `vllm_peer` for the other side.

    Its processes are stopped (SIGSTOP) between commands, since engines like to spin when idle.

    Args:
        command: what to run.
        threads: CPUs that it may compute on.
    """

    def __init__(self, command: list[str], threads: int) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in shutdown
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | _environment(threads),
            start_new_session=True,
        )
        try:
            self._answer()
        except BaseException:
            self.shutdown()
            raise
        self._signal(signal.SIGSTOP)

    def open(self, prompts: list[list[int]]) -> None:
        """See `Peer`."""
        self.ask({"do": "open", "prompts": prompts})

    def step(self, steps: int) -> tuple[int, float]:
        """See `Peer`."""
        return _figures(self.ask({"do": "step", "steps": steps}))

    def prefill(self, prompt: list[int]) -> tuple[int, float]:
        """See `Peer`."""
        return _figures(self.ask({"do": "prefill", "prompt": prompt}))

    def close(self) -> None:
        """See `Peer`."""
        self.ask({"do": "close"})

    def shutdown(self) -> None:
        """See `Peer`."""
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self._signal(signal.SIGKILL)  # its workers too
        self._process.wait()
        self._log.close()

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Have it do something while it runs, and return its answer.

        Raises:
            PeerFailed: it ended instead.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            tail = self._log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
            raise PeerFailed("the peer ended; the end of its log:\n" + "\n".join(tail))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _figures(answer: dict[str, Any]) -> tuple[int, float]:
    return answer["tokens"], answer["seconds"]


def start_peer(spec: str, folder: Path, threads: int, rows: int, tokens: int) -> ProcessPeer:
    """Start an engine given as `vllm:PYTHON`.

    Raises:
        ValueError: the specification is not understood.
        PeerFailed: it did not start.
    """
    sizes = ["--rows", str(rows), "--tokens", str(tokens)]
    return start_script(spec, SCRIPTS, ["--model", str(folder), *sizes], threads)


def start_script(spec: str, scripts: Mapping[str, Path], arguments: list[str], threads: int) -> ProcessPeer:
    """Start the script of the kind that `vllm:PYTHON` names, with that Python.

    Raises:
        ValueError: the specification is not understood.
        PeerFailed: it did not start.
    """
    kind, _, python = spec.partition(":")
    if kind not in scripts or not python:
        raise ValueError(f"{spec!r}: expected {' or '.join(scripts)}, a colon and the Python that has it")
    try:
        return ProcessPeer([python, str(scripts[kind]), *arguments], threads)
    except OSError as error:
        raise PeerFailed(f"{python}: {error.strerror}") from error


def _environment(threads: int) -> dict[str, str]:
    """Offline, in one place, on so many CPUs; vLLM would keep one free for itself otherwise."""
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
