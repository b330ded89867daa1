"""What fits in a card's memory: weights, working space, and the KV blocks that remain."""

from __future__ import annotations

from kaiseki.cost.cards import BYTES
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.model_shape import (
    attention_matrices,
    embedding_numbers,
    ffn_matrices,
    layer_kv_numbers,
    share,
)


class DoesNotFit(ValueError):
    """The weights leave no room for KV; the message has the numbers."""


def weight_bytes(deployment: Deployment) -> float:
    """Weights on the fullest card, bytes; embeddings and router in bf16."""
    return max(_stage_bytes(deployment, stage) for stage in range(deployment.pp))


def _stage_bytes(deployment: Deployment, stage: int) -> float:
    model, tp = deployment.model, deployment.tp
    layers, dense = len(deployment.stage_layers(stage)), deployment.stage_dense_layers(stage)
    block = sum(m.numbers for m in attention_matrices(model, tp)) * layers
    block += sum(m.numbers for m in ffn_matrices(model, model.ffn, tp)) * dense
    wide = 0
    if model.moe:
        expert = sum(m.numbers for m in ffn_matrices(model, model.moe.ffn, tp))
        block += expert * (model.moe.experts + model.moe.shared) * (layers - dense)
        wide += model.hidden * model.moe.experts * (layers - dense)
    ends = {0, deployment.pp - 1}
    if stage in ends:
        table = share(model.vocabulary, tp) * model.hidden
        wide += embedding_numbers(model, tp) if len(ends) == 1 else table
    return block * BYTES[model.weights] + wide * BYTES["bf16"]


def activation_bytes(deployment: Deployment, step_tokens: int, sequences: int) -> float:
    """Working space of one step, bytes on one card.

    Four vectors of the hidden size per token (residual, input, output, norm) beside the larger of
    the attention's projections and the feed-forward block's in bf16, and logits of every sequence in
    fp32: what is alive at once when buffers are used again layer by layer.
    """
    model, tp = deployment.model, deployment.tp
    attention = sum(m.outputs for m in attention_matrices(model, tp))
    if model.moe:
        one = sum(m.outputs for m in ffn_matrices(model, model.moe.ffn, tp))
        block = max(attention, (model.moe.active + model.moe.shared) * one)
    else:
        block = max(attention, sum(m.outputs for m in ffn_matrices(model, model.ffn, tp)))
    logits = sequences * (1 + deployment.draft_tokens) * share(model.vocabulary, tp) * BYTES["fp32"]
    return step_tokens * (4 * model.hidden + block) * BYTES["bf16"] + logits


def kv_bytes_per_token(deployment: Deployment) -> float:
    """KV of one token on the fullest card, bytes: copies for tensor parallelism included."""
    return (
        deployment.most_layers
        * layer_kv_numbers(deployment.model, deployment.tp)
        * BYTES[deployment.model.kv]
    )


def kv_blocks(
    deployment: Deployment,
    block_tokens: int = 16,
    step_tokens: int = 8192,
    sequences: int = 256,
    memory_share: float = 0.9,
) -> int:
    """KV blocks a replica can keep: each has a part on every card.

    Args:
        block_tokens: tokens per block.
        step_tokens, sequences: most tokens and sequences of a step, for its working space.
        memory_share: of the card's memory that is used at all; the rest is for driver, libraries
            and fragmentation.

    Raises:
        DoesNotFit: not one block fits.
    """
    usable = deployment.card.memory_gib * 2**30 * memory_share
    weights = weight_bytes(deployment)
    working = activation_bytes(deployment, step_tokens, sequences)
    blocks = int((usable - weights - working) // (block_tokens * kv_bytes_per_token(deployment)))
    if blocks < 1:
        raise DoesNotFit(
            f"{deployment.model.name} on {deployment.tp} x {deployment.pp} {deployment.card.name}: weights "
            f"{weights / 2**30:.1f} GiB and working space {working / 2**30:.1f} GiB per card leave no "
            f"KV block in the {usable / 2**30:.1f} GiB that may be used"
        )
    return blocks
