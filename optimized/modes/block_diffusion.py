"""Block diffusion: all blocks of a step are filled in together, in passes that CUDA graphs hold.

Differs from reference: a pass computes all blocks with masks as one batch of fixed shape (`tree_mask`), the
sampler gives a token and its probability for every row, and one tensor operation fills in all blocks. The CPU
waits once a pass, for which blocks have masks left. Assumes blocks of one length: each length is a batch of
its own. Loses overlap: while such a request runs, no batch is launched ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch

from diptych.optimized.decoding import PlainDecoding
from diptych.optimized.graphs.verify_graph import MAX_TOKENS, has_windows
from diptych.optimized.overlap.in_flight import InFlight
from diptych.optimized.schedule_batch import visible_in_blocks
from diptych.optimized.scheduler import Scheduler
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.scheduling.diffusion_blocks import block_ids, block_of, params_of, take_block_slots
from diptych.shared.scheduling.pages import evict_for, rows_of
from diptych.shared.to_device import to_device, vectors_to_device
from diptych.shared.types import (
    BatchResult,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
    Req,
    SamplingBatchInfo,
    ScheduleBatch,
)


class Blocks(NamedTuple):
    """Blocks of one length, one of each request."""

    numbers: torch.Tensor  # [n] int64, of the blocks that a step began with
    ids: torch.Tensor  # [n, block_len] int64
    positions: torch.Tensor  # [n, block_len] int64
    slots: torch.Tensor  # [n, block_len] int64
    rows: torch.Tensor  # [n] int64, of req_to_token
    mask_ids: torch.Tensor  # [n, 1] int64
    thresholds: torch.Tensor  # [n, 1] float32

    def at(self, numbers: list[int]) -> Blocks:
        """Some of the blocks that a step began with."""
        which = to_device(numbers, torch.int64, self.ids.device)
        return Blocks(*(tensor[which] for tensor in self))


class BlocksInFlight(InFlight):
    """Blocks that are filled in when they are launched; their tokens come to the CPU."""


class DiffusionDecoding(PlainDecoding):
    """Plain decoding; requests with `diffusion` complete one block in a step.

    Between steps such a request has P + O tokens and as many KV entries; a last block that is not whole is
    computed again by the next step. Pages are whole blocks, so the prefix cache never has such a block.
    """

    def num_ahead(self, running: Sequence[Req]) -> int:
        return int(all(req.diffusion is None for req in running))

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

    def run(self, batch: ScheduleBatch, chunked_req: Req | None) -> None:
        filling = [req for req in batch.reqs if req.diffusion is not None]
        if batch.num_extend_reqs or not filling:
            super().run(batch, chunked_req)
            return
        plain = batch.reqs[: len(batch.reqs) - len(filling)]
        if plain:
            others = ScheduleBatch(plain, batch.forward_mode, out_cache_loc=batch.out_cache_loc)
            super().run(others, chunked_req)
        filling.sort(key=_block_len)
        launched = BlocksInFlight(
            ScheduleBatch(filling, ForwardMode.TARGET_VERIFY), self.pipeline.future_map.take(len(filling))
        )
        with self.parts.timeline.span("prepare"):
            work = launched.keep([self._begin(reqs) for reqs in _groups(filling)])
        self.parts.model_runner.capture_hidden = None  # a batch of embeddings may have set it
        launched.results = self.pipeline.streams.launch(
            lambda: tuple(self._fill_blocks(*each) for each in work)
        )
        self.pipeline.batches.append(launched)

    def finish(self, launched: InFlight, outputs: Any) -> BatchResult:
        if isinstance(launched, BlocksInFlight):
            reqs, blocks = launched.batch.reqs, [ids for filled in outputs for ids in filled.tolist()]
            new_ids = [ids[req.num_tokens - block_of(req)[0] :] for req, ids in zip(reqs, blocks)]
            return BatchResult([[-1] if ids[0] < 0 else ids for ids in new_ids], [[] for _ in reqs])
        result = super().finish(launched, outputs)
        # The logits behind a prompt have no meaning, unless they are NaN.
        for req, token_ids, logprobs in zip(launched.batch.reqs, result.token_ids, result.logprobs):
            if req.diffusion is not None and token_ids and token_ids[0] >= 0:
                token_ids.clear()
                logprobs.clear()
        return result

    def _begin(self, reqs: list[Req]) -> tuple[list[Req], Blocks, SamplingBatchInfo]:
        """The blocks of requests, and how each of their tokens is sampled."""
        pool, device = self.parts.req_to_token_pool, self.parts.allocator.device
        n, block_len = len(reqs), _block_len(reqs[0])
        vectors = vectors_to_device(
            [
                [token_id for req in reqs for token_id in block_ids(req)],
                [position for req in reqs for position in range(*block_of(req))],
                rows_of(reqs),
                [params_of(req).mask_id for req in reqs],
            ],
            device,
        )
        ids, positions, rows = vectors[0].view(n, block_len), vectors[1].view(n, block_len), vectors[2]
        # Read now, in the scheduler's stream, because the row changes later.
        slots = pool.req_to_token[rows[:, None], positions].to(torch.int64)
        thresholds = to_device([params_of(req).threshold for req in reqs], torch.float32, device)
        numbers = torch.arange(n, device=device)
        blocks = Blocks(numbers, ids, positions, slots, rows, vectors[3][:, None], thresholds[:, None])
        info = make_sampling_batch_info(reqs, self.parts.num_token_ids, device)
        return reqs, blocks, replace(info, return_logprob=True)

    @torch.inference_mode()
    def _fill_blocks(self, reqs: list[Req], blocks: Blocks, info: SamplingBatchInfo) -> torch.Tensor:
        """The tokens of each request's block [n, block_len]; -1: its logits are NaN."""
        ids, is_nan = blocks.ids.clone(), torch.zeros_like(blocks.rows, dtype=torch.bool)
        left, unknown = blocks, list(range(len(reqs)))
        # --8<-- [start:block-diffusion]
        while True:
            logits = self._forward([reqs[i] for i in unknown], left).next_token_logits
            tokens, probs = self._candidates(left, logits[:, : self.parts.num_token_ids], info)
            del logits  # borrowed from a graph: the next pass overwrites them
            its_ids = fill_in(left.ids, tokens.clamp(min=0), probs, left.mask_ids, left.thresholds)
            its_nan = (tokens < 0).any(dim=1)
            ids[left.numbers], is_nan[left.numbers] = its_ids, its_nan
            has_masks = (its_ids == left.mask_ids).any(dim=1) & ~its_nan
            unknown = [i for i, has in zip(unknown, has_masks.tolist()) if has]
            if not unknown:
                break
            left = blocks._replace(ids=ids).at(unknown)
        # Earlier passes wrote the KV of masks: this one writes that of the final tokens.
        self._forward(reqs, blocks._replace(ids=ids))
        # --8<-- [end:block-diffusion]
        return ids.masked_fill(is_nan[:, None], -1)

    # --8<-- [start:candidates]
    def _candidates(
        self, blocks: Blocks, logits: torch.Tensor, info: SamplingBatchInfo
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each position of each block [n, block_len] (-1: NaN), and its
        probability before filters. `logits`: changed in place."""
        n, block_len = blocks.ids.shape
        # An addition, so that a NaN stays.
        banned = blocks.mask_ids.expand(n, block_len).reshape(-1, 1)
        logits.scatter_add_(1, banned, torch.full_like(banned, -torch.inf, dtype=logits.dtype))
        info = _rows_of_info(info, blocks.numbers.repeat_interleave(block_len, output_size=n * block_len))
        output = self.parts.sampler.sample(logits, info, blocks.positions.flatten() - 1)
        assert output.logprobs is not None
        probs = output.logprobs.token_logprobs.exp()
        return output.next_token_ids.view(n, block_len), probs.view(n, block_len)

    # --8<-- [end:candidates]

    def _forward(self, reqs: list[Req], blocks: Blocks) -> LogitsOutput:
        """Compute a block of each request. Gives the logits of every token."""
        parts, (n, block_len) = self.parts, blocks.ids.shape
        device, config = blocks.ids.device, parts.model_runner.model.config
        ends = [block_of(req)[1] for req in reqs]
        lens = torch.full((n,), block_len, dtype=torch.int64, device=device)
        masks: dict[str, Any] = {}
        if has_windows(config):
            masks["custom_mask"] = visible_in_blocks(reqs, ends, [block_len] * n, device)
        else:
            masks["tree_mask"] = torch.ones(n, block_len, block_len, dtype=torch.bool, device=device)
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=blocks.ids.flatten(),
            positions=blocks.positions.flatten(),
            req_pool_indices=blocks.rows,
            seq_lens=blocks.positions[:, -1] + 1,
            out_cache_loc=blocks.slots.flatten(),
            extend_seq_lens=lens,
            extend_start_loc=torch.arange(n, device=device) * block_len,
            seq_lens_cpu=tuple(ends),
            extend_seq_lens_cpu=(block_len,) * n,
            **masks,
        )
        with parts.timeline.forward(batch):
            return parts.model_runner.forward(batch)


def serve_blocks(scheduler: Scheduler) -> None:
    """From now on the scheduler takes requests with `diffusion` too. Plain requests go on as before."""
    plain, requests = scheduler.decoding, scheduler.requests
    if isinstance(plain, DiffusionDecoding):
        return
    decoding = DiffusionDecoding(scheduler.parts)
    decoding.pipeline = scheduler.pipeline  # it may hold a batch
    scheduler.decoding = requests.decoding = decoding
    requests.features[requests.features.index(plain)] = decoding


# --8<-- [start:fill-in]
def fill_in(
    ids: torch.Tensor,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    mask_id: torch.Tensor,
    threshold: torch.Tensor,
) -> torch.Tensor:
    """ids [n, block_len] with some masks replaced by `tokens`: each one whose
    probability exceeds the threshold, and always the most probable one of a block.
    mask_id, threshold [n, 1]."""
    probs = torch.where(ids == mask_id, probs, -1.0)
    columns = torch.arange(ids.shape[1], device=ids.device)
    is_filled = (probs > threshold) | (columns == probs.argmax(dim=1, keepdim=True))
    return torch.where(is_filled, tokens, ids)


# --8<-- [end:fill-in]


def _groups(reqs: list[Req]) -> Iterator[list[Req]]:
    """Requests with blocks of one length, as many as fill a pass. More would need more memory for logits."""
    for block_len, alike in groupby(reqs, _block_len):
        same, most = list(alike), max(MAX_TOKENS // block_len, 1)
        yield from (same[i : i + most] for i in range(0, len(same), most))


def _block_len(req: Req) -> int:
    return params_of(req).block_len


def _rows_of_info(info: SamplingBatchInfo, rows: torch.Tensor) -> SamplingBatchInfo:
    """Rows of a batch's parameters, in any number."""
    names = ("temperatures", "top_ps", "min_ps", "top_ks", "seeds", "is_greedy", "is_sequential")
    values = {name: getattr(info, name) for name in names}
    return replace(info, **{name: value[rows] for name, value in values.items() if value is not None})
