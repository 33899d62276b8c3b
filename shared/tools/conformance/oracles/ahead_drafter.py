"""A ledger drafter that runs ahead of the CPU: it reads tensors only and identifies a request by its KV."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diptych.shared.tools.conformance.oracles.ledger import hash_step, history_hash
from diptych.shared.tools.conformance.oracles.ledger_drafter import LedgerDrafter
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, Req

SCRIBBLE = (-1, -1, -1)


class AheadDrafter(LedgerDrafter):
    """Drafts from the tokens recorded in its KV. That KV is complete and consistent for running requests; a
    finished request may be computed once more, after its last token."""

    runs_ahead = True

    def extend(
        self,
        reqs: Sequence[Req],
        forward_batch: ForwardBatch,
        hidden_states: torch.Tensor | None,
        next_token_ids: torch.Tensor,
    ) -> None:
        tokens, hidden, slots, starts = self.read_step(reqs, forward_batch, hidden_states)
        lens = forward_batch.extend_seq_lens.tolist()
        num_kept = lens if forward_batch.num_kept is None else forward_batch.num_kept.tolist()
        assert len(set(slots)) == len(slots), "a slot is written twice"
        for i, last in enumerate(next_token_ids.tolist()):
            assert last >= 0
            assert 1 <= num_kept[i] <= lens[i]
            own = range(starts[i], starts[i] + num_kept[i])
            for j, after in zip(own, [*(tokens[j] for j in own[1:]), last]):
                self.kv[slots[j]] = (tokens[j], after, hidden[j])
            for j in range(own.stop, starts[i] + lens[i]):
                self.kv[slots[j]] = SCRIBBLE
        for i, req in enumerate(reqs):
            num_tokens = int(forward_batch.seq_lens[i]) - lens[i] + num_kept[i]
            self._history(req, int(forward_batch.req_pool_indices[i]), num_tokens)

    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        self.take_back()
        seq_lens, rows, roots = (
            batch.seq_lens.tolist(),
            batch.req_pool_indices.tolist(),
            batch.root_ids.tolist(),
        )
        histories = [self._history(*each) for each in zip(batch.reqs, rows, seq_lens)]
        token_ids, parents, num_nodes = [], [], []
        borrowed = batch.slots.flatten().tolist()
        assert len(set(borrowed)) == len(borrowed), "two requests have the same slot"
        assert batch.num_slots >= self.num_slots(shape)
        for slot in borrowed:
            self.kv[slot] = SCRIBBLE
        for i, (req, history) in enumerate(zip(batch.reqs, histories)):
            assert seq_lens[i] <= batch.seq_lens_cpu[i], "not an upper bound"
            ids: list[int] = []
            above: list[int] = []
            if history is not None:
                assert self.has_ended(req, seq_lens[i]) or history[-1] == roots[i]
                ids, above = self.guess([*history[:-1], roots[i]], shape, self.vocab_size)
            num_padding = shape.num_draft_tokens - 1 - len(ids)
            num_nodes.append(1 + len(ids))
            token_ids.append([roots[i], *ids, *[0] * num_padding])
            parents.append([0, *above, *[0] * num_padding])
        for each in zip(batch.reqs, rows, seq_lens):
            self._history(*each)  # the slots of one request held no KV of another
        self.last_tree = self.draft_tree.from_parents(*map(torch.tensor, (token_ids, parents, num_nodes)))
        return self.last_tree

    def forget(self, req: Req) -> None:
        pass  # nothing is kept by rid

    def has_ended(self, req: Req, num_tokens: int) -> bool:
        """Whether a request with this much KV has reached its token limit."""
        return num_tokens >= len(req.origin_input_ids) + req.max_new_tokens - 1

    def _history(self, req: Req, row: int, num_tokens: int) -> list[int] | None:
        """The tokens of an unfinished request that have KV, and the next token."""
        slots = self.req_to_token_pool.req_to_token[row, :num_tokens].tolist()
        history: list[int] = []
        h, after = history_hash([]), None
        for j, slot in enumerate(slots):
            entry = self.kv[slot] or SCRIBBLE
            h = hash_step(h, entry[0])
            if entry[2] != h or after not in (None, entry[0]):
                assert self.has_ended(req, num_tokens), (
                    f"{req.rid}: draft KV of position {j} of {num_tokens} is {entry}, and {after} was to come"
                )
                return None
            after = entry[1]
            history.append(entry[0])
        return [*history, after]
