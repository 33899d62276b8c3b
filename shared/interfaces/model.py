"""Contract of a causal language model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import nn

from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.layers import Layers
from diptych.shared.interfaces.moe import MoE


class CausalLM(nn.Module, ABC):
    """Tokens to hidden states to logits. Holds weights, no per-request state: attention and the KV pool
    come in as `attention`. Built on any device (also "meta"); usable once `load_weights` has returned.

    A model that runs on several ranks takes them as a fourth argument, `tp`. It is one rank's part then:
    `config` has its sizes (`diptych.shared.loading.shards`), and all ranks call the same methods.

    A model whose prompts may have rows in place of token ids (`ForwardBatch.embeds`) takes another argument
    of `forward`, `input_embeds` [num_tokens, hidden_size]: it goes into layer 0, and input_ids are not read.
    With images of Qwen3-VL it is [num_tokens, k * hidden_size], whose later parts are added to the inputs of
    layers 1 to k - 1, and positions may be [3, num_tokens] (`RopeConfig.mrope_section`).
    """

    config: ModelConfig
    selects_rows: bool = False
    """Whether `forward` computes only the tokens `attention.rows` after the last layer's attention."""

    @abstractmethod
    def __init__(self, config: ModelConfig, layers: Layers, moe: type[MoE]) -> None:
        super().__init__()

    @abstractmethod
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: BatchAttention,
        captured: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """input_ids, positions [num_tokens] int64 -> hidden states after the final norm
        [num_tokens, hidden_size]; with `selects_rows`, of the tokens attention.rows alone, in their order,
        where it is given. Writes every layer's K and V to attention.out_cache_loc, those of all tokens.

        Under each key l of `captured` the model puts the residual stream that goes into layer l,
        [num_tokens, hidden_size], the caller's to keep; the number of layers stands for what goes into the
        final norm. The values that were there are not read. Nothing is captured where rows are given."""

    @abstractmethod
    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids of any shape, int64 -> [..., hidden_size], what goes into layer 0."""

    @abstractmethod
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32. Rows of padding that a head may have are cut off."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take tensors under the names that Hugging Face gives them (`diptych.shared.loading.weight_names`),
        in any order and one at a time: each may be dropped once the next is asked for. They are cast to the
        type that the model was built with. Raises `ValueError` for a tensor of the wrong shape, a name that
        is unknown or comes twice, and, at the end, for missing names; each error says which, what was found
        and what would be right."""
