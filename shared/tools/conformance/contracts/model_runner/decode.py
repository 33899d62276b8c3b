"""Clauses of a prepared model runner: successive decode steps of every batch size, and sampling."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import CausalLM, ModelRunner
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import (
    expect_close,
    expect_equal,
    expect_form,
    expect_true,
)
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.poison import poison_, run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.contracts.model_runner.forward import CONFIG, model_for
from diptych.shared.tools.conformance.oracles.model_session import ModelSession
from diptych.shared.tools.conformance.oracles.replanned_attention import attention_for_graphs
from diptych.shared.types import ForwardBatch, ForwardMode, LogitsOutput, Req, SampleOutput, SamplingParams

MAX_LEN = 256
NUM_TOKEN_IDS = 300  # of a head of 331 rows


class Decoding(Case):
    """A prefill of all requests, then steps that each decode another subset of them. `sizes`: the captured
    batch sizes, if graphs are used; `max_tokens`: of a captured prefill step."""

    sizes: tuple[int, ...] = (1, 2, 4, 8)
    page_size: int = 1
    max_tokens: int = 64
    config: str = CONFIG
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def check(self) -> None:
        if not self.batch_sizes or not self.sizes or min(self.batch_sizes + self.sizes) < 1:
            raise ValueError("a step has a request, a graph a size")
        if self.page_size < 1 or len(self.batch_sizes) > MAX_LEN // 4:
            raise ValueError("pages hold a token, requests not so many")

    @property
    def num_reqs(self) -> int:
        return max(self.batch_sizes)

    def flags(self) -> dict[str, Any]:
        """The engine flags, in addition to those that follow from the fields."""
        return {}

    def prompts(self) -> dict[int, list[int]]:
        """Prompts from one token to a long one."""
        dice = random.Random(self.seed)
        lens = [150, 1, *(dice.randint(1, 70) for _ in range(self.num_reqs))][: self.num_reqs]
        return {i: [dice.randrange(331) for _ in range(n)] for i, n in enumerate(lens)}

    def steps(self) -> Iterator[dict[int, list[int]]]:
        """The new token of each participating request; order and rows differ in every step."""
        dice = random.Random(self.seed + 1)
        for bs in self.batch_sizes:
            yield {i: [dice.randrange(331)] for i in dice.sample(range(self.num_reqs), bs)}


EVERY_SIZE = (9, 1, 8, 2, 9, 7, 3, 6, 4, 5, 1, 8, 9)
CASES = (
    Decoding("one request", batch_sizes=(1, 1)),
    Decoding("every size, up and down", batch_sizes=EVERY_SIZE),
    Decoding("every size, pages of 16", batch_sizes=EVERY_SIZE, page_size=16),
    Decoding("sizes far apart", batch_sizes=(6, 2, 5, 1, 7), sizes=(3, 6)),
    Decoding("windows", batch_sizes=(5, 2, 3), config="qwen3-layer-types"),
    Decoding("bfloat16", batch_sizes=EVERY_SIZE, dtype=torch.bfloat16),
)


class PreparedSession(ModelSession):
    """A runner prepared as in an engine. `graphs`: with CUDA graphs, if it supports them."""

    def __init__(
        self,
        impl: type[ModelRunner],
        model: CausalLM,
        case: Decoding,
        graphs: bool = True,
        capture_hidden: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(model, case.num_reqs, MAX_LEN, case.page_size)
        self.attention = attention_for_graphs(self.kv_pool.dtype)(self.req_to_token_pool, self.kv_pool)
        is_fast = self.device.type == "cuda" and "optimized" in registry.choices("sampler")
        self.sampler = registry.load("sampler", "optimized" if is_fast else "reference")()
        self.config = EngineConfig(
            context_len=MAX_LEN,
            max_running_requests=case.num_reqs,
            page_size=case.page_size,
            cuda_graph_bs=case.sizes,
            cuda_graph_max_tokens=case.max_tokens,
            disable_cuda_graph=not graphs,
            **case.flags(),
        )
        self.runner = impl(model, self.attention, self.kv_pool)
        if capture_hidden is not None:
            self.runner.capture_hidden = capture_hidden
        self.runner.prepare(self.config, self.sampler, NUM_TOKEN_IDS)

    def prefill(self, case: Decoding) -> torch.Tensor:
        return self.run(self.forward_batch(case.prompts(), forward_mode=ForwardMode.EXTEND)).next_token_logits

    def run(self, batch: ForwardBatch) -> LogitsOutput:
        """Run a step whose dummy page has meaningless values."""
        for buffer in self.kv_buffers():
            poison_(buffer[: self.kv_pool.page_size])
        return run_poisoned(self.runner.forward, batch)

    def run_and_sample(self, batch: ForwardBatch, info: Any) -> tuple[LogitsOutput, SampleOutput]:
        for buffer in self.kv_buffers():
            poison_(buffer[: self.kv_pool.page_size])
        return run_poisoned(self.runner.forward_and_sample, batch, self.sampler, info, NUM_TOKEN_IDS)


@contract(
    "Whether decode steps are replayed changes no bit of their logits: at every batch size, after a smaller "
    "or larger batch, beyond the largest size, whatever the dummy page holds.",
    CASES,
)
def graphs_change_nothing(impl: type[ModelRunner], case: Decoding) -> None:
    model = model_for(case.config, case.dtype)
    replayed, launched = (PreparedSession(impl, model, case, graphs) for graphs in (True, False))
    expect_equal("logits of the prompts", replayed.prefill(case), launched.prefill(case))
    for number, new_ids in enumerate(case.steps()):
        found, expected = (s.run(s.forward_batch(new_ids)).next_token_logits for s in (replayed, launched))
        expect_equal(f"logits of step {number}, {len(new_ids)} requests", found, expected)


@agreement("Decode steps of every batch size give each request its own logits.", CASES)
def decode_logits(impl: type[ModelRunner], case: Decoding, reference: type[ModelRunner]) -> None:
    ours = PreparedSession(impl, model_for(case.config, case.dtype), case)
    exact = PreparedSession(reference, model_for(case.config, case.dtype).double(), case)
    expect_close("prompts", ours.prefill(case), exact.prefill(case), tolerance("logits", case.dtype))
    for number, new_ids in enumerate(case.steps()):
        found, expected = (s.run(s.forward_batch(new_ids)).next_token_logits for s in (ours, exact))
        what = f"step {number}, {len(new_ids)} requests"
        expect_close(what, found, expected, tolerance("logits", case.dtype))


KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "greedy": ({"temperature": 0.0},),
    "temperature": ({"temperature": 0.6}, {"temperature": 1.7}, {"temperature": 1.0}),
    "filters": (
        {"temperature": 1.3, "top_k": 12}, {"temperature": 0.9, "top_p": 0.6}, {"min_p": 0.2, "top_p": 0.97},
    ),
    "mixed": ({"temperature": 0.0}, {"temperature": 2.0}, {"temperature": 1.5, "top_k": 3}),
    "penalties": ({"frequency_penalty": 2.0, "temperature": 0.3}, {"temperature": 0.0}),
    "bans": ({"logit_bias": {7: 5.0, 9: -100.0}, "temperature": 0.0}, {"temperature": 1.2}),
    "logprobs": ({"return_logprob": True, "top_logprobs_num": 2}, {"temperature": 0.0}),
}  # fmt: skip


def requests(kind: str, bs: int, dice: random.Random) -> list[Req]:
    """Requests with different parameters, rotated in each step, and with distinct seeds."""
    start = dice.randrange(6)
    params = [SamplingParams(**KINDS[kind][(start + i) % len(KINDS[kind])]) for i in range(bs)]
    return [
        Req(f"r{i}", [1, 2, 3], p, dice.getrandbits(63) - 2**62, output_ids=dice.sample(range(300), 150))
        for i, p in enumerate(params)
    ]


class Sampling(Decoding):
    """Steps that sample in each of these ways, in turn."""

    kinds: tuple[str, ...] = tuple(KINDS)

    def check(self) -> None:
        super().check()
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"kinds are {', '.join(KINDS)}")


@contract(
    "forward_and_sample gives the tokens that the sampler gives for its logits, cut to the ids that have a "
    "token; with the requests' parameters of this step. What it gave is not touched by later steps.",
    (
        Sampling("greedy", batch_sizes=(3, 8, 1, 9, 2), kinds=("greedy",)),
        Sampling("temperatures that change", batch_sizes=(4, 4, 2, 3, 9, 1), kinds=("temperature",)),
        Sampling("filters that change", batch_sizes=(4, 4, 2, 3, 9, 1), kinds=("filters",)),
        Sampling("all ways in turn", batch_sizes=(5, 3, 8, 9, 1, 6, 2, 4) * 2),
        Sampling(
            "from large to small",
            batch_sizes=(9, 8, 7, 6, 5, 4, 3, 2, 1),
            kinds=("mixed", "greedy", "filters"),
        ),
    ),
)
def sampled_tokens(impl: type[ModelRunner], case: Sampling) -> None:
    dice = random.Random(case.seed)
    model = model_for(case.config, case.dtype)
    session, plain = (PreparedSession(impl, model, case, graphs) for graphs in (True, False))
    session.prefill(case)
    plain.prefill(case)
    given: list[tuple[torch.Tensor, list[int]]] = []
    for number, new_ids in enumerate(case.steps()):
        kind = case.kinds[number % len(case.kinds)]
        what = f"step {number} ({kind}, {len(new_ids)} requests)"
        info = make_sampling_batch_info(requests(kind, len(new_ids), dice), NUM_TOKEN_IDS, check_device())
        batch = session.forward_batch(new_ids)
        output, sampled = session.run_and_sample(batch, info)
        logits = output.next_token_logits.clone()
        expect_equal(f"{what}: logits", logits, plain.run(plain.forward_batch(new_ids)).next_token_logits)
        expected = session.sampler.sample(logits[:, :NUM_TOKEN_IDS], info, batch.seq_lens - 1)
        expect_equal(f"{what}: ids", sampled.next_token_ids, expected.next_token_ids)
        expect_equal(f"{what}: has logprobs", sampled.logprobs is None, expected.logprobs is None)
        for found, wanted in zip(sampled.logprobs or (), expected.logprobs or ()):
            expect_equal(f"{what}: logprobs", found, wanted)
        given.append((sampled.next_token_ids, sampled.next_token_ids.tolist()))
    for number, (tensor, ids) in enumerate(given):
        expect_equal(f"ids of step {number} at the end", tensor.tolist(), ids)


@contract(
    "decode_steps gives the tokens of as many calls of forward_and_sample, each with the tokens of the call "
    "before it, and leaves their KV.",
    (
        Sampling("several steps, greedy", batch_sizes=(3, 9, 1), kinds=("greedy",)),
        Sampling(
            "several steps, pages of 16", batch_sizes=(1, 4, 2), page_size=16, kinds=("filters", "mixed")
        ),
    ),
)
def several_steps(impl: type[ModelRunner], case: Sampling) -> None:
    dice, model = random.Random(case.seed), model_for(case.config, case.dtype)
    session, plain = PreparedSession(impl, model, case), PreparedSession(impl, model, case)
    session.prefill(case)
    plain.prefill(case)
    for number, new_ids in enumerate(case.steps()):
        what, num_steps = f"launch {number}, {len(new_ids)} requests", 2 + number
        kind = case.kinds[number % len(case.kinds)]
        info = make_sampling_batch_info(requests(kind, len(new_ids), dice), NUM_TOKEN_IDS, check_device())
        batch = session.forward_batch(new_ids)
        more = [session.forward_batch(new_ids).out_cache_loc for _ in range(num_steps - 1)]
        slots = torch.stack([batch.out_cache_loc, *more])
        found = session.runner.decode_steps(batch, slots, session.sampler, info, NUM_TOKEN_IDS)
        expected = []
        for _ in range(num_steps):
            _, sampled = plain.run_and_sample(plain.forward_batch(new_ids), info)
            expected.append(sampled.next_token_ids.tolist())
            new_ids = {i: [token_id] for i, token_id in zip(new_ids, expected[-1])}
        expect_form(f"{what}: ids", found, like=slots, dtype=torch.int64)
        expect_equal(f"{what}: ids", found.tolist(), expected)
        logits, wanted = (s.run(s.forward_batch(new_ids)).next_token_logits for s in (session, plain))
        expect_equal(f"{what}: logits of the next step", logits, wanted)


@contract(
    "While capture_hidden is set, every step gives the hidden states of its tokens: for (), those that "
    "logits are computed from; of layers, the streams into them, side by side in the order asked for. Logits "
    "stay as they are, and so they do when it is None again.",
    (CASES[1], CASES[4], CASES[5]),
)
def captured_hidden_states(impl: type[ModelRunner], case: Decoding) -> None:
    model = model_for(case.config, case.dtype)
    session, plain = PreparedSession(impl, model, case), PreparedSession(impl, model, case, graphs=False)
    num_layers = model.config.num_hidden_layers
    wanted: tuple[tuple[int, ...] | None, ...] = ((), None, (1,), (num_layers, 0, 2))
    steps = [case.prompts(), *case.steps()]
    for number, new_ids in enumerate(steps):
        layers = wanted[number % len(wanted)]
        what = f"step {number}, {len(new_ids)} requests, capture_hidden {layers}"
        batch, plain_batch = session.forward_batch(new_ids), plain.forward_batch(new_ids)
        session.runner.capture_hidden = layers
        found = session.run(batch)
        captured = dict.fromkeys(layers or (), torch.empty(0))
        hidden_states = plain.hidden_states(plain_batch, captured)
        if layers is None:
            expect_equal(f"{what}: hidden states", found.hidden_states, None)
        else:
            parts = [captured[layer_id] for layer_id in layers] or [hidden_states]
            expected = torch.cat(parts, dim=-1)
            expect_form(f"{what}: hidden states", found.hidden_states, like=expected, dtype=case.dtype)
            expect_close(
                f"{what}: hidden states", found.hidden_states, expected, tolerance("logits", case.dtype)
            )
        logits = plain.run(plain_batch).next_token_logits
        expect_close(f"{what}: logits", found.next_token_logits, logits, tolerance("logits", case.dtype))


@contract(
    "A decode step writes its tokens' slots, the dummy page and nothing else, also after requests have left.",
    (
        Decoding("fewer and fewer requests", batch_sizes=(7, 5, 3, 1), sizes=(4, 8)),
        Decoding("fewer requests, pages of 16", batch_sizes=(5, 2), sizes=(8,), page_size=16),
    ),
)
def decode_writes_its_slots(impl: type[ModelRunner], case: Decoding) -> None:
    session = PreparedSession(impl, model_for(case.config, case.dtype), case)
    session.prefill(case)
    is_free = torch.ones(len(session.kv_buffers()[0]), dtype=torch.bool, device=session.device)
    for number, bs in enumerate(case.batch_sizes):
        batch = session.forward_batch({i: [7 * i + number] for i in range(bs)})
        rows = session.req_to_token_pool.req_to_token[session.req_pool_indices[:bs]]
        is_free[:] = True
        for row, seq_len in zip(rows, batch.seq_lens_cpu):
            is_free[row[:seq_len].long()] = False
        for buffer in session.kv_buffers():
            buffer[is_free] = torch.nan
        session.run(batch)
        is_free[: case.page_size] = False
        for buffer in session.kv_buffers():
            expect_true(f"step {number} leaves free slots alone", bool(buffer[is_free].isnan().all()))


@contract("prepare writes the dummy page and nothing else.", CASES[1:3])
def prepare_writes_nothing(impl: type[ModelRunner], case: Decoding) -> None:
    session = PreparedSession(impl, model_for(case.config, case.dtype), case)
    expect_true("req_to_token is as it was", not bool(session.req_to_token_pool.req_to_token.any()))
    for buffer in session.kv_buffers():
        expect_true("slots are as they were", bool(buffer[case.page_size :].isnan().all()))


@contract("While is_watched, every step calls the model and `forward`, with the same results.", CASES[1:2])
def watched_steps(impl: type[ModelRunner], case: Decoding) -> None:
    model = model_for(case.config, case.dtype)
    session, plain = PreparedSession(impl, model, case), PreparedSession(impl, model, case)
    session.prefill(case)
    plain.prefill(case)
    calls: list[str] = []
    hidden = session.runner.forward
    session.runner.forward = lambda batch: calls.append("forward") or hidden(batch)  # type: ignore
    session.runner.is_watched = True
    for number, new_ids in enumerate(case.steps()):
        batch = session.forward_batch(new_ids)
        info = make_sampling_batch_info(
            requests("mixed", len(new_ids), random.Random(number)), NUM_TOKEN_IDS, check_device()
        )
        calls.clear()
        handle = model.register_forward_pre_hook(lambda *_: calls.append("model"))
        output, sampled = session.run_and_sample(batch, info)
        handle.remove()
        expect_equal(f"calls of step {number}", calls, ["forward", "model"])
        expected = plain.run_and_sample(plain.forward_batch(new_ids), info)
        expect_equal(f"step {number}", output.next_token_logits, expected[0].next_token_logits)
        expect_equal(f"ids of step {number}", sampled.next_token_ids, expected[1].next_token_ids)
