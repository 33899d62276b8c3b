"""Contract of a drafter: whatever guesses a request's next tokens, for the target to verify."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces.memory_pool import ReqToTokenPool
from diptych.shared.interfaces.model import CausalLM
from diptych.shared.types import ForwardBatch, Req
from diptych.shared.types.draft_tree import DraftTree
from diptych.shared.types.speculation import DraftBatch, DraftShape


@dataclass(frozen=True)
class DrafterParts:
    """What a drafter may build on."""

    model: CausalLM  # the target, with its weights: embedding and head may be shared
    model_config: ModelConfig  # the target's
    component: Callable[[str], Any]  # the implementation chosen for a component of the registry
    device: torch.device
    dtype: torch.dtype  # the target's
    num_token_ids: int  # ids [0, this) have a token: nothing else may be drafted


class Drafter(ABC):
    """Guesses what the target will say. Guesses change how many steps an answer takes, never the answer.

    Life of a request: `extend` each time the target has computed KV that stays; `draft` before a step that
    verifies; `forget` when the request ends or loses its memory. A request that comes back after `forget`
    is extended again from what the prefix cache still holds. Requests know nothing of one another: what is
    drafted for one does not depend on its batch-mates' rows. A drafter may learn from all requests with the
    same `extra_key`, ended ones too, unless `speculative_ngram_private`.

    A drafter with KV keeps it in a pool of its own under the target's slot ids, found through the same
    req_to_token: what the allocator and the prefix cache do to a slot happens to both.
    """

    hidden_layers: tuple[int, ...] | None = None
    """Hidden states of the target that `extend` reads. None: none. (): the output of its final norm. Else:
    the residual stream at the input of these layers, side by side, in this order."""

    is_bigram: bool = False
    """Its KV at position i depends on token i + 1 too, so the prefix cache matches pairs of tokens."""

    runs_ahead: bool = False
    """True: it can be called for a step before the CPU has the results of the previous one. It reads tensors,
    not `req.output_ids`, and uses lengths on the CPU as upper bounds only. False: the speculator waits for
    each step to end before it calls the drafter again."""

    num_kv_bytes_per_token: int = 0
    """What one slot takes in its pool; known once it is made."""

    kv_pool: Any = None
    """Its own `TokenToKVPool`, after `allocate`; None: it has none. Between prefill and decode engines its KV
    is sent with the target's."""

    @abstractmethod
    def __init__(self, config: EngineConfig, parts: DrafterParts) -> None:
        """Loads what it needs. Raises `ValueError` for a draft model that is missing or does not fit the
        target. Pools do not exist yet."""

    def allocate(self, req_to_token_pool: ReqToTokenPool, num_slots: int) -> None:  # noqa: B027 - may need none
        """Called once, before the first request: make the KV pool, of as many slots as the target's has.
        `req_to_token_pool` is the target's: it is read, never written."""

    def num_slots(self, shape: DraftShape) -> int:
        """Slots that `draft` may use for each request, from its newest token's position on."""
        return 0

    @abstractmethod
    def extend(
        self,
        reqs: Sequence[Req],
        forward_batch: ForwardBatch,
        hidden_states: torch.Tensor | None,
        next_token_ids: torch.Tensor,
    ) -> None:
        """The target has computed KV that stays: request i's tokens at positions [seq_len - extend_seq_len,
        seq_len), as `forward_batch` says. That was a prefill or one chunk of it, a plain decode step, or the
        accepted part of a tree, its slots already where they stay.

        hidden_states: of all tokens of the batch, one row each, as `hidden_layers` asks. next_token_ids [bs]:
        the token at position seq_len: what was sampled, but behind a chunk that is not the prompt's last the
        prompt's next token. (A request that is about to end is extended as well: its KV is cached. Nothing is
        drafted for it.) The batch's own tokens may not be in `req.output_ids` yet.

        A drafter that runs ahead may be given more after a verification: min(num_steps + 1, num_draft_tokens)
        rows of each request, the first `forward_batch.num_kept` of them accepted. The rest is padding, with
        slots of the request's own behind them. What is written there is overwritten before it is read; and
        seq_len - extend_seq_len is where the accepted tokens begin, as ever.

        Afterwards the drafter's KV is complete for [0, seq_len): it overwrites what it wrote there itself
        while drafting. KV of a prefix from the prefix cache is there already."""

    @abstractmethod
    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        """Trees of shape.num_draft_tokens nodes, padding included, at most shape.num_steps deep, on the
        target's device; ids in [0, num_token_ids). No number of `shape` exceeds that of the configuration.
        No guess: just the root. Positions behind the context's end are never verified; a drafter may draft
        there if it can (its own positions must stay in its model's range), or stop.

        The tree is valid until the drafter is called again, which may overwrite its tensors."""

    def rehearse(self, shape: DraftShape) -> None:  # noqa: B027 - graphs may hold all that it launches
        """Called after `allocate`, for each shape that `draft` may get, where kernels are compiled ahead:
        launch once whatever `extend` and `draft` launch outside of CUDA graphs. No request's state changes;
        results mean nothing."""

    def state_of(self, req: Req) -> bytes:
        """What is kept of a request beside its KV, after the `extend` of its prompt: for the same drafter of
        another engine. The request has not left."""
        return b""

    def restore(self, req: Req, state: bytes) -> None:  # noqa: B027 - there may be no state
        """The prompt's KV has come from another engine, the drafter's too, and so has its `state_of` the
        request. Afterwards the request is as if `extend` had been called for the prompt here."""

    def forget(self, req: Req) -> None:  # noqa: B027 - there may be nothing to forget
        """The request has ended or was retracted: drop what is kept under its rid. May be called for a
        request that was never extended."""
