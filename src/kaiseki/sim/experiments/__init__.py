"""Experiments by name: reported figures beside ours, whatever they are."""

from kaiseki.sim.experiments import (
    baseline_a,
    baseline_b,
    baseline_c,
    chunk_size,
    energy,
    hetero,
    large_prompts,
    preemption_asymmetry,
    remote_links,
    request_level,
    urgency_match,
    wan,
)
from kaiseki.sim.experiments.rows import Experiment, Row

EXPERIMENTS: dict[str, Experiment] = {
    module.__name__.rsplit(".", 1)[-1].replace("_", "-"): module.EXPERIMENT
    for module in (
        baseline_a,
        baseline_b,
        baseline_c,
        chunk_size,
        preemption_asymmetry,
        large_prompts,
        remote_links,
        request_level,
        urgency_match,
        wan,
        hetero,
        energy,
    )
}

__all__ = ["EXPERIMENTS", "Experiment", "Row"]
