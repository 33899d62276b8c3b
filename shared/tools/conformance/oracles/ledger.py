"""The ledger model: a model whose KV cache can be read, for tests of schedulers at thousands of steps a
second.

Each slot holds the token that was written there and, in place of deeper layers, a hash of the history up to
it. A forward pass reads every request's whole history back through req_to_token, as attention would, and the
next token is a hash of that history. So a slot that is freed too early, written twice, mapped to the wrong
position, or computed from another history changes the output; and the right output of a prompt is known
without any engine (`expected_tokens`; of requests that sample: `answer_alone`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch

from diptych.shared.interfaces import ReqToTokenPool, Sampler
from diptych.shared.interfaces import model_runner as interface
from diptych.shared.sampling.logprobs import ranked_logprobs_of
from diptych.shared.types import ForwardBatch, ForwardMode, LogitsOutput, SampleOutput, SamplingBatchInfo

POISON = -1
"""The content of a slot that was never written: reading it is an error."""


_Hash = TypeVar("_Hash", int, float)


def history_hash(history: Sequence[int]) -> int:
    """A hash of every token and their order."""
    h = 17
    for token in history:
        h = hash_step(h, token)
    return h


def hash_step(h: _Hash, token: int) -> _Hash:
    """The hash of a history and one more token; NaN stays NaN."""
    return (h * 31 + token + 1) % 1_000_003


def next_token(history: Sequence[int], vocab_size: int) -> int:
    """A token that depends on every token before it, and on their order."""
    return history_hash(history) % vocab_size


def certain_logits(h: int, vocab_size: int) -> torch.Tensor:
    """Logits with which `next_token` of this history is sampled under any sampling parameters."""
    logits = torch.full((vocab_size,), -10.0)
    logits[h % vocab_size] = 10.0
    return logits


def spread_logits(h: int, vocab_size: int) -> torch.Tensor:
    """Logits in [0, 3), each depending on the whole history, so that temperature, penalties and masks have an
    effect."""
    x = h * vocab_size + torch.arange(vocab_size) + 1
    for multiplier in (48_271, 69_621):
        x = x * multiplier % (2**31 - 1)
    return x % 10_007 / 10_007 * 3.0


def likeliest_token(history: Sequence[int], vocab_size: int) -> int:
    """The token with the largest of `spread_logits`."""
    return int(spread_logits(history_hash(history), vocab_size).argmax())


def expected_tokens(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """The output that any correct scheduler produces for a prompt."""
    history = list(prompt)
    for _ in range(num_tokens):
        history.append(next_token(history, vocab_size))
    return history[len(prompt) :]


class LedgerModelRunner(interface.ModelRunner):
    """`nan_token`: a history that ends with this token gives NaN logits. `fail_token`: a batch that contains
    it raises. Neither affects the rows of other requests. A token's hidden state is the hash of its history.
    `spoil_token`: a fault: the next time that this token is written, its KV is NaN. So is then the KV of all
    tokens that see it, and their logits.

    `is_late`: batches run later than they were formed. A prompt's slots may be the prefix cache's by then."""

    accepts_seq_len_upper_bounds = True

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        num_slots: int,
        vocab_size: int,
        nan_token: int | None = None,
        fail_token: int | None = None,
        context_len: int = 1 << 30,
        is_spread: bool = False,
    ) -> None:
        self.is_late = False
        self.logits_of = spread_logits if is_spread else certain_logits
        self.context_len = context_len
        self.req_to_token_pool = req_to_token_pool
        self.vocab_size = vocab_size
        self.nan_token = nan_token
        self.fail_token = fail_token
        self.spoil_token: int | None = None
        self.ledger = torch.full((num_slots,), POISON, dtype=torch.int64)
        self.hashes = torch.zeros(num_slots, dtype=torch.float64)
        self.num_computed_tokens = 0

    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        fb = forward_batch
        assert int(fb.out_cache_loc.min()) > 0, "the dummy page was written for a real token"
        assert len(set(fb.out_cache_loc.tolist())) == fb.num_tokens, "two tokens were given one slot"
        if self.fail_token is not None and (fb.input_ids == self.fail_token).any():
            raise RuntimeError("the model fails on purpose")
        self.ledger[fb.out_cache_loc] = fb.input_ids
        self.num_computed_tokens += fb.num_tokens

        hashes: list[float] = []  # of every token's history
        starts = fb.extend_start_loc.tolist()
        mask_start = 0
        for i, (row, seq_len) in enumerate(zip(fb.req_pool_indices.tolist(), fb.seq_lens.tolist())):
            assert seq_len <= fb.seq_lens_cpu[i], (
                f"{seq_len} tokens: more than the {fb.seq_lens_cpu[i]} at most"
            )
            slots = self.req_to_token_pool.req_to_token[row, :seq_len].long()
            extend_len = fb.extend_seq_lens_cpu[i]
            own = slice(starts[i], starts[i] + extend_len)
            assert self.is_late or torch.equal(slots[-extend_len:], fb.out_cache_loc[own]), (
                "a row does not name its new slots"
            )
            positions, own_slots = fb.positions[own].tolist(), fb.out_cache_loc[own]
            if fb.tree_mask is not None:
                before = seq_len - fb.tree_mask.shape[2]
                mask = torch.nn.functional.pad(fb.tree_mask[i], (before, 0), value=True)
                own_hashes = self._masked(slots, positions, mask)
            elif fb.custom_mask is None:
                own_hashes = self._causal(slots, own_slots, positions)
            else:
                mask = fb.custom_mask[mask_start : mask_start + extend_len * seq_len].view(extend_len, -1)
                own_hashes = self._masked(slots, positions, mask)
                mask_start += extend_len * seq_len
            self.hashes[own_slots] = torch.tensor(own_hashes, dtype=torch.float64)
            hashes += own_hashes

        rows: Sequence[int] = range(fb.num_tokens)
        if fb.forward_mode is not ForwardMode.TARGET_VERIFY:
            rows = fb.last_token_rows.tolist()

        def logits_at(rows: Sequence[int]) -> torch.Tensor:
            return torch.stack([self._logits(hashes[row], int(fb.input_ids[row])) for row in rows])

        hidden_states = torch.tensor(hashes, dtype=torch.float64)[:, None]
        output = LogitsOutput(logits_at(rows), hidden_states=hidden_states)
        if fb.input_logprob_rows is None:
            return output
        assert fb.input_logprob_ids is not None
        logits = logits_at(fb.input_logprob_rows.tolist())
        found = ranked_logprobs_of(
            logits, fb.input_logprob_ids, fb.num_top_input_logprobs, fb.input_asked_ids
        )
        return output._replace(input_logprobs=found)

    def forward_and_sample(
        self, forward_batch: ForwardBatch, sampler: Sampler, info: SamplingBatchInfo, num_token_ids: int
    ) -> tuple[LogitsOutput, SampleOutput]:
        logits_output = self.forward(forward_batch)
        logits = logits_output.next_token_logits[:, :num_token_ids]
        return logits_output, sampler.sample(logits, info, forward_batch.sampled_positions)

    def logits_after(self, history: Sequence[int]) -> torch.Tensor:
        return self._logits(history_hash(history), history[-1])

    def _logits(self, h: float, last_token: int) -> torch.Tensor:
        if math.isnan(h) or (self.nan_token is not None and last_token == self.nan_token):
            return torch.full((self.vocab_size,), torch.nan)
        return self.logits_of(int(h), self.vocab_size)

    def _causal(self, slots: torch.Tensor, own_slots: torch.Tensor, positions: list[int]) -> list[float]:
        history = self._read(slots)
        start = len(history) - len(positions)
        right = list(range(start, len(history)))
        num_nodes = next((n for n in range(1, len(right)) if positions[n] == start), len(right))
        assert positions[num_nodes:] == [start] * (len(right) - num_nodes)  # padding of a verified chain
        self._check_positions(positions[:num_nodes], right[:num_nodes])
        h = self._hash_of(slots[:start], history[:start])
        is_own_slot, found = (slots[start:] == own_slots).tolist(), self.hashes[slots[start:]].tolist()
        hashes = []
        for token, own, other in zip(history[start:], is_own_slot, found):
            h = hash_step(h, token)
            if not own:  # by now the row names the prefix cache's slot for it
                h = self._agreed(h, other)
            elif token == self.spoil_token:
                h, self.spoil_token = math.nan, None
            hashes.append(h)
        return hashes

    def _masked(self, slots: torch.Tensor, positions: list[int], mask: torch.Tensor) -> list[float]:
        """Ancestors stand in front of their descendants: the visible slots in order are a history."""
        start = len(slots) - len(positions)
        assert mask[:, :start].all(), "a node does not see all that was before"
        history, nodes = self._read(slots[:start]), self._read(slots[start:])
        paths = [visible.nonzero().flatten().tolist() for visible in mask[:, start:]]
        self._check_positions(positions, [start + len(path) - 1 for path in paths])
        before, hashes = self._hash_of(slots[:start], history), []
        for path in paths:
            h = before
            for node in path:
                h = hash_step(h, nodes[node])
            hashes.append(h)
        return hashes

    def _hash_of(self, slots: torch.Tensor, history: list[int]) -> float:
        """The hash of what was computed before."""
        h: float = history_hash([])
        for token, found in zip(history, self.hashes[slots].tolist()):
            h = self._agreed(hash_step(h, token), found)
        return h

    def _agreed(self, h: float, found: float) -> float:
        """The hash of a history, if the KV of its last token was computed for this history; NaN if that KV is
        NaN."""
        assert h == found or math.isnan(h) or math.isnan(found), "KV is read that belongs to another history"
        return h + 0 * found

    def _read(self, slots: torch.Tensor) -> list[int]:
        history: list[int] = self.ledger[slots].tolist()
        assert min(history, default=0) != POISON, "a slot was read that was never written"
        return history

    def _check_positions(self, positions: list[int], right: list[int]) -> None:
        last = self.context_len - 1
        assert positions == [min(position, last) for position in right], f"positions {positions}, not {right}"


class LedgerKVPool:
    """The KV pool of a ledger: moves slots, the only operation that schedulers need."""

    def __init__(self, model_runner: LedgerModelRunner) -> None:
        self.tensors = model_runner.ledger, model_runner.hashes

    def move(self, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
        for tensor in self.tensors:
            tensor[target_slots] = tensor[source_slots]
