"""A reference model with real pools and attention, stepped by hand; and its Hugging Face twin."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import reference.layers
from reference.attention import TorchAttention
from reference.memory_pool import ReqToTokenPool, TokenToKVPool, TokenToKVPoolAllocator
from reference.models import model_class
from reference.moe import MoE
from shared.config import ModelConfig
from shared.interfaces import CausalLM
from shared.types import ForwardBatch, ForwardMode
from shared.types.attention import BatchAttention
from shared.weights import iterate_weights


def build_model(config: ModelConfig) -> CausalLM:
    return model_class(config.architecture)(config, reference.layers, MoE)


def random_hf_model(hf_config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """Weights so large that logits lie far apart: their spread is a few units, so that rounding (1e-5) does
    not decide which token is the best."""
    config = AutoConfig.for_model(**deepcopy(hf_config))  # it completes nested dicts in place
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
            else:
                std = 0.3 if "embed" in name or "lm_head" in name else 1.5 * parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, std, generator=generator)
    return model


def load_saved(hf_model: PreTrainedModel, folder: Path) -> CausalLM:
    """Through the files that transformers writes."""
    hf_model.save_pretrained(folder)
    config = ModelConfig.from_pretrained(folder)
    model = build_model(config)
    model.load_weights(iterate_weights(folder, config))
    return model


class Session:
    """`num_reqs` requests whose tokens are computed as told."""

    def __init__(self, model: CausalLM, num_reqs: int = 1, max_len: int = 256, page_size: int = 1) -> None:
        config = model.config
        self.model = model
        self.rows = ReqToTokenPool(num_reqs, max_len, "cpu")
        size = num_reqs * max_len
        self.allocator = TokenToKVPoolAllocator(size, page_size, "cpu")
        self.kv_pool = TokenToKVPool(
            size,
            page_size,
            config.num_hidden_layers,
            config.num_kv_heads,
            config.head_dim,
            torch.float32,
            "cpu",
        )
        self.attention = TorchAttention(self.rows, self.kv_pool)
        self.req_pool_indices = self.rows.alloc(num_reqs)
        self.lens = [0] * num_reqs
        self.last_locs = [-1] * num_reqs

    def step(self, new_ids: dict[int, Sequence[int]]) -> list[torch.Tensor]:
        """Append tokens to some requests, in one batch. The logits of all these tokens, by request."""
        batch = self.forward_batch(new_ids)
        attention = BatchAttention(
            self.attention, self.attention.plan(batch), self.kv_pool, batch.out_cache_loc
        )
        with torch.inference_mode():
            hidden_states = self.model(batch.input_ids, batch.positions, attention)
            return list(self.model.compute_logits(hidden_states).split(batch.extend_seq_lens_cpu))

    def forward_batch(self, new_ids: dict[int, Sequence[int]]) -> ForwardBatch:
        reqs = list(new_ids)
        extend_lens = [len(new_ids[i]) for i in reqs]
        prefix_lens = [self.lens[i] for i in reqs]
        seq_lens = [prefix + extend for prefix, extend in zip(prefix_lens, extend_lens)]
        out_cache_loc = self.allocator.alloc_extend(prefix_lens, seq_lens, [self.last_locs[i] for i in reqs])
        for i, slots in zip(reqs, out_cache_loc.split(extend_lens)):
            self.rows.write(self.req_pool_indices[i], self.lens[i], slots)
            self.lens[i] += len(slots)
            self.last_locs[i] = int(slots[-1])
        extend_seq_lens = torch.tensor(extend_lens)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if max(extend_lens) == 1 else ForwardMode.EXTEND,
            input_ids=torch.tensor([token for i in reqs for token in new_ids[i]]),
            positions=torch.cat([torch.arange(a, b) for a, b in zip(prefix_lens, seq_lens)]),
            req_pool_indices=torch.tensor([self.req_pool_indices[i] for i in reqs]),
            seq_lens=torch.tensor(seq_lens),
            out_cache_loc=out_cache_loc,
            extend_seq_lens=extend_seq_lens,
            extend_start_loc=extend_seq_lens.cumsum(0) - extend_seq_lens,
            seq_lens_cpu=tuple(seq_lens),
            extend_seq_lens_cpu=tuple(extend_lens),
        )


def greedy(
    model: CausalLM, prompt: list[int], num_new: int, chunks: Sequence[int] = ()
) -> tuple[list[int], torch.Tensor]:
    """The next `num_new` tokens, and the logits of every position on the way. `chunks` cuts the prompt into
    pieces of these lengths and the rest."""
    session = Session(model, max_len=len(prompt) + num_new)
    logits = [session.step({0: chunk})[0] for chunk in cut(prompt, chunks)]
    output_ids: list[int] = []
    while len(output_ids) < num_new:
        output_ids.append(int(logits[-1][-1].argmax()))
        logits.append(session.step({0: output_ids[-1:]})[0])
    return output_ids, torch.cat(logits)


def hf_greedy(
    model: PreTrainedModel, prompt: list[int], num_new: int, chunks: Sequence[int] = ()
) -> tuple[list[int], torch.Tensor]:
    """The same with transformers and its KV cache."""
    logits, cache = [], None
    output_ids: list[int] = []

    def forward(ids: Sequence[int]) -> None:
        nonlocal cache
        with torch.inference_mode():
            out = model(torch.tensor([list(ids)]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits[0])

    for chunk in cut(prompt, chunks):
        forward(chunk)
    while len(output_ids) < num_new:
        output_ids.append(int(logits[-1][-1].argmax()))
        forward(output_ids[-1:])
    return output_ids, torch.cat(logits)


def cut(prompt: list[int], chunks: Sequence[int]) -> list[list[int]]:
    pieces, start = [], 0
    for length in chunks:
        pieces.append(prompt[start : start + length])
        start += length
    return [*pieces, prompt[start:]]
