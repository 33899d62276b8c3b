"""The batches of a round, in tensors of fixed shape: drafting, verification, and kept tokens."""

from __future__ import annotations

import torch

from diptych.optimized.speculative.round import Starts
from diptych.shared.types import DraftBatch, DraftTree, ForwardBatch, ForwardMode, Req


class RoundBatches:
    def __init__(self, context_len: int, num_slots: int, device: torch.device) -> None:
        self.context_len = context_len
        self.device = device
        self.numbers = torch.arange(num_slots, device=device)
        self._lens: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # see `_lens_of`

    # --8<-- [start:where-a-round-begins]
    def draft_batch(
        self, reqs: list[Req], starts: Starts, run_lens: torch.Tensor, newest: torch.Tensor
    ) -> DraftBatch:
        """The batch to draft for. run_lens, newest [bs] int64: number of tokens, and
        last token, of the runs at `starts.places`. A request that has ended by length
        may start beyond its last position: there it has slots to write to, and its
        results are not read."""
        num_new = torch.minimum(starts.is_round * run_lens, starts.last_starts - starts.kv_lens)
        columns = num_new[:, None] + self.numbers
        return DraftBatch(
            reqs=reqs,
            root_ids=torch.where(starts.places > 0, newest, starts.root_ids),
            req_pool_indices=starts.rows,
            seq_lens=starts.kv_lens + num_new,
            seq_lens_cpu=starts.bounds,
            slots=starts.slots.gather(1, columns),
        )

    # --8<-- [end:where-a-round-begins]

    def regular(
        self, batch: DraftBatch, token_ids: torch.Tensor, positions: torch.Tensor, mode: ForwardMode
    ) -> ForwardBatch:
        """A batch with n tokens of each request, in its next slots. token_ids [bs, n], positions [bs * n]."""
        bs, n = token_ids.shape
        extend_seq_lens, extend_start_loc = self._lens_of(bs, n)
        return ForwardBatch(
            forward_mode=mode,
            input_ids=token_ids.flatten(),
            # Tokens beyond the context's end get its last position and are never kept.
            positions=positions.clamp(max=self.context_len - 1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens + n,
            out_cache_loc=batch.slots[:, :n].flatten(),
            extend_seq_lens=extend_seq_lens,
            extend_start_loc=extend_start_loc,
            seq_lens_cpu=tuple(seq_len + n for seq_len in batch.seq_lens_cpu),
            extend_seq_lens_cpu=(n,) * bs,
        )

    def kept_batch(self, batch: DraftBatch, token_ids: torch.Tensor) -> ForwardBatch:
        """The accepted tokens [bs, max_kept], padding behind them, as an extension."""
        positions = batch.seq_lens[:, None] + self.numbers[: token_ids.shape[1]]
        return self.regular(batch, token_ids, positions.flatten(), ForwardMode.EXTEND)

    def rows_of(self, tree: DraftTree, nodes: torch.Tensor) -> torch.Tensor:
        """Rows of the verified batch of each request's nodes [bs, n], flattened."""
        _, first = self._lens_of(tree.batch_size, tree.num_draft_tokens)
        return (first[:, None] + nodes).flatten()

    def _lens_of(self, bs: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths and starts of a batch with n tokens of each request. Read-only."""
        if (bs, n) not in self._lens:
            num_each = torch.full((bs,), n, dtype=torch.int64, device=self.device)
            self._lens[bs, n] = num_each, torch.arange(bs, device=self.device) * n
        return self._lens[bs, n]
