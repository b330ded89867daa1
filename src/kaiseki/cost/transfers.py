"""What it takes to move KV and adapters: latency plus bytes over bandwidth of the link."""

from __future__ import annotations

from kaiseki.cost.capacity import kv_bytes_per_token
from kaiseki.cost.cards import BYTES, Link
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.model_shape import attention_matrices, ffn_matrices


def link_ns(link: Link, size_bytes: float) -> float:
    """Time of one message, ns."""
    return link.latency_us * 1e3 + size_bytes / link.gb_s


def swap_ns(deployment: Deployment, tokens: int) -> float:
    """Moving the KV of so many tokens to or from host memory, ns: all cards at once, each its part."""
    return link_ns(deployment.card.host, tokens * kv_bytes_per_token(deployment))


def move_ns(deployment: Deployment, tokens: int, link: Link) -> float:
    """Moving the KV of so many tokens to another replica over one link that all cards share, ns."""
    return link_ns(link, tokens * deployment.model.kv_bytes_per_token)


def lora_bytes(deployment: Deployment, rank: int) -> float:
    """An adapter of this rank on all projections of attention and dense blocks, bytes on one card.

    Two matrices per projection, [inputs, rank] and [rank, outputs], in bf16, of the card's part of the
    projection.

    Raises:
        ValueError: rank is not positive.
    """
    if rank < 1:
        raise ValueError(f"rank: {rank} must be 1 or more")
    model, tp = deployment.model, deployment.tp
    matrices = attention_matrices(model, tp)
    if model.moe is None:
        matrices += ffn_matrices(model, model.ffn, tp)
    numbers = rank * sum(m.inputs + m.outputs for m in matrices)
    return deployment.most_layers * numbers * BYTES["bf16"]


def lora_load_ns(deployment: Deployment, rank: int) -> float:
    """Loading an adapter of this rank from host memory, ns; every card loads its part at once."""
    return link_ns(deployment.card.host, lora_bytes(deployment, rank))
