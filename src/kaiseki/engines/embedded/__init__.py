"""An engine in this process: any decoder-only Hugging Face model with plain causal attention.

What describes a generation is imported at once; the engine itself, and with it Torch, when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kaiseki.engines.embedded.work import GenerationWork, SamplingParams, TokenLogprob, TokenOutput

if TYPE_CHECKING:
    from kaiseki.engines.embedded.attention.interface import UnsupportedModel
    from kaiseki.engines.embedded.batch import BlockTables
    from kaiseki.engines.embedded.child_process import EngineDied
    from kaiseki.engines.embedded.engine import EmbeddedEngine
    from kaiseki.engines.embedded.process import ProcessEngine

__all__ = [
    "BlockTables",
    "EmbeddedEngine",
    "EngineDied",
    "GenerationWork",
    "ProcessEngine",
    "SamplingParams",
    "TokenLogprob",
    "TokenOutput",
    "UnsupportedModel",
]

_LATER = {
    "BlockTables": "batch",
    "EmbeddedEngine": "engine",
    "EngineDied": "child_process",
    "ProcessEngine": "process",
    "UnsupportedModel": "attention.interface",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
