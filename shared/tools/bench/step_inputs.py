"""Makes a step's batch of any size as the scheduler would, without running earlier steps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import Literal, get_args

import torch

from diptych.shared.config import EngineConfig
from diptych.shared.engine.requests.lora_adapters import LoraAdapters
from diptych.shared.interfaces import SchedulerParts, TokenToKVPool
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.scheduling.pages import num_pages_of, round_up_to_page
from diptych.shared.types import ForwardBatch, ForwardMode, Req, SamplingBatchInfo, SamplingParams
from diptych.shared.types.attention import FP8_TYPES

Mode = Literal["decode", "prefill", "mixed"]

FORWARD_MODES: dict[Mode, ForwardMode] = {
    "decode": ForwardMode.DECODE,
    "prefill": ForwardMode.EXTEND,
    "mixed": ForwardMode.MIXED,
}


@dataclass(frozen=True)
class StepCase:
    """The shape of a step. Decode: every request computes its token number `context_len`. Prefill:
    `num_tokens` new tokens, divided evenly among the requests, after `context_len` cached tokens of each.
    Mixed: `batch_size` requests decode and one more starts its prompt; `num_tokens` in total."""

    mode: Mode
    batch_size: int
    context_len: int
    num_tokens: int = 0  # decode: not asked for

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode must be decode, prefill or mixed, got {self.mode!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch_size}")
        least = 0 if self.mode == "prefill" else 1
        if self.context_len < least:
            raise ValueError(
                f"context of a {self.mode} step must be at least {least}, got {self.context_len}"
            )
        if self.mode == "prefill" and self.num_tokens < self.batch_size:
            raise ValueError(
                f"{self.num_tokens} prefill tokens are too few for {self.batch_size} requests: each has one"
            )
        if self.mode == "mixed" and self.num_tokens <= self.batch_size:
            raise ValueError(
                f"of {self.num_tokens} prefill tokens {self.batch_size} decode: that leaves none for a prompt"
            )

    @property
    def num_requests(self) -> int:
        return self.batch_size + (self.mode == "mixed")

    @property
    def extend_seq_lens(self) -> tuple[int, ...]:
        decoding = (1,) * self.batch_size
        if self.mode == "decode":
            return decoding
        if self.mode == "mixed":
            return (self.num_tokens - self.batch_size, *decoding)
        each, rest = divmod(self.num_tokens, self.batch_size)
        return tuple(each + (i < rest) for i in range(self.batch_size))

    @property
    def seq_lens(self) -> tuple[int, ...]:
        decoding = (self.context_len,) * self.batch_size
        if self.mode == "decode":
            return decoding
        if self.mode == "mixed":
            return (self.num_tokens - self.batch_size, *decoding)
        return tuple(self.context_len + n for n in self.extend_seq_lens)

    def num_pool_tokens(self, page_size: int) -> int:
        """The slots that the requests take, in whole pages."""
        return sum(round_up_to_page(n, page_size) for n in self.seq_lens)


def fill_pool(pool: TokenToKVPool, seed: int = 0) -> None:
    """Fill every slot, the dummy page included, with random finite KV, because zeros would multiply
    faster."""
    generator = torch.Generator(pool.device).manual_seed(seed)
    for layer_id in range(pool.num_layers):
        for buffer in (pool.k_buffer(layer_id), pool.v_buffer(layer_id)):
            if buffer.dtype in FP8_TYPES:
                buffer.copy_(torch.empty_like(buffer, dtype=torch.bfloat16).normal_(generator=generator))
            else:
                buffer.normal_(generator=generator)


def check_batch(num_requests: int, config: EngineConfig) -> None:
    if num_requests > config.max_running_requests:
        raise ValueError(f"batch {num_requests} exceeds max_running_requests ({config.max_running_requests})")


def place_requests(parts: SchedulerParts, case: StepCase, seed: int = 0) -> list[int]:
    """Allocate rows of req_to_token whose pages are scattered over the pool, as after long use. The caller
    frees the rows; the allocator does not change."""
    page_size = parts.allocator.page_size
    needed, free = case.num_pool_tokens(page_size), parts.allocator.available_size()
    if needed > free:
        raise ValueError(
            f"{case.num_requests} requests of up to {max(case.seq_lens)} tokens need {needed} slots; the KV "
            f"pool has {free} (max_total_tokens)"
        )
    if max(case.seq_lens) > parts.req_to_token_pool.max_len:
        raise ValueError(
            f"a request of {max(case.seq_lens)} tokens exceeds context_len "
            f"({parts.req_to_token_pool.max_len})"
        )
    rows = parts.req_to_token_pool.alloc(case.num_requests)
    assert rows is not None, "a row for each that may run"
    pages = parts.allocator.free_slots().view(-1, page_size)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(seed))
    start = 0
    for row, seq_len in zip(rows, case.seq_lens):
        end = start + num_pages_of(seq_len, page_size)
        chosen = order[start:end].to(pages.device)
        parts.req_to_token_pool.write(row, 0, pages[chosen].flatten()[:seq_len])
        start = end
    return rows


def assign_adapters(parts: SchedulerParts, lora: LoraAdapters, rows: list[int]) -> None:
    """The requests of these rows take the engine's LoRA adapters in turn, as many as a batch may have."""
    adapters = list(lora.by_name.values())[: lora.pool.num_slots]
    reqs = [Req(f"step-{i}", [0], SamplingParams(), i, req_pool_idx=row) for i, row in enumerate(rows)]
    for req, adapter in zip(reqs, cycle(adapters)):
        req.lora = adapter
    for feature in parts.features:
        feature.have_joined(reqs, [])


def make_forward_batch(parts: SchedulerParts, case: StepCase, rows: list[int], seed: int = 0) -> ForwardBatch:
    """The step of these requests, with random token ids."""
    device = parts.allocator.device
    seq_lens, extend_seq_lens = case.seq_lens, case.extend_seq_lens

    def tensor(values: list[int] | tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    spans = [(row, s - e, s) for row, s, e in zip(rows, seq_lens, extend_seq_lens)]
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(parts.num_token_ids, (sum(extend_seq_lens),), generator=generator)
    return ForwardBatch(
        forward_mode=FORWARD_MODES[case.mode],
        input_ids=input_ids.to(device),
        positions=torch.cat([torch.arange(start, end) for _, start, end in spans]).to(device),
        req_pool_indices=tensor(rows),
        seq_lens=tensor(seq_lens),
        out_cache_loc=torch.cat([parts.req_to_token_pool.read(*span) for span in spans]).to(device),
        extend_seq_lens=tensor(extend_seq_lens),
        extend_start_loc=tensor([0, *accumulate(extend_seq_lens)][:-1]),
        seq_lens_cpu=seq_lens,
        extend_seq_lens_cpu=extend_seq_lens,
    )


def make_sampling_info(
    parts: SchedulerParts, case: StepCase, temperature: float, seed: int = 0
) -> SamplingBatchInfo:
    params = SamplingParams(temperature=temperature, max_new_tokens=1, ignore_eos=True)
    reqs = [Req(f"step-{i}", [0], params, seed + i) for i in range(case.num_requests)]
    return make_sampling_batch_info(reqs, parts.num_token_ids, parts.allocator.device)
