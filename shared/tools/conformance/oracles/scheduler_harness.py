"""Runs a scheduler on the ledger model and checks every invariant after every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config import EngineConfig, ModelConfig, RopeConfig
from diptych.shared.interfaces import Grammar, SchedulerParts
from diptych.shared.loading.kv_sizing import num_rows, num_speculative_slots
from diptych.shared.sampling.processors import LogitProcessor
from diptych.shared.scheduling.invariants import check_idle, check_invariants
from diptych.shared.tools.conformance.clauses.compare import Mismatch, expect_equal, expect_true
from diptych.shared.tools.conformance.oracles.ahead_drafter import AheadDrafter
from diptych.shared.tools.conformance.oracles.answer_alone import answer_alone
from diptych.shared.tools.conformance.oracles.ledger import LedgerKVPool, LedgerModelRunner, expected_tokens
from diptych.shared.tools.conformance.oracles.ledger_drafter import Guess, LedgerDrafter
from diptych.shared.types import (
    DraftShape,
    FinishAbort,
    FinishError,
    FinishReason,
    Req,
    SamplingParams,
    StepOutput,
    TokenLogprob,
)

VOCAB_SIZE = 61


def decode_text(token_ids: Sequence[int]) -> str:
    return "".join(f"<{i}>" for i in token_ids)


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def model_config(context_len: int) -> ModelConfig:
    """A config with arbitrary shapes: the ledger model has no weights."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        context_len=context_len,
        rope=RopeConfig("default", 10000.0, 8),
        dtype=torch.float32,
    )


def shape_flags(shape: DraftShape) -> dict[str, Any]:
    """The flags of the engine for a draft shape. (The ledger drafter stands for every algorithm.)"""
    return {
        "speculative": "ngram",
        "speculative_num_steps": shape.num_steps,
        "speculative_topk": shape.top_k,
        "speculative_num_draft_tokens": shape.num_draft_tokens,
    }


class SchedulerHarness:
    """Drives one scheduler and collects its outputs. `replace`: component -> class (memory_pool: module) to
    use in place of the reference's. `guess`: speculate with the drafts that it returns. `runs_ahead`: draft
    before the CPU has the tokens."""

    def __init__(
        self,
        *,
        pool_tokens: int = 256,
        context_len: int = 128,
        replace: Mapping[str, Any] | None = None,
        nan_token: int | None = None,
        fail_token: int | None = None,
        guess: Guess | None = None,
        runs_ahead: bool = False,
        is_spread: bool = False,
        decode_text: Callable[[list[int]], str] = decode_text,
        **flags: Any,
    ) -> None:
        def component(name: str) -> Any:
            return (replace or {}).get(name) or registry.load(name, "reference")

        flags.setdefault("max_running_requests", 16)
        self.config = EngineConfig(context_len=context_len, max_total_tokens=pool_tokens, **flags)
        pools, page_size = component("memory_pool"), self.config.page_size
        drafter = AheadDrafter if runs_ahead else LedgerDrafter
        self.drafter = drafter(self.config, guess, VOCAB_SIZE) if guess is not None else None
        num_extra = num_speculative_slots(self.config, self.drafter)
        self.req_to_token_pool = pools.ReqToTokenPool(num_rows(self.config), context_len + num_extra, "cpu")
        self.allocator = pools.TokenToKVPoolAllocator(pool_tokens, page_size, "cpu")
        tree_cache = component("chunk_cache" if self.config.disable_radix_cache else "radix_cache")
        self.tree_cache = tree_cache(
            page_size,
            self.allocator,
            self.req_to_token_pool,
            self.config.eviction_policy,
            is_bigram=self.drafter is not None and self.drafter.is_bigram,
        )
        self.clock = FakeClock()
        self.decode_text = decode_text
        self.model_runner = LedgerModelRunner(
            self.req_to_token_pool,
            pool_tokens + page_size,
            VOCAB_SIZE,
            nan_token,
            fail_token,
            context_len,
            is_spread,
        )
        self.kv_pool = LedgerKVPool(self.model_runner)
        if self.drafter is not None:
            self.drafter.allocate(self.req_to_token_pool, pool_tokens + page_size)
        self.sampler = component("sampler")()
        self.scheduler = component("scheduler")(
            self.config, model_config(context_len), self._parts(component)
        )
        self.reqs: dict[str, Req] = {}
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.log: list[StepOutput] = []

    def _parts(self, component: Callable[[str], Any]) -> SchedulerParts:
        return SchedulerParts(
            model_runner=self.model_runner,
            sampler=self.sampler,
            req_to_token_pool=self.req_to_token_pool,
            allocator=self.allocator,
            tree_cache=self.tree_cache,
            policy=component("schedule_policy")(self.config, self.tree_cache),
            prefill_adder=component("prefill_adder"),
            num_token_ids=VOCAB_SIZE,
            decode_text=lambda ids: self.decode_text(ids),
            clock=self.clock,
            drafter=self.drafter,
            draft_tree=component("draft_tree")() if self.drafter is not None else None,
            kv_pool=self.kv_pool,  # type: ignore[arg-type]
        )

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 8,
        *,
        rid: str | None = None,
        priority: int = 0,
        extra_key: str | None = None,
        routing_key: str | None = None,
        eos: frozenset[int] = frozenset(),
        grammar: Grammar | None = None,
        logit_processor: LogitProcessor | None = None,
        **params: Any,
    ) -> str:
        rid = rid or f"r{len(self.reqs)}"
        req = Req(
            rid=rid,
            origin_input_ids=list(prompt),
            sampling_params=SamplingParams(max_new_tokens=max_new_tokens, **{"temperature": 0.0, **params}),
            seed=params.get("seed") or 0,
            eos_token_ids=eos,
            grammar=grammar,
            logit_processor=logit_processor,
            priority=priority,
            extra_key=extra_key,
            routing_key=routing_key,
        )
        self.scheduler.add_request(req)
        self.reqs[rid] = req
        self.tokens[rid] = []
        self.logprobs[rid] = []
        return rid

    def step(self) -> list[StepOutput]:
        outputs: list[StepOutput] = self.scheduler.step()
        check_invariants(self.scheduler.state(), self.allocator, self.req_to_token_pool, self.tree_cache)
        self.log += outputs
        for output in outputs:
            expect_true(f"{output.rid} is silent after its end", output.rid not in self.ended)
            self.tokens[output.rid] += output.new_token_ids
            self.logprobs[output.rid] += output.output_logprobs
            expect_equal(
                f"{output.rid}'s num_output_tokens", output.num_output_tokens, len(self.tokens[output.rid])
            )
            if output.finished_reason is not None:
                self.ended[output.rid] = output.finished_reason
        return outputs

    def run(self, max_steps: int = 2000) -> None:
        """Until all requests are done. More than `max_steps` steps mean that a request starves."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            self.step()
        raise Mismatch(f"all work ends within {max_steps} steps", "an end", self.scheduler.state())

    def expect(self, rid: str, num_tokens: int) -> None:
        """Check that the request produced exactly the tokens that its prompt implies."""
        prompt, reason = self.reqs[rid].origin_input_ids, self.ended.get(rid)
        what = f"{rid}'s tokens" + (f", until {reason.message}" if isinstance(reason, FinishError) else "")
        expect_equal(what, self.tokens[rid], expected_tokens(prompt, num_tokens, VOCAB_SIZE))

    def expect_what_it_gets_alone(self, rid: str, may_be_aborted: bool = False) -> None:
        """Check that the request has the tokens, log-probabilities and finish reason that it gets alone; if
        it was aborted, the first of them."""
        req, reason = self.reqs[rid], self.ended.get(rid)
        sampler = registry.load("sampler", "reference")()
        alone = answer_alone(req, self.model_runner.logits_after, sampler, decode_text, VOCAB_SIZE)
        num_tokens, num_input = len(alone.output_ids), len(alone.input_logprobs)
        if may_be_aborted and isinstance(reason, FinishAbort):
            num_tokens, num_input = len(self.tokens[rid]), len(req.input_logprobs)
        else:
            expect_equal(f"how {rid} ends", reason, alone.finished_reason)
        expect_equal(f"{rid}'s tokens", self.tokens[rid], alone.output_ids[:num_tokens])
        expect_equal(f"{rid}'s logprobs", self.logprobs[rid], alone.output_logprobs[:num_tokens])
        wanted = alone.input_logprobs[:num_input]
        expect_equal(f"logprobs of {rid}'s prompt", req.input_logprobs, wanted)

    def expect_idle(self) -> None:
        """Check that no slot is lost: a slot that is not free is in the tree and evictable."""
        expect_true("no work is left", not self.scheduler.has_work())
        check_idle(self.allocator, self.req_to_token_pool, self.tree_cache)
        expect_true("the cache can be flushed when idle", self.scheduler.flush_cache())
        expect_equal("free slots after a flush", self.allocator.available_size(), self.allocator.size)
