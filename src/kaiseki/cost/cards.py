"""Cards: what a datasheet says of an accelerator, and how much of it kernels reach."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from kaiseki.cost.catalogue import described, names

Precision = Literal["fp32", "bf16", "fp8", "int8", "int4"]

BYTES: dict[Precision, float] = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes per number. Scales of quantised formats (a few per cent) are left out."""

Share = Field(gt=0, le=1)


class Strict(BaseModel):
    """A frozen description that accepts no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Link(Strict):
    """A connection: bandwidth one way, GB/s (1e9 bytes), and latency of one message, microseconds."""

    gb_s: PositiveFloat
    latency_us: NonNegativeFloat


class Efficiency(Strict):
    """How much of the datasheet's figures kernels reach; shared by all models on a card.

    Attributes:
        gemm_compute, gemm_memory: of peak FLOP/s and of memory bandwidth, in matrix products.
        attention_compute, attention_memory: the same in attention.
        elementwise_memory: of memory bandwidth, in norms, residuals, rotary embedding, activation.
        link: of the link's bandwidth, in collectives.
        serial: of the shorter of compute and memory time, the part that does not overlap the longer.
        kernel_us: fixed time of one kernel: start, ramp, tail and the gap to the next.
    """

    gemm_compute: float = Share
    gemm_memory: float = Share
    attention_compute: float = Share
    attention_memory: float = Share
    elementwise_memory: float = Share
    link: float = Share
    serial: float = Field(ge=0, le=1)
    kernel_us: NonNegativeFloat


class Card(Strict):
    """One accelerator.

    Attributes:
        units: streaming multiprocessors, compute units or cores.
        memory_gib: device memory, GiB.
        memory_gb_s: its bandwidth, GB/s (1e9 bytes).
        tflops: dense FLOP/s by precision, 1e12.
        peers: the link between cards of one node; host: the link to the host's memory.
        cards_per_node: how many cards `peers` connects.
        usd_per_hour: list price of one card.
        sources: where each figure comes from, by its dotted path.
    """

    id: str
    name: str
    units: PositiveInt
    clock_mhz: PositiveFloat
    memory_gib: PositiveFloat
    memory_gb_s: PositiveFloat
    tflops: dict[Precision, PositiveFloat]
    idle_watts: NonNegativeFloat
    peak_watts: PositiveFloat
    peers: Link
    host: Link
    cards_per_node: PositiveInt
    usd_per_hour: PositiveFloat
    efficiency: Efficiency
    sources: dict[str, str]

    def flops(self, weights: Precision) -> float:
        """Peak FLOP/s of products with weights of this precision.

        Where the card has no units for it, weights are widened on the way and the product runs in
        bf16, as weight-only quantised kernels do.
        """
        return self.tflops.get(weights, self.tflops["bf16"]) * 1e12


def card_names() -> tuple[str, ...]:
    """The cards that are described."""
    return names("cards")


def load_card(name: str) -> Card:
    """The card of this name.

    Raises:
        UnknownName: no such card; the message lists those there are.
    """
    return Card.model_validate(described("cards", name))
