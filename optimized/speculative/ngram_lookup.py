"""N-gram drafting on the device, without a model: the tokens that followed the last occurrence of the newest
tokens.

Differs from reference (ngram.py, which has no twin here): no trie on the CPU, so a round can be launched
before the previous result is known. Each request's tokens are in a row on the device, where all positions are
compared in parallel; a table (ngram_table.py) has what followed in other requests. Loses frequencies, matches
of more than 8 tokens, and in other requests runs of lengths other than 2, 4 and 8. Drafts only chains: other
nodes of a tree are padding. Needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.optimized.kernels.draft.draft_ngram import draft_chains
from diptych.optimized.speculative.ngram_table import MULTIPLIERS, NgramTable, namespace_id
from diptych.shared import registry
from diptych.shared.config import EngineConfig, draft_shape
from diptych.shared.interfaces import DrafterParts, ReqToTokenPool
from diptych.shared.interfaces import drafter as interface
from diptych.shared.to_device import to_device, vectors_to_device
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, Req


class NgramLookupDrafter(interface.Drafter):
    """Drafts from the request's own tokens, or from those of other requests in its namespace where more of
    the newest tokens match. Row r of `tokens` has the tokens of the request in row r of req_to_token, by
    position."""

    runs_ahead = True

    def __init__(self, config: EngineConfig, parts: DrafterParts) -> None:
        if not registry.runs_triton(parts.device.type):
            raise ValueError(
                f"device {parts.device.type} is not supported: n-gram drafts of the optimized panel are for "
                "cuda, and for others in Triton's interpreter (TRITON_INTERPRET=1)"
            )
        self.device = parts.device
        self.draft_tree = parts.component("draft_tree")()
        self.num_token_ids = parts.num_token_ids
        self.num_known: dict[str, int] = {}  # tokens of a request in its row, as far as the CPU knows
        self.multipliers = torch.tensor(MULTIPLIERS, dtype=torch.int64, device=self.device)
        self.table: NgramTable | None = None  # None: requests do not share
        if not config.speculative_ngram_private:
            self.table = NgramTable(draft_shape(config).num_steps, self.device)

    def allocate(self, req_to_token_pool: ReqToTokenPool, num_slots: int) -> None:
        rows, length = req_to_token_pool.req_to_token.shape
        self.tokens = torch.zeros(rows, length + 1, dtype=torch.int64, device=self.device)
        self.namespaces = torch.zeros(rows, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def extend(
        self,
        reqs: Sequence[Req],
        forward_batch: ForwardBatch,
        hidden_states: torch.Tensor | None,
        next_token_ids: torch.Tensor,
    ) -> None:
        fb = forward_batch
        if fb.num_kept is None:
            if fb.forward_mode.is_prefill:
                self._fill_prefixes(reqs, fb)
                ids = to_device([namespace_id(req.extra_key) for req in reqs], torch.int64, self.device)
                self.namespaces[fb.req_pool_indices] = ids
            self.num_known |= {req.rid: seq_len for req, seq_len in zip(reqs, fb.seq_lens_cpu)}
        rows = fb.req_pool_indices.repeat_interleave(fb.extend_seq_lens, output_size=fb.num_tokens)
        self.tokens[rows, fb.positions] = fb.input_ids  # of padding: overwritten before it is read
        num_kept = fb.extend_seq_lens if fb.num_kept is None else fb.num_kept
        ends = fb.seq_lens - fb.extend_seq_lens + num_kept
        self.tokens[fb.req_pool_indices, self._clamped(ends)] = next_token_ids
        if self.table is not None:
            most_new = max(fb.extend_seq_lens_cpu, default=0)
            self._learn(self.table, fb.req_pool_indices, ends, fb.extend_seq_lens, most_new)

    def _learn(
        self,
        table: NgramTable,
        rows: torch.Tensor,
        ends: torch.Tensor,
        new_lens: torch.Tensor,
        most_new: int,
    ) -> None:
        table.learn(self.tokens, self.namespaces, rows, ends, new_lens, most_new, self.multipliers)

    def _fill_prefixes(self, reqs: Sequence[Req], batch: ForwardBatch) -> None:
        """Copy the tokens of cached prefixes, which the target did not compute."""
        lens = [seq_len - new for seq_len, new in zip(batch.seq_lens_cpu, batch.extend_seq_lens_cpu)]
        numbers, positions, ids = list[int](), list[int](), list[int]()
        for number, (req, prefix_len) in enumerate(zip(reqs, lens)):
            start = self.num_known.get(req.rid, 0)
            found = req.all_ids[start:prefix_len]
            numbers += [number] * len(found)
            positions += range(start, start + len(found))
            ids += found
        if ids:
            which, where, values = vectors_to_device([numbers, positions, ids], self.device)
            self.tokens[batch.req_pool_indices[which], where] = values

    @torch.inference_mode()
    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        rows, seq_lens = batch.req_pool_indices, self._clamped(batch.seq_lens)
        self.tokens[rows, seq_lens] = batch.root_ids
        max_len = min(max(batch.seq_lens_cpu, default=0) + 1, self.tokens.shape[1])
        tree: DraftTree = self.draft_tree.from_parents(*self._chains(rows, seq_lens, max_len, shape))
        return tree

    def _chains(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, max_len: int, shape: DraftShape
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return draft_chains(
            self.tokens,
            self.namespaces,
            rows,
            seq_lens,
            max_len,
            self.multipliers,
            None if self.table is None else self.table.arrays,
            num_drafts=min(shape.num_steps, shape.num_draft_tokens - 1),
            num_nodes=shape.num_draft_tokens,
            num_token_ids=self.num_token_ids,
        )

    @torch.inference_mode()
    def rehearse(self, shape: DraftShape) -> None:
        row = torch.zeros(1, dtype=torch.int64, device=self.device)
        if self.table is not None:
            self._learn(self.table, row, row, row, 0)  # no token is new: nothing is entered
        self._chains(row, row, 1, shape)

    def _clamped(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions clamped to the context; tokens beyond it are not kept."""
        return positions.clamp(max=self.tokens.shape[1] - 1)

    def forget(self, req: Req) -> None:
        """Nothing to free: a row is overwritten by its next owner."""
        self.num_known.pop(req.rid, None)
