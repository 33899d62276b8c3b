"""N-gram drafting on the device, without a model: the tokens that followed the last occurrence of the newest
tokens.

Differs from reference (ngram.py, which has no twin here): no trie on the CPU, so a round can be launched
before the previous result is known. Each request's tokens are in a row on the device, where all positions are
compared in parallel; a table (ngram_table.py) has what followed in other requests. Loses frequencies, and in
other requests runs of lengths other than 2, 4 and 8. Drafts only chains: other nodes of a tree are padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from diptych.optimized.speculative.ngram_table import LONGEST, NgramTable, namespace_id
from diptych.shared.config import EngineConfig, draft_shape
from diptych.shared.interfaces import DrafterParts, ReqToTokenPool
from diptych.shared.interfaces import drafter as interface
from diptych.shared.to_device import to_device, vectors_to_device
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, Req

MAX_MATCH_LEN = 8  # longest suffix to match; longer matches add little


class NgramLookupDrafter(interface.Drafter):
    """Drafts from the request's own tokens, or from those of other requests in its namespace where more of
    the newest tokens match. Row r of `tokens` has the tokens of the request in row r of req_to_token, by
    position."""

    runs_ahead = True

    def __init__(self, config: EngineConfig, parts: DrafterParts) -> None:
        self.device = parts.device
        self.draft_tree = parts.component("draft_tree")()
        self.num_token_ids = parts.num_token_ids
        self.num_known: dict[str, int] = {}  # tokens of a request in its row, as far as the CPU knows
        self.table: NgramTable | None = None  # None: requests do not share
        if not config.speculative_ngram_private:
            self.table = NgramTable(draft_shape(config).num_steps, self.device)
            self.around = torch.arange(1 - LONGEST, 1 + self.table.continuation_len, device=self.device)

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
            self._share(self.table, fb, ends)

    def _share(self, table: NgramTable, batch: ForwardBatch, ends: torch.Tensor) -> None:
        """Enter the runs of the batch's tokens, and again the runs before them, behind which tokens were
        missing. ends [bs]: positions of the newest tokens."""
        num_each = [num_new + table.continuation_len - 1 for num_new in batch.extend_seq_lens_cpu]
        lens = batch.extend_seq_lens + (table.continuation_len - 1)
        numbers = torch.arange(len(num_each), device=self.device)
        which = numbers.repeat_interleave(lens, output_size=sum(num_each))
        shifts = ends - lens.cumsum(dim=0)  # so that a request's last position is the one before its newest
        positions = torch.arange(len(which), device=self.device) + shifts[which]
        windows = positions[:, None] + self.around
        is_known = (windows >= 0) & (windows <= self._clamped(ends)[which, None])
        rows = batch.req_pool_indices[which]
        tokens = self.tokens[rows[:, None], self._clamped(windows).clamp(min=0)]
        table.learn(self.namespaces[rows], tokens.masked_fill(~is_known, -1))

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
        width = min(max(batch.seq_lens_cpu, default=0) + 1, self.tokens.shape[1])
        tokens = self.tokens[rows, :width]
        ends, match_lens = self._longest_matches(tokens, seq_lens)
        # --8<-- [start:ngram-lookup]
        num_drafts = min(shape.num_steps, shape.num_draft_tokens - 1)
        steps = torch.arange(num_drafts, device=self.device)
        # The tokens that followed, up to the newest token, then the same again, as for
        # an ongoing repetition.
        periods = (seq_lens - ends).clamp(min=1)[:, None]
        drafts = tokens.gather(1, ends[:, None] + 1 + steps % periods)
        if self.table is not None:
            newest = self._newest(tokens, seq_lens)
            others, shared_lens = self.table.look_up(self.namespaces[rows], newest)
            is_longer = shared_lens > match_lens  # at equal lengths the request's own
            drafts = torch.where(is_longer[:, None], others[:, :num_drafts], drafts)
            match_lens = torch.maximum(match_lens, shared_lens)
        is_token = (drafts >= 0) & (drafts < self.num_token_ids) & (match_lens > 0)[:, None]
        is_token = is_token.long().cumprod(dim=1)  # a prompt may have ids that cannot be drafted
        # --8<-- [end:ngram-lookup]
        num_nodes = 1 + is_token.sum(dim=1)
        padding = shape.num_draft_tokens - 1 - num_drafts
        token_ids = torch.cat([batch.root_ids[:, None], F.pad(drafts * is_token, (0, padding))], dim=1)
        parents = F.pad(steps * is_token, (1, padding))
        tree: DraftTree = self.draft_tree.from_parents(token_ids, parents, num_nodes)
        return tree

    def _longest_matches(
        self, tokens: torch.Tensor, seq_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [bs, width], the newest at seq_lens -> for each request the position before it where the
        longest suffix ends that is there too, of several the last; and its length, at most MAX_MATCH_LEN."""
        width = tokens.shape[1]
        positions = torch.arange(width, device=self.device)
        matches = positions < seq_lens[:, None]
        match_lens = torch.zeros_like(tokens)
        for back in range(min(MAX_MATCH_LEN, width)):
            wanted = tokens.gather(1, (seq_lens - back).clamp(min=0)[:, None])
            earlier = F.pad(tokens[:, : width - back], (back, 0), value=-1)
            matches = matches & (earlier == wanted) & (seq_lens >= back)[:, None]
            match_lens += matches
        ends = (match_lens * width + positions).masked_fill(match_lens == 0, 0).argmax(dim=1)
        return ends, match_lens.gather(1, ends[:, None])[:, 0]

    def _newest(self, tokens: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """The last tokens of each request, [bs, LONGEST]; -1 before its first one."""
        positions = seq_lens[:, None] + self.around[:LONGEST]
        return tokens.gather(1, positions.clamp(min=0)).masked_fill(positions < 0, -1)

    def _clamped(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions clamped to the context; tokens beyond it are not kept."""
        return positions.clamp(max=self.tokens.shape[1] - 1)

    def forget(self, req: Req) -> None:
        """Nothing to free: a row is overwritten by its next owner."""
        self.num_known.pop(req.rid, None)
