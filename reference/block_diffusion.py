"""Block diffusion: generates an answer block by block, the tokens of a block in any order.

A model for it (SDAR, LLaDA2) was trained to fill in masked tokens. Inside a block every token sees every
other one; blocks before are seen as in any causal model, so their KV is computed once and kept. Logits at a
position are of the token at that position, not of the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.interfaces import SchedulerParts
from shared.scheduling.pages import evict_for, round_up_to_page
from shared.types import ForwardBatch, ForwardMode


@dataclass(frozen=True)
class DiffusionParams:
    mask_id: int  # stands for a token that is not known yet
    block_len: int = 4  # as in training: 4 in SDAR, 32 in LLaDA2
    threshold: float = 0.95  # tokens that are more likely are filled in; and at least one
    eos_token_ids: frozenset[int] = frozenset()


class BlockDiffusion:
    """Generates greedily, one request at a time, in the pools of an idle engine."""

    def __init__(self, parts: SchedulerParts, params: DiffusionParams) -> None:
        self.parts = parts
        self.params = params
        self.num_passes = 0

    def generate(self, prompt: list[int], num_new: int) -> list[int]:
        """Generate at most num_new tokens, up to an end-of-sequence token. Raises `ValueError` for an empty
        prompt, and if the KV pool is too small."""
        if not prompt or num_new < 1:
            raise ValueError(f"a prompt and a new token are needed: {len(prompt)} and {num_new} were given")
        parts, size = self.parts, self.params.block_len
        num_blocks = -(-(len(prompt) + num_new) // size)
        num_slots = round_up_to_page(num_blocks * size, parts.allocator.page_size)
        if num_slots > parts.req_to_token_pool.max_len or not evict_for(
            num_slots, parts.tree_cache, parts.allocator
        ):
            raise ValueError(f"there is no room for {num_slots} tokens")
        rows = parts.req_to_token_pool.alloc(1)
        slots = parts.allocator.alloc_extend([0], [num_slots], [-1])
        assert rows is not None
        assert slots is not None
        parts.req_to_token_pool.write(rows[0], 0, slots)
        try:
            return self._generate(rows[0], slots, prompt, num_new, num_blocks)
        finally:
            parts.allocator.free(slots)
            parts.req_to_token_pool.free(rows)

    def _generate(
        self, row: int, slots: torch.Tensor, prompt: list[int], num_new: int, num_blocks: int
    ) -> list[int]:
        size, mask_id = self.params.block_len, self.params.mask_id
        # --8<-- [start:block-diffusion]
        ids = torch.full((num_blocks * size,), mask_id, device=self.parts.allocator.device)
        ids[: len(prompt)] = torch.tensor(prompt, device=ids.device)
        first = len(prompt) // size * size  # whole blocks of the prompt are computed at once
        if first > 0:
            self._forward(row, slots, ids, 0, first)
        for start in range(first, len(ids), size):
            end = start + size
            while (ids[start:end] == mask_id).any():
                logits = self._forward(row, slots, ids, start, end)
                ids[start:end] = fill_in(ids[start:end], logits, self.params)
            self._forward(row, slots, ids, start, end)  # so that the KV is that of the final tokens
            new = ids[len(prompt) : min(end, len(prompt) + num_new)].tolist()
            ends = [i for i, token_id in enumerate(new) if token_id in self.params.eos_token_ids]
            if ends:
                return new[: ends[0] + 1]
        return new
        # --8<-- [end:block-diffusion]

    @torch.inference_mode()
    def _forward(
        self, row: int, slots: torch.Tensor, ids: torch.Tensor, start: int, end: int
    ) -> torch.Tensor:
        """Compute the blocks in [start, end) behind the KV of earlier blocks. Returns the logits of each
        token."""
        self.num_passes += 1
        device, size = ids.device, self.params.block_len
        positions = torch.arange(end, device=device)
        visible = positions // size <= (positions[start:] // size)[:, None]
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=ids[start:end],
            positions=positions[start:],
            req_pool_indices=torch.tensor([row], device=device),
            seq_lens=torch.tensor([end], device=device),
            out_cache_loc=slots[start:end].to(device),
            extend_seq_lens=torch.tensor([end - start], device=device),
            extend_start_loc=torch.tensor([0], device=device),
            seq_lens_cpu=(end,),
            extend_seq_lens_cpu=(end - start,),
            custom_mask=visible.flatten(),
        )
        logits = self.parts.model_runner.forward(batch).next_token_logits
        return logits[:, : self.parts.num_token_ids]


# --8<-- [start:fill-in]
def fill_in(ids: torch.Tensor, logits: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
    """ids [block_len], logits [block_len, vocab] -> ids with some masks replaced: each
    token whose probability exceeds the threshold, and always the likeliest one."""
    logits = logits.clone()
    logits[:, params.mask_id] = -torch.inf
    probs, tokens = logits.softmax(dim=-1).max(dim=-1)
    probs = probs.where(ids == params.mask_id, -1.0)
    is_filled = (probs > params.threshold) | (torch.arange(len(ids), device=ids.device) == probs.argmax())
    return tokens.where(is_filled, ids)


# --8<-- [end:fill-in]
