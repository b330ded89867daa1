"""Models as a cost model sees them: layer sizes, and what follows from them."""

from __future__ import annotations

from typing import NamedTuple, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from kaiseki.cost.cards import BYTES, Precision, Strict
from kaiseki.cost.catalogue import described, names


class Experts(Strict):
    """A mixture of experts in place of the feed-forward block.

    Attributes:
        experts: routed experts of a layer; active: of these, how many a token visits.
        shared: experts that every token visits.
        ffn: width of one expert.
        dense_layers: how many layers, from the first, have an ordinary feed-forward block.
    """

    experts: PositiveInt
    active: PositiveInt
    shared: NonNegativeInt = 0
    ffn: PositiveInt
    dense_layers: NonNegativeInt = 0


class Latent(Strict):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values in one vector.

    Attributes:
        query_rank: width queries are projected down to; none if they are not.
        kv_rank: width of the vector kept instead of keys and values; rope_dim: of the rotary part
            kept beside it.
        nope_dim, value_dim: widths of a head's keys without the rotary part, and of its values.
    """

    query_rank: PositiveInt | None = None
    kv_rank: PositiveInt
    rope_dim: PositiveInt
    nope_dim: PositiveInt
    value_dim: PositiveInt


class ModelShape(Strict):
    """Layer sizes of a decoder with gated feed-forward blocks.

    Attributes:
        ffn: width of a dense feed-forward block.
        weights, kv: precision of the weights and of the KV cache; activations are bf16.
        context_tokens: the longest context it was made for.
        sources: where each figure comes from, by its dotted path.
    """

    id: str = "custom"
    name: str = "custom"
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    ffn: PositiveInt
    vocabulary: PositiveInt
    context_tokens: PositiveInt
    tied_embeddings: bool
    weights: Precision = "bf16"
    kv: Precision = "bf16"
    moe: Experts | None = None
    mla: Latent | None = None
    sources: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: {self.heads} is no multiple of kv_heads: {self.kv_heads}")
        if self.moe and self.moe.active > self.moe.experts:
            raise ValueError(f"moe.active: {self.moe.active} is more than moe.experts: {self.moe.experts}")
        if self.moe and self.moe.dense_layers > self.layers:
            raise ValueError(f"moe.dense_layers: {self.moe.dense_layers} is more than layers: {self.layers}")
        return self

    @property
    def moe_layers(self) -> int:
        """Layers with a mixture of experts."""
        return self.layers - self.moe.dense_layers if self.moe else 0

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV one token leaves in the whole model, without copies between cards."""
        return self.layers * layer_kv_numbers(self, tp=1) * BYTES[self.kv]

    @property
    def parameters(self) -> int:
        """Weights of all projections, experts and embeddings; norms and biases are left out."""
        attention = sum(m.numbers for m in attention_matrices(self, tp=1))
        total = self.layers * attention + embedding_numbers(self, tp=1)
        total += (self.layers - self.moe_layers) * sum(m.numbers for m in ffn_matrices(self, self.ffn, tp=1))
        if self.moe:
            expert = sum(m.numbers for m in ffn_matrices(self, self.moe.ffn, tp=1))
            visited = self.moe.experts + self.moe.shared
            total += self.moe_layers * (visited * expert + self.hidden * self.moe.experts)
        return total


class Matrix(NamedTuple):
    """A projection as one card holds it."""

    name: str
    inputs: int
    outputs: int

    @property
    def numbers(self) -> int:
        """How many weights."""
        return self.inputs * self.outputs


def attention_matrices(model: ModelShape, tp: int) -> list[Matrix]:
    """Projections of one attention block, on one of `tp` cards that share the heads.

    KV heads are copied where there are fewer than cards, and so is what MLA projects down to.
    """
    heads, hidden, mla = share(model.heads, tp), model.hidden, model.mla
    if mla is None:
        outputs = (heads + 2 * share(model.kv_heads, tp)) * model.head_dim
        return [Matrix("qkv", hidden, outputs), Matrix("attention_out", heads * model.head_dim, hidden)]
    width = heads * (mla.nope_dim + mla.rope_dim)
    if mla.query_rank is None:
        query = [Matrix("query", hidden, width)]
    else:
        query = [Matrix("query_down", hidden, mla.query_rank), Matrix("query_up", mla.query_rank, width)]
    return [
        *query,
        Matrix("kv_down", hidden, mla.kv_rank + mla.rope_dim),
        Matrix("kv_up", mla.kv_rank, heads * (mla.nope_dim + mla.value_dim)),
        Matrix("attention_out", heads * mla.value_dim, hidden),
    ]


def ffn_matrices(model: ModelShape, width: int, tp: int) -> list[Matrix]:
    """Projections of one gated feed-forward block of this width, on one of `tp` cards."""
    part = share(width, tp)
    return [Matrix("ffn_in", model.hidden, 2 * part), Matrix("ffn_out", part, model.hidden)]


def embedding_numbers(model: ModelShape, tp: int) -> int:
    """Weights of the embedding and of the output projection, on one of `tp` cards."""
    return (1 if model.tied_embeddings else 2) * share(model.vocabulary, tp) * model.hidden


def layer_kv_numbers(model: ModelShape, tp: int) -> int:
    """Numbers of KV one token leaves in one layer on one of `tp` cards."""
    if model.mla:
        return model.mla.kv_rank + model.mla.rope_dim
    return 2 * share(model.kv_heads, tp) * model.head_dim


def share(whole: int, parts: int) -> int:
    """The larger share when `whole` things are dealt to `parts` cards."""
    return -(-whole // parts)


def model_names() -> tuple[str, ...]:
    """The models that are described."""
    return names("models")


def named_model(name: str) -> ModelShape:
    """The model of this name.

    Raises:
        UnknownName: no such model; the message lists those there are.
    """
    return ModelShape.model_validate(described("models", name))
