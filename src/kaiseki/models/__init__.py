"""Where model weights come from: fetching, converting and finding Hugging Face model folders."""

from kaiseki.models.fetch import DEFAULT_MODEL, KNOWN_MODELS, PulledModel, Source, pull
from kaiseki.models.gguf_folder import gguf_to_hf
from kaiseki.models.progress import Progress, quiet, terminal_progress
from kaiseki.models.resolve import resolve_model
from kaiseki.models.store import ModelError

__all__ = [
    "DEFAULT_MODEL",
    "KNOWN_MODELS",
    "ModelError",
    "Progress",
    "PulledModel",
    "Source",
    "gguf_to_hf",
    "pull",
    "quiet",
    "resolve_model",
    "terminal_progress",
]
