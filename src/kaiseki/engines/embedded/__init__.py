"""An engine in this process: any decoder-only Hugging Face model with plain causal attention."""

from kaiseki.engines.embedded.attention.interface import UnsupportedModel
from kaiseki.engines.embedded.batch import BlockTables
from kaiseki.engines.embedded.engine import EmbeddedEngine
from kaiseki.engines.embedded.work import GenerationWork, SamplingParams, TokenLogprob, TokenOutput

__all__ = [
    "BlockTables",
    "EmbeddedEngine",
    "GenerationWork",
    "SamplingParams",
    "TokenLogprob",
    "TokenOutput",
    "UnsupportedModel",
]
