"""Runs a model step by step, with the reference's pools and attention and without a scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config import ModelConfig
from diptych.shared.interfaces import CausalLM, StatePool
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.kv_pool import attention_component, build_kv_pool
from diptych.shared.scheduling.pages import round_up_to_page
from diptych.shared.tools.conformance.clauses.poison import poison_
from diptych.shared.types import ForwardBatch, ForwardMode


class ModelSession:
    """`num_reqs` requests; each call computes some of their tokens, on the model's device and in its dtype.
    Slots that were never written hold NaN."""

    def __init__(self, model: Any, num_reqs: int = 1, max_len: int = 256, page_size: int = 1) -> None:
        config, pools = self.layers_of(model), registry.load("memory_pool", "reference")

        def component(name: str) -> Any:
            return registry.load(name, "reference")

        weight = next(model.parameters())
        self.model = model
        self.inputs: dict[str, torch.Tensor] = {}  # other arguments of the model
        self.device = weight.device
        self.req_to_token_pool = pools.ReqToTokenPool(num_reqs, max_len, self.device)
        size = num_reqs * round_up_to_page(max_len, page_size)
        self.allocator = pools.TokenToKVPoolAllocator(size, page_size, self.device)
        self.kv_pool = build_kv_pool(component, config, size, page_size, weight.dtype, self.device)
        for buffer in self.kv_buffers():
            poison_(buffer)
        self.attention = component(attention_component(config))(self.req_to_token_pool, self.kv_pool)
        self.linear_attention: Any = None
        if config.linear_attention is not None:
            num_linear = len(config.linear_layers)
            states = StatePool(num_reqs, num_linear, config.linear_attention, weight.dtype, self.device)
            for buffer in (states.inputs, states.recurrent):
                poison_(buffer)
            self.linear_attention = component("linear_attention")(states)
        self.req_pool_indices = self.req_to_token_pool.alloc(num_reqs)
        self.lens = [0] * num_reqs
        self.last_locs = [-1] * num_reqs

    def layers_of(self, model: CausalLM) -> ModelConfig:
        """The config of the layers that have KV."""
        return model.config

    def kv_buffers(self) -> list[torch.Tensor]:
        """K of every layer, then V of every layer."""
        layers = range(self.kv_pool.num_layers)
        return [
            *(self.kv_pool.k_buffer(layer_id) for layer_id in layers),
            *(self.kv_pool.v_buffer(layer_id) for layer_id in layers),
        ]

    def step(self, new_ids: Mapping[int, Sequence[int]]) -> list[torch.Tensor]:
        """Append tokens to some requests, in one batch. Returns the logits of all these tokens, by
        request."""
        batch = self.forward_batch(new_ids)
        with torch.inference_mode():
            logits = self.model.compute_logits(self.hidden_states(batch))
            return list(logits.split(batch.extend_seq_lens_cpu))

    def hidden_states(
        self,
        batch: ForwardBatch,
        captured: dict[int, torch.Tensor] | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        linear = self.linear_attention and self.linear_attention.for_batch(batch)
        attention = BatchAttention(
            self.attention, self.attention.plan(batch), self.kv_pool, batch.out_cache_loc, rows, linear
        )
        more = () if captured is None else (captured,)  # not every model can capture
        with torch.inference_mode():
            return self.model(batch.input_ids, batch.model_positions, attention, *more, **self.inputs)

    def forward_batch(self, new_ids: Mapping[int, Sequence[int]], **fields: Any) -> ForwardBatch:
        """Allocates the new tokens' slots. `fields`: the fields that differ from a plain extend or decode
        step."""
        reqs = list(new_ids)
        extend_lens = [len(new_ids[i]) for i in reqs]
        prefix_lens = [self.lens[i] for i in reqs]
        seq_lens = [prefix + extend for prefix, extend in zip(prefix_lens, extend_lens)]
        out_cache_loc = self.allocator.alloc_extend(prefix_lens, seq_lens, [self.last_locs[i] for i in reqs])
        for i, slots in zip(reqs, out_cache_loc.split(extend_lens)):
            self.req_to_token_pool.write(self.req_pool_indices[i], self.lens[i], slots)
            self.lens[i] += len(slots)
            self.last_locs[i] = int(slots[-1])
        extend_seq_lens = torch.tensor(extend_lens)
        batch = ForwardBatch(
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
        batch = replace(batch, **fields)
        on_device: dict[str, Any] = {
            name: value.to(self.device)
            for name, value in vars(batch).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(batch, **on_device)
