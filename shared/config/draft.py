"""DraftConfig: the config.json of a draft model, completed by that of its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from diptych.shared.config.model import ModelConfig

DraftFormat = Literal["eagle", "eagle3", "nextn", "dflash"]
FusionNorm = Literal["none", "joint", "per layer"]


@dataclass(frozen=True)
class Eagle3Norms:
    """Norms that only some EAGLE-3 heads have."""

    before_residual: bool = False
    """The residual around attention is the hidden state after the norm, not before it."""
    fusion: FusionNorm = "none"
    """Before fc: one norm over the streams of the target's layers side by side, or one for each layer."""
    output: bool = False
    """Drafting continues from hidden states after the final norm, not before it."""


class DraftBlock(NamedTuple):
    """The block that a DFlash head fills in."""

    block_len: int
    """Tokens of a block in training, the newest token included."""
    mask_id: int
    """The id, of the target's vocabulary, that stands for a token to guess."""


@dataclass(frozen=True)
class DraftConfig:
    """`model` describes the draft model's own layers; its vocab_size is that of the draft vocabulary, its
    context_len the target's."""

    draft_format: DraftFormat
    model: ModelConfig
    target: ModelConfig
    target_layers: tuple[int, ...] = ()
    """Layers of the target whose input streams the draft model takes, concatenated; the number of layers
    means the stream after the last layer. (): the target's hidden states after the final norm."""
    norms: Eagle3Norms = Eagle3Norms()
    block: DraftBlock | None = None
    """Of DFlash heads."""

    def __post_init__(self) -> None:
        # Only fc can lead from one width to another, and DFlash heads share the target's embedding.
        if self.model.hidden_size != self.target.hidden_size and not (
            self.target_layers and self.block is None
        ):
            raise ValueError(
                f"the draft model's hidden_size is {self.model.hidden_size}, the target's "
                f"{self.target.hidden_size}: this draft model was made for another target"
            )
        if self.block is None and self.target_layers and self.target_hidden_size == self.model.hidden_size:
            raise ValueError(
                f"the target's {len(self.target_layers)} hidden states side by side are as wide as one of "
                f"the draft model, {self.model.hidden_size}: they are distinguished by their width"
            )
        if not self.model.vocab_size <= self.target.vocab_size:
            raise ValueError(
                f"the draft vocabulary has {self.model.vocab_size} ids, the target's {self.target.vocab_size}"
            )
        if any(not 0 <= layer <= self.target.num_hidden_layers for layer in self.target_layers):
            raise ValueError(
                f"the draft model takes the inputs of the target's layers {list(self.target_layers)}; "
                f"they must be within 0..{self.target.num_hidden_layers}"
            )

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's hidden states as given to the draft model."""
        return max(len(self.target_layers), 1) * self.target.hidden_size
