"""Contract of draft models: the small networks that guess what the target would say next. A `StepDraftModel`
guesses one token in a pass, a `BlockDraftModel` all tokens of a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from diptych.shared.config.draft import DraftConfig
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.layers import Layers
from diptych.shared.interfaces.model import CausalLM
from diptych.shared.interfaces.moe import MoE


class DraftOutput(NamedTuple):
    """What a draft model returns for n tokens."""

    hidden_states: torch.Tensor  # [n, hidden_size], what `compute_logits` takes
    next_hidden_states: (
        torch.Tensor
    )  # [n, hidden_size], what `forward` takes for the tokens drafted from these


class DraftModel(nn.Module, ABC):
    """What both kinds have in common. Built on any device (also "meta"); usable once `load_weights` and
    `share` have returned, in this order. Holds weights, no per-request state.

    Attributes: `config.model` describes its own layers: it has `num_hidden_layers` of them, with a KV pool of
    their own. `config.target_layers` are the layers of the target whose input streams it reads, side by side;
    (): the target's hidden states after the final norm.
    """

    config: DraftConfig

    @abstractmethod
    def __init__(self, config: DraftConfig, layers: Layers, moe: type[MoE]) -> None:
        super().__init__()

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take tensors under the names of the format's public checkpoints (see the implementations), with or
        without a leading "model.", in any order and one at a time, cast to the type that the model was built
        with. Embedding and head may be missing: `share` brings them. Raises `ValueError` for a tensor of
        the wrong shape, a name that is unknown or comes twice, names that never came, and ids of the target
        that are outside its vocabulary or stand twice in d2t; each says which, what was found and what would
        be right."""

    @abstractmethod
    def share(self, target: CausalLM) -> None:
        """Use the target's embedding and head, without a copy, where the checkpoint had none of its own. The
        target's weights must be loaded. A draft vocabulary that is only a part of the target's needs a head
        of its own: else `ValueError`."""

    @abstractmethod
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, config.model.vocab_size] float32, over the draft vocabulary."""

    @abstractmethod
    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Ids of the draft vocabulary, int64 of any shape -> those of the target's."""


class StepDraftModel(DraftModel):
    """Reads a token together with the target's hidden state at the token before it, and guesses the token
    after it."""

    @abstractmethod
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: BatchAttention,
    ) -> DraftOutput:
        """input_ids [n] int64, of the target's vocabulary; positions [n] int64, those of the tokens before
        them; hidden_states [n, config.target_hidden_size] of the target at `positions`, or
        [n, config.model.hidden_size] from an earlier `DraftOutput`: they are distinguished by their
        width, and mean the same if it is equal. Row j of a prompt thus holds token j + 1 and the target's
        hidden state j, at position j. Writes every layer's K and V to attention.out_cache_loc."""


class BlockDraftModel(DraftModel):
    """Reads the target's hidden states, and guesses all tokens of a block of the text after them in one pass.

    `config.block` says how long a block is in training, and which id stands for a token to guess."""

    @abstractmethod
    def store_features(
        self, hidden_states: torch.Tensor, positions: torch.Tensor, attention: BatchAttention
    ) -> None:
        """hidden_states [n, config.target_hidden_size] of the target at `positions` [n] int64. Writes every
        layer's K and V of them to attention.out_cache_loc; attends to nothing: attention.plan may be None."""

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: BatchAttention
    ) -> torch.Tensor:
        """Blocks: of each request its newest token, then mask ids, at the positions behind those of its
        stored features. input_ids [n] int64 of the target's vocabulary, positions [n] int64 -> hidden states
        [n, hidden_size] for `compute_logits`: at a mask, of the token that is at this position. Writes every
        layer's K and V to attention.out_cache_loc. attention.plan lets a token attend to all stored features
        of its request and to the whole block, also to what is behind the token."""
