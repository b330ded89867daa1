"""Kaiseki inside vLLM: `vllm serve MODEL --scheduler-cls kaiseki.engines.vllm.KaisekiScheduler`.

vLLM keeps its kernels, block manager, connectors, speculation, adapters and multimodal paths; our core
says who runs, how much, in which order, and who is stopped. Everything of vLLM that this relies on is
named in `adapter`.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`KaisekiScheduler`, imported when it is asked for: the rest of Kaiseki runs without vLLM."""
    if name == "KaisekiScheduler":
        from kaiseki.engines.vllm.scheduler import KaisekiScheduler

        return KaisekiScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
