"""Block diffusion: an answer is generated block by block, the tokens of a block in any order.

A model for it (SDAR, LLaDA2) was trained to fill in masked tokens. Inside a block every token sees every
other one; blocks before are seen as in any causal model, so their KV is computed once and kept. Logits at a
position are of the token at that position, not of the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from diptych.reference.decoding import PlainDecoding
from diptych.reference.schedule_batch import visible_in_blocks
from diptych.reference.scheduler import Scheduler
from diptych.shared.interfaces import SchedulerFeature
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.scheduling.diffusion_blocks import block_ids, block_of, params_of, take_block_slots
from diptych.shared.scheduling.pages import evict_for, rows_of
from diptych.shared.types import (
    BatchResult,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
    Req,
    ScheduleBatch,
)


class DiffusionDecoding(PlainDecoding, SchedulerFeature):
    """Plain decoding; requests with `diffusion` complete one block in a step.

    Between steps such a request has P + O tokens and as many KV entries; a last block that is not whole is
    computed again by the next step. Pages are whole blocks, so the prefix cache never has such a block.
    """

    def num_reserved(self, running: Sequence[Req]) -> int:
        return sum(req.diffusion.block_len for req in running if req.diffusion is not None)

    def prepare(self, reqs: list[Req], most_steps: int | None = None) -> ScheduleBatch | None:
        """Slots to the end of each request's block, and one for each plain request."""
        filling = [req for req in reqs if req.diffusion is not None]
        plain = [req for req in reqs if req.diffusion is None]
        allocator = self.parts.allocator
        # A block lies in one page, so it needs a new page as a token does.
        num_pages = sum(req.kv_committed_len % allocator.page_size == 0 for req in reqs)
        if not evict_for(num_pages * allocator.page_size, self.parts.tree_cache, allocator):
            return None
        batch = (
            super().prepare(plain, 1 if filling else most_steps)
            if plain
            else ScheduleBatch([], ForwardMode.DECODE)
        )
        if batch is None or not filling:
            return batch
        take_block_slots(filling, self.parts)
        batch.reqs += filling
        return batch

    def run(self, batch: ScheduleBatch, chunked_req: Req | None) -> BatchResult:
        filling = [req for req in batch.reqs if req.diffusion is not None]
        if not filling:
            return super().run(batch, chunked_req)
        if batch.num_extend_reqs:  # the logits behind a prompt have no meaning, unless they are NaN
            result = super().run(batch, chunked_req)
            for req, token_ids, logprobs in zip(batch.reqs, result.token_ids, result.logprobs):
                if req.diffusion is not None and token_ids[0] >= 0:
                    token_ids.clear()
                    logprobs.clear()
            return result
        filled, logits_output, forward_batch = self._fill_blocks(filling)
        num_plain = len(batch.reqs) - len(filling)
        if num_plain == 0:
            return BatchResult(filled, [[] for _ in filling], forward_batch, logits_output)
        plain = ScheduleBatch(batch.reqs[:num_plain], batch.forward_mode, out_cache_loc=batch.out_cache_loc)
        result = super().run(plain, chunked_req)
        return result._replace(
            token_ids=result.token_ids + filled, logprobs=result.logprobs + [[] for _ in filling]
        )

    def _fill_blocks(self, reqs: list[Req]) -> tuple[list[list[int]], LogitsOutput, ForwardBatch]:
        """The new tokens of each request's block ([-1]: its logits are NaN), and the
        last pass."""
        device = self.parts.allocator.device
        blocks = [torch.tensor(block_ids(req), device=device) for req in reqs]
        params = [params_of(req) for req in reqs]
        is_nan = [False] * len(reqs)
        unknown = list(range(len(reqs)))
        # --8<-- [start:block-diffusion]
        while unknown:
            output, _ = self._forward([reqs[i] for i in unknown], [blocks[i] for i in unknown])
            logits = output.next_token_logits.split([len(blocks[i]) for i in unknown])
            for i, its_logits in zip(unknown, logits):
                is_nan[i] = bool(its_logits.isnan().any())
                found = self._candidates(reqs[i], its_logits[:, : self.parts.num_token_ids])
                blocks[i] = fill_in(blocks[i], *found, params[i].mask_id, params[i].threshold)
            unknown = [i for i in unknown if not is_nan[i] and params[i].mask_id in blocks[i]]
        # Earlier passes wrote the KV of masks: this one writes that of the final tokens.
        output, forward_batch = self._forward(reqs, blocks)
        # --8<-- [end:block-diffusion]
        new_ids = [ids[req.num_tokens - block_of(req)[0] :].tolist() for req, ids in zip(reqs, blocks)]
        return [[-1] if nan else ids for nan, ids in zip(is_nan, new_ids)], output, forward_batch

    # --8<-- [start:candidates]
    def _candidates(self, req: Req, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each position of a block, and its probability before filters.
        Noise is that of plain decoding's token at the position: of seed and position
        alone, the same in each pass."""
        logits = logits.clone()
        logits[:, params_of(req).mask_id] = -torch.inf
        if req.sampling_params.is_greedy:
            probs, tokens = logits.softmax(dim=-1).max(dim=-1)
            return tokens, probs
        start, end = block_of(req)
        info = make_sampling_batch_info([req] * (end - start), logits.shape[-1], logits.device)
        before = torch.arange(start - 1, end - 1, device=logits.device)
        output = self.parts.sampler.sample(logits, replace(info, return_logprob=True), before)
        assert output.logprobs is not None
        return output.next_token_ids.clamp(min=0), output.logprobs.token_logprobs.exp()

    # --8<-- [end:candidates]

    @torch.inference_mode()
    def _forward(self, reqs: list[Req], blocks: list[torch.Tensor]) -> tuple[LogitsOutput, ForwardBatch]:
        """Compute a block of each request. Gives the logits of every token."""
        parts, device = self.parts, self.parts.allocator.device
        spans = [(start, start + len(ids)) for (start, _), ids in zip(map(block_of, reqs), blocks)]
        seq_lens, lens = [end for _, end in spans], [end - start for start, end in spans]
        slots = [parts.req_to_token_pool.read(row, *span) for row, span in zip(rows_of(reqs), spans)]
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=torch.cat(blocks),
            positions=torch.cat([torch.arange(*span, device=device) for span in spans]),
            req_pool_indices=torch.tensor(rows_of(reqs), device=device),
            seq_lens=torch.tensor(seq_lens, device=device),
            out_cache_loc=torch.cat(slots).to(device),
            extend_seq_lens=torch.tensor(lens, device=device),
            extend_start_loc=torch.tensor([0, *accumulate(lens)][:-1], device=device),
            seq_lens_cpu=tuple(seq_lens),
            extend_seq_lens_cpu=tuple(lens),
            custom_mask=visible_in_blocks(reqs, seq_lens, lens, device),
        )
        with parts.timeline.forward(batch):
            return parts.model_runner.forward(batch), batch


def serve_blocks(scheduler: Scheduler) -> None:
    """From now on the scheduler takes requests with `diffusion` too. Plain requests go on as before."""
    if not isinstance(scheduler.decoding, DiffusionDecoding):
        scheduler.decoding = DiffusionDecoding(scheduler.parts)
        scheduler.requests.features.append(scheduler.decoding)


# --8<-- [start:fill-in]
def fill_in(
    ids: torch.Tensor, tokens: torch.Tensor, probs: torch.Tensor, mask_id: int, threshold: float
) -> torch.Tensor:
    """ids [block_len] with some masks replaced by `tokens`: each one whose probability
    exceeds the threshold, and always the most probable one."""
    probs = probs.where(ids == mask_id, -1.0)
    is_filled = (probs > threshold) | (torch.arange(len(ids), device=ids.device) == probs.argmax())
    return tokens.where(is_filled, ids)


# --8<-- [end:fill-in]
