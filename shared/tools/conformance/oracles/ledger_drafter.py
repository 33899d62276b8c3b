"""A drafter whose KV can be read, for the ledger model. It drafts what a test chooses, and asserts that the
scheduler fulfils the drafter's contract."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import ReqToTokenPool
from diptych.shared.interfaces import drafter as interface
from diptych.shared.tools.conformance.oracles.ledger import history_hash, likeliest_token, next_token
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, ForwardBatch, Req

Guess = Callable[[list[int], DraftShape, int], tuple[list[int], list[int]]]
"""A request's tokens, the shape, the vocabulary's size -> ids and parents of the nodes below the root: fewer
than N, each parent (0: the root) before its children."""


class LedgerDrafter(interface.Drafter):
    """Each slot records the inputs of a draft model's KV: the token, the next token, and the target's hidden
    state. `draft` reads every request's KV back, and overwrites its borrowed slots; when it is called again
    it overwrites the tree that it returned.

    `is_late`: batches run later than they were formed. A prompt's slots may be the prefix cache's by then."""

    hidden_layers = ()
    is_bigram = True

    def __init__(self, config: EngineConfig, guess: Guess, vocab_size: int) -> None:
        self.is_late = False
        self.guess = guess
        self.vocab_size = vocab_size
        self.draft_tree = registry.load("draft_tree", "reference")()
        self.known: set[str] = set()
        self.last_tree: DraftTree | None = None

    def allocate(self, req_to_token_pool: ReqToTokenPool, num_slots: int) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.kv: list[tuple[int, int, int] | None] = [None] * num_slots

    def num_slots(self, shape: DraftShape) -> int:
        return 1 + shape.num_steps * shape.top_k

    def extend(
        self,
        reqs: Sequence[Req],
        forward_batch: ForwardBatch,
        hidden_states: torch.Tensor | None,
        next_token_ids: torch.Tensor,
    ) -> None:
        tokens, hidden, slots, starts = self.read_step(reqs, forward_batch, hidden_states)
        for i, (req, last) in enumerate(zip(reqs, next_token_ids.tolist())):
            assert last >= 0
            own = range(starts[i], starts[i] + forward_batch.extend_seq_lens_cpu[i])
            behind = [*(tokens[j] for j in own[1:]), last]
            for j, after in zip(own, behind):
                self.kv[slots[j]] = (tokens[j], after, hidden[j])
            seq_len = forward_batch.seq_lens_cpu[i]
            row = self.req_to_token_pool.read(req.req_pool_idx, 0, seq_len).tolist()
            assert self.is_late or row[seq_len - len(own) :] == [slots[j] for j in own], (
                "a row does not name its new slots"
            )
            known = (req.all_ids[: seq_len - len(own)] + [tokens[j] for j in own] + [last])[: seq_len + 1]
            self._expect_kv(req, known)
            self.known.add(req.rid)

    def read_step(
        self, reqs: Sequence[Req], forward_batch: ForwardBatch, hidden_states: torch.Tensor | None
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        """Token ids, hidden states and slots of a step, and where each request begins."""
        self.take_back()
        assert hidden_states is not None
        assert hidden_states.shape[0] == forward_batch.num_tokens
        assert len(reqs) == forward_batch.batch_size
        tokens, hidden = forward_batch.input_ids.tolist(), hidden_states[:, 0].long().tolist()
        return tokens, hidden, forward_batch.out_cache_loc.tolist(), forward_batch.extend_start_loc.tolist()

    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        self.take_back()
        used: set[int] = set()
        token_ids, parents, num_nodes = [], [], []
        for i, req in enumerate(batch.reqs):
            assert req.rid in self.known, f"{req.rid} was never extended"
            seq_len = batch.seq_lens_cpu[i]
            assert seq_len == req.num_tokens - 1 == int(batch.seq_lens[i])
            assert int(batch.req_pool_indices[i]) == req.req_pool_idx
            assert int(batch.root_ids[i]) == req.output_ids[-1]
            self._expect_kv(req, req.all_ids)
            assert batch.num_slots >= self.num_slots(shape)
            borrowed = self.req_to_token_pool.read(
                req.req_pool_idx, seq_len, seq_len + batch.num_slots
            ).tolist()
            assert batch.slots[i].tolist() == borrowed, "slots differ from those of the row"
            used.update(borrowed)
            for slot in borrowed:
                self.kv[slot] = (-1, -1, -1)
            ids, above = self.guess(req.all_ids, shape, self.vocab_size)
            assert len(ids) == len(above) < shape.num_draft_tokens
            num_padding = shape.num_draft_tokens - 1 - len(ids)
            num_nodes.append(1 + len(ids))
            token_ids.append([req.all_ids[-1], *ids, *[0] * num_padding])
            parents.append([0, *above, *[0] * num_padding])
        assert len(used) == batch.batch_size * batch.num_slots, "two requests have the same slot"
        for req in batch.reqs:
            self._expect_kv(req, req.all_ids)  # the slots of one request held no KV of another
        self.last_tree = self.draft_tree.from_parents(
            torch.tensor(token_ids), torch.tensor(parents), torch.tensor(num_nodes)
        )
        return self.last_tree

    def take_back(self) -> None:
        """Overwrite the last tree, so that a late read fails."""
        if self.last_tree is not None:
            for values in vars(self.last_tree).values():
                values.fill_(99)

    def forget(self, req: Req) -> None:
        self.known.discard(req.rid)

    def _expect_kv(self, req: Req, tokens: list[int]) -> None:
        """Check that KV is complete for all tokens but the last."""
        row = self.req_to_token_pool.read(req.req_pool_idx, 0, len(tokens) - 1).tolist()
        for j, slot in enumerate(row):
            wanted = (tokens[j], tokens[j + 1], history_hash(tokens[: j + 1]))
            assert self.kv[slot] == wanted, (
                f"{req.rid}: draft KV of position {j} is {self.kv[slot]}, not {wanted}"
            )


def perfect(tokens: list[int], shape: DraftShape, vocab_size: int) -> tuple[list[int], list[int]]:
    """Drafts the true continuation to the greatest depth, and wrong siblings beside it."""
    num_nodes = shape.num_draft_tokens - 1
    history, above = list(tokens), 0
    ids, parents = list[int](), list[int]()
    for _ in range(shape.num_steps):
        right = next_token(history, vocab_size)
        num_wrong = min(shape.top_k - 1, num_nodes - len(ids) - 1)
        if num_wrong < 0:
            break
        for wrong in range(num_wrong):
            ids.append((right + 1 + wrong) % vocab_size)
            parents.append(above)
        ids.append(right)
        parents.append(above)
        history.append(right)
        above = len(ids)
    return ids, parents


def useless(tokens: list[int], shape: DraftShape, vocab_size: int) -> tuple[list[int], list[int]]:
    """Drafts that are never right."""
    ids, parents = perfect(tokens, shape, vocab_size)
    right = next_token(tokens, vocab_size)
    return [(right + 1) % vocab_size if above == 0 else i for i, above in zip(ids, parents)], parents


def silent(tokens: list[int], shape: DraftShape, vocab_size: int) -> tuple[list[int], list[int]]:
    """Trees of the root alone."""
    return [], []


def right_for(num_accepted: int) -> Guess:
    """Drafts that are right up to a depth and wrong behind it."""

    def guess(tokens: list[int], shape: DraftShape, vocab_size: int) -> tuple[list[int], list[int]]:
        ids, parents = perfect(tokens, shape, vocab_size)
        history, depth, above = list(tokens), 0, 0
        for n, parent in enumerate(parents):
            right = next_token(history, vocab_size)
            if parent == above and ids[n] == right:
                depth, above = depth + 1, n + 1
                if depth > num_accepted:
                    ids[n] = (right + vocab_size // 2) % vocab_size
                history.append(right)
        return ids, parents

    return guess


def erratic(seed: int, is_spread: bool = False) -> Guess:
    """Random trees of random sizes, right at random nodes; occasionally two siblings have the same token.
    `is_spread`: the right token is the likeliest by `spread_logits`."""
    right = likeliest_token if is_spread else next_token

    def guess(tokens: list[int], shape: DraftShape, vocab_size: int) -> tuple[list[int], list[int]]:
        rng = random.Random(f"{seed} {tokens}")
        histories, depths = [tokens], [0]
        ids: list[int] = []
        parents: list[int] = []
        for _ in range(rng.randint(0, shape.num_draft_tokens - 1)):
            if shape.top_k == 1:
                parent = len(ids)
            else:
                parent = rng.choice([n for n, depth in enumerate(depths) if depth < shape.num_steps][-4:])
            token = right(histories[parent], vocab_size)
            if rng.random() < 0.3:
                token = rng.randrange(vocab_size)
            ids.append(token)
            parents.append(parent)
            histories.append([*histories[parent], token])
            depths.append(depths[parent] + 1)
        return ids, parents

    return guess
