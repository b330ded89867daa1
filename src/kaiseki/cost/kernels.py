"""The kernels of an iteration: operations and bytes of each as linear forms of the features.

A form is float64[N_FORM]: the features of `kaiseki.core.protocols`, then `EXPERTS`, the number of
distinct experts of a layer that the batch visits. All are per card. Counts of operations follow
from the layer shapes (a product of [m, k] and [k, n] takes 2mkn); bytes are those that must cross the
memory interface once: weights, inputs, outputs, KV.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from kaiseki.core.decision import F64
from kaiseki.core.protocols import (
    F_CHUNKS,
    F_CONTEXT,
    F_DECODES,
    F_PAIRS,
    F_PREFIX,
    F_SLOT,
    F_TOKENS,
    N_FEATURES,
)
from kaiseki.cost.cards import BYTES, Precision
from kaiseki.cost.deployment import Deployment
from kaiseki.cost.model_shape import (
    Matrix,
    ModelShape,
    attention_matrices,
    ffn_matrices,
    layer_kv_numbers,
    share,
)

EXPERTS = N_FEATURES
N_FORM = N_FEATURES + 1
Family = Literal["gemm", "attention", "elementwise", "all_reduce", "send"]
Block = Literal["embedding", "attention", "dense", "moe", "head", "send"]

_ACTIVATION = BYTES["bf16"]
_NORMS = 8
"""Numbers per hidden unit that two norms with residual move: each reads and writes two."""


class Kernel(NamedTuple):
    """One kernel of a block, or several alike.

    Attributes:
        launches: how many kernels are started.
        precision: of the weights it multiplies with.
        flops, traffic: forms, float64[N_FORM]: operations, and bytes moved (through memory, or for
            `all_reduce` and `send` over the link).
    """

    name: str
    block: Block
    family: Family
    launches: int
    precision: Precision
    flops: F64
    traffic: F64


def form(**parts: float) -> F64:
    """The form with these coefficients, the others 0."""
    made = np.zeros(N_FORM)
    for name, value in parts.items():
        made[_PLACES[name]] += value
    return made


_PLACES = {
    "slot": F_SLOT,
    "decodes": F_DECODES,
    "chunks": F_CHUNKS,
    "tokens": F_TOKENS,
    "context": F_CONTEXT,
    "pairs": F_PAIRS,
    "prefix": F_PREFIX,
    "experts": EXPERTS,
}


def kernels(deployment: Deployment) -> list[Kernel]:
    """The kernels of one layer of each sort, of embedding and head, and of a send between stages."""
    model, tp = deployment.model, deployment.tp
    queries = 1.0 + deployment.draft_tokens
    tokens = form(decodes=queries, tokens=1)
    made = [
        _elementwise("embedding", "embedding", 1, 2 * model.hidden * tokens),
        *_attention(model, tp, tokens, queries),
        *_dense(model, tp, tokens),
        *_mixture(model, tp, tokens),
        *_head(model, tp, form(decodes=queries, chunks=1)),
    ]
    if tp > 1:
        ring = 2 * (tp - 1) / tp * model.hidden * _ACTIVATION * tokens
        blocks: tuple[Block, ...] = ("attention", "dense", "moe")
        made += [Kernel("all_reduce", block, "all_reduce", 1, "bf16", form(), ring) for block in blocks]
    made.append(Kernel("send", "send", "send", 1, "bf16", form(), model.hidden * _ACTIVATION * tokens))
    return made


def _gemm(block: Block, matrix: Matrix, rows: F64, precision: Precision) -> Kernel:
    """The product of `rows` (a form) with a matrix: weights once, inputs and outputs once."""
    weights = form(slot=matrix.numbers * BYTES[precision])
    moved = (matrix.inputs + matrix.outputs) * _ACTIVATION * rows
    return Kernel(matrix.name, block, "gemm", 1, precision, 2.0 * matrix.numbers * rows, weights + moved)


def _elementwise(name: str, block: Block, launches: int, numbers: F64) -> Kernel:
    return Kernel(name, block, "elementwise", launches, "bf16", form(), numbers * _ACTIVATION)


def _attention(model: ModelShape, tp: int, tokens: F64, queries: float) -> list[Kernel]:
    """Projections, norms, rotary embedding, writing KV, and attention itself.

    One launch serves decodes and chunks, so only the first of the two attention kernels counts one.
    """
    heads, kv = share(model.heads, tp), layer_kv_numbers(model, tp)
    made = [_gemm("attention", m, tokens, model.weights) for m in attention_matrices(model, tp)]
    rotated = 2 * (heads * model.head_dim + kv) + kv
    made.append(_elementwise("norms_rope", "attention", 4, (_NORMS * model.hidden + rotated) * tokens))
    if model.mla is None:
        per_pair = 4.0 * heads * model.head_dim
        one_query, prefill = per_pair, form(pairs=per_pair)
        answers = 2 * heads * model.head_dim * _ACTIVATION
    else:
        # A decode works on the compressed vectors (weights absorbed); a chunk expands what it reads.
        mla = model.mla
        one_query = 2.0 * heads * (2 * mla.kv_rank + mla.rope_dim)
        expanded = mla.nope_dim + mla.value_dim
        prefill = form(
            pairs=2.0 * heads * (expanded + mla.rope_dim), prefix=2.0 * mla.kv_rank * heads * expanded
        )
        answers = heads * (expanded + mla.rope_dim) * _ACTIVATION
    stored = kv * BYTES[model.kv]
    decode_bytes = form(context=stored, decodes=queries * answers)
    prefill_bytes = form(prefix=stored, tokens=stored + answers)
    decode_flops = form(context=queries * one_query)
    return [
        *made,
        Kernel("decode_attention", "attention", "attention", 1, "bf16", decode_flops, decode_bytes),
        Kernel("prefill_attention", "attention", "attention", 0, "bf16", prefill, prefill_bytes),
    ]


def _dense(model: ModelShape, tp: int, tokens: F64) -> list[Kernel]:
    made = [_gemm("dense", m, tokens, model.weights) for m in ffn_matrices(model, model.ffn, tp)]
    return [*made, _elementwise("activation", "dense", 1, 3 * share(model.ffn, tp) * tokens)]


def _mixture(model: ModelShape, tp: int, tokens: F64) -> list[Kernel]:
    """Router, grouped products over the experts visited, shared experts, moving tokens to and fro."""
    moe = model.moe
    if moe is None:
        return []
    made = [_gemm("moe", Matrix("router", model.hidden, moe.experts), tokens, "bf16")]
    for m in ffn_matrices(model, moe.ffn, tp):
        flops = 2.0 * m.numbers * moe.active * tokens
        moved = (m.inputs + m.outputs) * moe.active * _ACTIVATION * tokens
        weights = form(experts=m.numbers * BYTES[model.weights])
        made.append(Kernel(f"experts_{m.name}", "moe", "gemm", 1, model.weights, flops, weights + moved))
    if moe.shared:
        shared = ffn_matrices(model, moe.shared * moe.ffn, tp)
        made += [_gemm("moe", m._replace(name=f"shared_{m.name}"), tokens, model.weights) for m in shared]
    activated = 3 * share(moe.ffn, tp) * (moe.active + moe.shared)
    gathered = 4 * moe.active * model.hidden  # there and back, each read and written
    made.append(_elementwise("routing", "moe", 4, (activated + gathered) * tokens))
    return made


def _head(model: ModelShape, tp: int, rows: F64) -> list[Kernel]:
    """Output projection and sampling, for every decode and verified token and one row of each chunk."""
    part = share(model.vocabulary, tp)
    product = _gemm("head", Matrix("head", model.hidden, part), rows, "bf16")
    return [product, _elementwise("sampling", "head", 3, (4 * part + 4 * model.hidden) * rows)]
