"""One replica: a model on cards, how it is split, and what its host costs."""

from __future__ import annotations

from dataclasses import dataclass

from kaiseki.cost.cards import Card
from kaiseki.cost.model_shape import ModelShape, share

EAGER_LAUNCH_US = 15.0
"""Time between kernels when Python launches each: 10 to 20 microseconds are usual in eager PyTorch."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Time of an iteration that the host adds and the cards wait for; nothing, if it works beside them.

    Attributes:
        base_us: per iteration.
        per_card_us: per iteration and card of a stage, where one process sends each its inputs.
        per_token_us: per token computed (verified draft tokens too).
        per_sequence_us: per decode and per prefill chunk: sampling, detokenising, block tables.
        per_pair_ns: per query-key pair of prefill that every card works on alike, such as masks that are
            built in full. Engines of 2023 had this; current ones should not.
    """

    base_us: float = 0.0
    per_card_us: float = 0.0
    per_token_us: float = 0.0
    per_sequence_us: float = 0.0
    per_pair_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on `tp * pp` equal cards.

    Attributes:
        tp: cards that share each layer (tensor parallel).
        pp: stages that share the layers (pipeline parallel).
        host: the host's part of an iteration.
        launch_us: the least time between two kernels, because the host launches each: 0 when
            iterations are captured as graphs, `EAGER_LAUNCH_US` when not.
        draft_tokens: draft tokens verified with every decode (speculative decoding).

    Raises:
        ValueError: the cards cannot share the heads or layers, or are more than a node has.
    """

    model: ModelShape
    card: Card
    tp: int = 1
    pp: int = 1
    host: HostTime = HostTime()
    launch_us: float = 0.0
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        if self.tp < 1 or self.model.heads % self.tp:
            raise ValueError(f"tp: {self.tp} does not divide the {self.model.heads} heads")
        if self.tp > self.card.cards_per_node:
            raise ValueError(f"tp: {self.tp} is more than the {self.card.cards_per_node} cards of a node")
        if not 1 <= self.pp <= self.model.layers:
            raise ValueError(f"pp: {self.pp} stages for {self.model.layers} layers")
        if self.draft_tokens < 0 or self.launch_us < 0:
            raise ValueError("draft_tokens and launch_us must be 0 or more")

    @property
    def cards(self) -> int:
        """Cards of the replica."""
        return self.tp * self.pp

    def stage_layers(self, stage: int) -> range:
        """The layers of a stage; earlier stages take the remainder, as the last has the output head."""
        each, rest = divmod(self.model.layers, self.pp)
        first = stage * each + min(stage, rest)
        return range(first, first + each + (stage < rest))

    def stage_dense_layers(self, stage: int) -> int:
        """How many layers of a stage have a dense feed-forward block."""
        layers, model = self.stage_layers(stage), self.model
        return len(range(layers.start, min(layers.stop, model.layers - model.moe_layers)))

    @property
    def most_layers(self) -> int:
        """Layers of the fullest stage."""
        return share(self.model.layers, self.pp)
