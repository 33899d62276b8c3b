"""CUDA graphs of drafting: one for a whole draft, and one for the extension by accepted tokens.

Batches go through buffers, padded to a captured size, as those of the target (decode_graph.py). A padding row
is a request without a token, in the dummy row of req_to_token. It uses the dummy page and the dummy row of
the drafter's state.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm.auto import tqdm

from diptych.optimized.graphs.cuda_graph import (
    CapturedCall,
    CudaGraphs,
    graphs_of_drafter,
    try_to_capture,
    warn_of_launches,
)
from diptych.optimized.graphs.decode_graph import PaddedVectors
from diptych.optimized.graphs.rehearsal import (
    attention_of_rehearsal,
    deterministic_batches,
    prefill_batches,
    prompts,
    sizes_beyond,
)
from diptych.optimized.graphs.verify_graph import verify_batch_sizes
from diptych.shared.config import EngineConfig
from diptych.shared.config.speculation_flags import possible_shapes
from diptych.shared.interfaces import AttentionBackend
from diptych.shared.speculation.drafter_base import BaseDrafter
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, ForwardMode, Req

Draft = Callable[[DraftBatch, DraftShape], DraftTree]
Extend = Callable[[ForwardBatch, torch.Tensor, torch.Tensor], None]


@dataclass
class DraftCalls:
    """The captured functions of one batch size."""

    draft: CapturedCall
    trees: list[DraftTree]  # one: the place of its result
    extend: CapturedCall


class DraftGraphs:
    """The graphs of one draft shape; with adaptive shapes, each has its own. `capture_all` captures them.
    None and False mark batches that fit no graph."""

    def __init__(
        self,
        config: EngineConfig,
        shape: DraftShape,
        num_slots: int,
        like: torch.Tensor,
        attention: AttentionBackend,
    ) -> None:
        """like: an example of the hidden states of extensions."""
        device = like.device
        self.attention = attention
        self.shape = shape
        self.num_rows = min(self.shape.num_steps + 1, self.shape.num_draft_tokens)
        """of each request in an extension"""
        self.num_slots = num_slots
        self.batch_sizes = verify_batch_sizes(config, shape.num_draft_tokens)
        assert config.context_len is not None
        self.max_len = config.context_len  # of any request: a graph's batches have upper bounds of lengths
        self.num_replays = 0
        self._calls: dict[int, DraftCalls] = {}
        max_bs = self.batch_sizes[-1] if self.batch_sizes else 0
        requests = {"req_pool_indices": 0, "seq_lens": 0, "root_ids": 0}
        self.draft_ints = PaddedVectors(requests, max_bs, torch.int64, device)
        self.slots = PaddedVectors({"slots": 0}, max_bs * num_slots, torch.int64, device)
        requests = {"req_pool_indices": 0, "seq_lens": self.num_rows, "num_kept": 1, "next_token_ids": 0}
        self.extend_ints = PaddedVectors(requests, max_bs, torch.int64, device)
        tokens = {"input_ids": 0, "positions": 0, "out_cache_loc": 0}
        self.token_ints = PaddedVectors(tokens, max_bs * self.num_rows, torch.int64, device)
        self.hidden_states = like.new_zeros(max_bs * self.num_rows, like.shape[-1])
        self.num_each = torch.full((max_bs,), self.num_rows, dtype=torch.int64, device=device)
        self.starts = torch.arange(max_bs, device=device) * self.num_rows

    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree | None:
        calls = self._calls_for(batch.batch_size) if shape == self.shape else None
        if calls is None:
            return None
        size, call = calls
        bs = batch.batch_size
        self.draft_ints.load([batch.req_pool_indices, batch.seq_lens, batch.root_ids], size)
        if self.num_slots:
            self.slots.load([batch.slots[:, : self.num_slots].flatten()], size * self.num_slots)
        call.draft()
        self.num_replays += 1
        tree = call.trees[0]
        return tree if bs == size else DraftTree(*(values[:bs] for values in vars(tree).values()))

    def extend(
        self, forward_batch: ForwardBatch, hidden_states: torch.Tensor, next_token_ids: torch.Tensor
    ) -> bool:
        fb = forward_batch
        if fb.num_kept is None or set(fb.extend_seq_lens_cpu) != {self.num_rows}:
            return False
        calls = self._calls_for(fb.batch_size)
        if calls is None:
            return False
        size, call = calls
        self.extend_ints.load([fb.req_pool_indices, fb.seq_lens, fb.num_kept, next_token_ids], size)
        self.token_ints.load([fb.input_ids, fb.positions, fb.out_cache_loc], size * self.num_rows)
        self.hidden_states[: fb.num_tokens].copy_(hidden_states)
        call.extend()
        self.num_replays += 1
        return True

    def buffers_of_draft(self, size: int) -> DraftBatch:
        """The first `size` rows, which are padding until a batch is loaded."""
        return DraftBatch(
            reqs=[],
            **self.draft_ints.heads(size),
            seq_lens_cpu=(self.max_len,) * size,
            slots=self.slots.head("slots", size * self.num_slots).view(size, self.num_slots),
        )

    def buffers_of_extend(self, size: int) -> tuple[ForwardBatch, torch.Tensor, torch.Tensor]:
        """The buffers of an extension: the batch, the hidden states, and the next tokens."""
        num_tokens = size * self.num_rows
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            **self.token_ints.heads(num_tokens),
            **self.extend_ints.heads(size, 3),
            extend_seq_lens=self.num_each[:size],
            extend_start_loc=self.starts[:size],
            seq_lens_cpu=(self.max_len + self.num_rows,) * size,
            extend_seq_lens_cpu=(self.num_rows,) * size,
        )
        return forward_batch, self.hidden_states[:num_tokens], self.extend_ints.head("next_token_ids", size)

    def capture_all(self, graphs: CudaGraphs, draft: Draft, extend: Extend) -> bool:
        """Capture all graphs. False if one could not be captured."""
        if not (self.attention.supports_cuda_graph and self.attention.accepts_seq_len_upper_bounds):
            warn_of_launches("drafting", f"{type(self.attention).__name__} does not run in CUDA graphs")
            return False
        sizes: Iterable[int] = self.batch_sizes[::-1]
        for size in tqdm(sizes, desc="capture CUDA graphs of drafts", unit="size", leave=False, delay=1.0):
            draft_batch, extend_batch = self.buffers_of_draft(size), self.buffers_of_extend(size)
            trees: list[DraftTree] = []

            def draft_all(batch: DraftBatch = draft_batch, trees: list[DraftTree] = trees) -> torch.Tensor:
                trees[:] = [draft(batch, self.shape)]
                return trees[0].token_ids

            def extend_all(
                batch: tuple[ForwardBatch, torch.Tensor, torch.Tensor] = extend_batch,
            ) -> torch.Tensor:
                extend(*batch)
                return batch[1]

            extend_call = try_to_capture(graphs, "drafting", "the draft model", extend_all)
            draft_call = try_to_capture(graphs, "drafting", "the draft model", draft_all)
            if extend_call is None or draft_call is None:
                self._calls.clear()
                return False
            self._calls[size] = DraftCalls(draft_call, trees, extend_call)
        return True

    @property
    def max_captured(self) -> int:
        return self.batch_sizes[-1] if self._calls else 0

    def example_draft(self, size: int, seq_len: int) -> DraftBatch:
        """Requests of `seq_len` tokens in the dummy page."""
        zeros = torch.zeros(size, dtype=torch.int64, device=self.hidden_states.device)
        slots = zeros.new_zeros(size, self.num_slots)
        return DraftBatch([], zeros, zeros, zeros + seq_len, (seq_len,) * size, slots)

    def example_extend(self, size: int) -> ForwardBatch:
        """Accepted rows of requests."""
        batch = prompts([self.num_rows] * size, self.hidden_states.device)
        return replace(batch, num_kept=torch.ones_like(batch.seq_lens))

    def _calls_for(self, batch_size: int) -> tuple[int, DraftCalls] | None:
        if not self._calls or batch_size > self.batch_sizes[-1]:
            return None
        size = self.batch_sizes[bisect_left(self.batch_sizes, batch_size)]
        return size, self._calls[size]


def capture_drafts(
    of_shapes: Sequence[DraftGraphs], graphs: CudaGraphs, draft: Draft, extend: Extend
) -> None:
    """Capture the graphs of all shapes. They come before those of the target: verification reads a tree, and
    a replay leaves the results of graphs that were captured before alone."""
    for of_shape in of_shapes:
        if not of_shape.capture_all(graphs, draft, extend):
            return


class GraphDrafter(BaseDrafter):
    """Drafts and extends in graphs; kernels of other batches are launched one by one."""

    runs_ahead = True
    model: Any  # of drafts

    def make_graphs(self, like: torch.Tensor) -> None:
        """Behind `make_attention`. like: an example of the hidden states of extensions."""
        self.graphs = [
            DraftGraphs(self.config, shape, self.num_slots(shape), like, self.attention)
            for shape in possible_shapes(self.config)
        ]
        graphs = None if self.config.disable_cuda_graph else self._cuda_graphs()
        if graphs is not None:
            capture_drafts(self.graphs, graphs, self._draft, self._extend)

    def extend(
        self,
        reqs: Sequence[Req],
        forward_batch: ForwardBatch,
        hidden_states: torch.Tensor | None,
        next_token_ids: torch.Tensor,
    ) -> None:
        assert hidden_states is not None
        given = forward_batch, hidden_states, next_token_ids
        if not any(of_shape.extend(*given) for of_shape in self.graphs):
            self._extend(*given)

    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        """Draft. With a graph, the next draft of the same size overwrites the tree."""
        for of_shape in self.graphs:
            tree = of_shape.draft(batch, shape)
            if tree is not None:
                return tree
        return self._draft(batch, shape)

    @torch.inference_mode()
    def rehearse(self, shape: DraftShape) -> None:
        """Extensions by prompts, and what more requests than are captured need."""
        of_shape = next(each for each in self.graphs if each.shape == shape)
        with attention_of_rehearsal(self):
            if of_shape is self.graphs[0]:
                device = self.parts.device
                for batch in prefill_batches(self.config, self.attention_config, 0, device):
                    self._rehearse_extend(batch)
                own = deterministic_batches(self.config, self.model, 0, device)
                for batch in own if self.config.deterministic else ():
                    self._rehearse_extend(batch)
            for size in sizes_beyond(self.config, of_shape.max_captured):
                for seq_len in (1, self.context_len - 1):
                    self._draft(of_shape.example_draft(size, seq_len), shape)
                self._rehearse_extend(of_shape.example_extend(size))

    def _rehearse_extend(self, batch: ForwardBatch) -> None:
        like = self.graphs[0].hidden_states
        hidden_states = like.new_zeros(batch.num_tokens, like.shape[-1])
        self._extend(batch, hidden_states, torch.zeros_like(batch.seq_lens))

    @abstractmethod
    def _extend(
        self, forward_batch: ForwardBatch, hidden_states: torch.Tensor, next_token_ids: torch.Tensor
    ) -> None:
        """Captured: without waiting for the device."""

    @abstractmethod
    def _draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        """Captured: without waiting for the device."""

    def _cuda_graphs(self) -> CudaGraphs | None:
        return graphs_of_drafter(self.parts.model, self.parts.device)
