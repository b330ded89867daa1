"""Another system's scheduler under the load of the main case of `kaiseki bench decide`, in turn with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kaiseki.bench.peer import ProcessPeer, start_script
from kaiseki.bench.replica import MAX_TOKENS, PAGE, PROMPT_TOKENS
from kaiseki.observe.percentiles import percentiles

SCRIPTS = {"vllm": Path(__file__).with_name("vllm_scheduler_peer.py")}


class SchedulerPeer:
    """Collects what the slots of a scheduler in another process took; see `vllm_scheduler_peer`."""

    def __init__(self, process: ProcessPeer) -> None:
        self._process = process
        self._lists: dict[str, list[float]] = {"schedule_us": [], "update_us": [], "submit_us": []}
        self._last: dict[str, Any] = {}

    def slots(self, many: int) -> None:
        """Have it do so many slots."""
        self._last = self._process.ask({"do": "slots", "slots": many})
        for name, times in self._lists.items():
            times += self._last[name]

    def compare(self, ours: dict[str, Any]) -> dict[str, Any]:
        """Its figures, and how many times as long it takes as `ours`, medians of a slot.

        `ratio` is that of deciding and taking in a result alone, `ratio_total` has arrivals with it.
        """
        lists, many = self._lists, ours["churn"]
        slot = [a + b for a, b in zip(lists["schedule_us"], lists["update_us"], strict=True)]
        total = [a + many * b for a, b in zip(slot, lists["submit_us"], strict=True)]
        figures = {name: percentiles(times) for name, times in lists.items()}
        figures |= {"slot_us": percentiles(slot), "total_us": percentiles(total)}
        return {
            "name": self._last["name"],
            "running": self._last["running"],
            "waiting": self._last["waiting"],
            "slots": len(slot),
            **figures,
            "ratio": figures["slot_us"]["p50"] / ours["slot_us"]["p50"],
            "ratio_total": figures["total_us"]["p50"] / ours["total_us"]["p50"],
        }

    def shutdown(self) -> None:
        """End it."""
        self._process.shutdown()


def start_scheduler_peer(spec: str, running: int, waiting: int, churn: int) -> SchedulerPeer:
    """Start a peer given as `vllm:PYTHON`, with so many requests running and waiting.

    Raises:
        ValueError: the specification is not understood.
        PeerFailed: it did not start.
    """
    sizes = {
        "running": running,
        "waiting": waiting,
        "churn": churn,
        "prompt": PROMPT_TOKENS,
        "output": MAX_TOKENS,
        "page": PAGE,
    }
    arguments = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    return SchedulerPeer(start_script(spec, SCRIPTS, arguments, threads=1))
