"""What the formats of draft models have in common: whose embedding and head they use, and loading."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F

from diptych.shared.config import DraftConfig, EngineConfig, ModelConfig, draft_shape
from diptych.shared.interfaces import CausalLM, DrafterParts, DraftModel, MoE
from diptych.shared.interfaces.layers import Layers
from diptych.shared.loading.weights import load_weights, named_targets


class BaseDraftModel(DraftModel):
    embedding: torch.Tensor | None
    head: torch.Tensor | None
    d2t: torch.Tensor | None

    def __init__(self, config: DraftConfig, layers: Layers, moe: type[MoE]) -> None:
        super().__init__(config, layers, moe)
        self.config = config
        # What the checkpoint may have: [target's vocab_size, hidden_size], [vocab_size, hidden_size], and for
        # each id here the distance to the target's, [vocab_size] int64.
        for name in ("embedding", "head", "d2t"):
            self.register_buffer(name, None, persistent=False)
        self.target_embed: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.target_logits: Callable[[torch.Tensor], torch.Tensor] | None = None

    @abstractmethod
    def canonical_name(self, name: str) -> str | None:
        """Map the name of a checkpoint's tensor, without "model.", to the parameter's name here, or one of
        `_own`. None: it is not used."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if any(parameter.is_meta for parameter in self.parameters()):
            self.to_empty(device=torch.get_default_device())
        required = named_targets(self)
        bias = required.pop("fc.bias", None)  # some checkpoints of every format have one
        if bias is not None:
            bias.zero_()
        seen: set[str] = set()

        def required_weights() -> Iterator[tuple[str, torch.Tensor]]:
            for checkpoint_name, tensor in weights:
                name = self.canonical_name(checkpoint_name.removeprefix("model."))
                if name in ("embedding", "head", "d2t") or (name == "fc.bias" and bias is not None):
                    if name in seen:
                        raise ValueError(f"{checkpoint_name} came twice")
                    seen.add(name)
                    self._take(name, checkpoint_name, tensor)
                elif name is not None:
                    yield name, tensor

        load_weights(required_weights(), required, self.config.model)
        vocab_size, target_vocab_size = self.config.model.vocab_size, self.config.target.vocab_size
        if self.d2t is None and vocab_size != target_vocab_size:
            raise ValueError(
                f"d2t never came: a draft vocabulary of {vocab_size} ids out of {target_vocab_size} needs it"
            )

    def share(self, target: CausalLM) -> None:
        width, target_width = self.config.model.hidden_size, self.config.target.hidden_size
        for name, own in (("embed_tokens", self.embedding), ("lm_head", self.head)):
            if own is None and width != target_width:
                raise ValueError(
                    f"{name} never came: the target's has the width {target_width}, the draft model {width}"
                )
        if self.embedding is None:
            self.target_embed = target.embed
        if self.head is None:
            if self.config.model.vocab_size != self.config.target.vocab_size:
                raise ValueError(
                    f"lm_head never came: the target's head is for {self.config.target.vocab_size} ids, "
                    f"not for a draft vocabulary of {self.config.model.vocab_size}"
                )
            self.target_logits = target.compute_logits

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            return F.embedding(input_ids, self.embedding)
        assert self.target_embed is not None, "share has not been called"
        return self.target_embed(input_ids)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.head is not None:
            return F.linear(hidden_states, self.head).to(torch.float32)
        assert self.target_logits is not None, "share has not been called"
        return self.target_logits(hidden_states)

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def _take(self, name: str, checkpoint_name: str, tensor: torch.Tensor) -> None:
        """A weight that a checkpoint may leave out."""
        config, like = self.config, next(self.parameters())
        hidden_size, vocab_size = config.model.hidden_size, config.model.vocab_size
        expected = {
            "embedding": (config.target.vocab_size, hidden_size),
            "head": (vocab_size, hidden_size),
            "d2t": (vocab_size,),
            "fc.bias": (hidden_size,),
        }[name]
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{checkpoint_name} has shape {list(tensor.shape)}; it must be {list(expected)}")
        if name == "d2t":
            self.d2t = self._checked_d2t(tensor).to(like.device)
        elif name == "fc.bias":
            self.get_parameter(name).copy_(tensor)
        else:
            setattr(self, name, tensor.to(like, copy=True))

    def _checked_d2t(self, d2t: torch.Tensor) -> torch.Tensor:
        d2t = d2t.to(torch.int64)
        target_ids, vocab_size = (
            torch.arange(len(d2t), device=d2t.device) + d2t,
            self.config.target.vocab_size,
        )
        if target_ids.min() < 0 or target_ids.max() >= vocab_size:
            raise ValueError(
                f"d2t leads to the target's ids {int(target_ids.min())} to {int(target_ids.max())}; "
                f"it has 0 to {vocab_size - 1}"
            )
        num_distinct = len(target_ids.unique())
        if num_distinct != len(target_ids):
            raise ValueError(
                f"d2t leads from {len(target_ids)} draft ids to {num_distinct} ids of the target"
            )
        return d2t


def padding_token_ids(
    config: EngineConfig, parts: DrafterParts, draft_config: DraftConfig, model: DraftModel
) -> torch.Tensor | None:
    """The ids of the draft model that have no token, bool [vocab_size]; None if there are none. Raises
    `ValueError` if fewer ids have a token than a draft step has beams."""
    draft_ids = torch.arange(draft_config.model.vocab_size, device=parts.device)
    is_token = model.to_target_ids(draft_ids) < parts.num_token_ids
    num_tokens, top_k = int(is_token.sum()), draft_shape(config).top_k
    if num_tokens < top_k:
        raise ValueError(f"speculative_topk={top_k}: only {num_tokens} ids of the draft model have a token")
    return None if num_tokens == len(draft_ids) else ~is_token


def check_draft_model_fits(draft: ModelConfig, config: EngineConfig, num_token_ids: int) -> None:
    """Raise `ValueError` for a draft model that cannot read what the target reads."""
    where = f"speculative_draft_model={config.speculative_draft_model}"
    if draft.linear_attention is not None:
        raise ValueError(f"{where} has linear attention: a draft model has KV alone")
    if draft.vocab_size < num_token_ids:
        raise ValueError(f"{where} has {draft.vocab_size} token ids, and the target writes {num_token_ids}")
    assert config.context_len is not None
    if draft.context_len < config.context_len:
        raise ValueError(
            f"{where} has {draft.context_len} positions, and the context {config.context_len} tokens: "
            f"set context_len={draft.context_len}"
        )
