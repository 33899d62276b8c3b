"""Clauses of the model runner: the rows of logits that it returns, and the KV that it writes."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config import parse_config
from diptych.shared.interfaces import CausalLM, ModelRunner
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, table
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import (
    expect_close,
    expect_equal,
    expect_form,
    expect_true,
)
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import HALF_TYPES, Inputs, type_name
from diptych.shared.tools.conformance.clauses.poison import run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.contracts.models.logits import make_model
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.tools.conformance.oracles.model_session import ModelSession
from diptych.shared.types import ForwardBatch, ForwardMode, InputLogprobs, LogitsOutput

CONFIG = "llama-llama3"
LOGITS = tolerance("logits", torch.float32)
MODES = {"extend": ForwardMode.EXTEND, "decode": ForwardMode.DECODE, "mixed": ForwardMode.MIXED}


def model_for(config: str = CONFIG, dtype: torch.dtype = torch.float32) -> CausalLM:
    """The reference's model, because the runner is under check."""
    return make_model(registry.load("models", "reference"), parse_config(CONFIGS[config]), dtype)


class RunnerSession(ModelSession):
    def __init__(
        self, impl: type[ModelRunner], model: CausalLM, num_reqs: int = 1, page_size: int = 1
    ) -> None:
        super().__init__(model, num_reqs, page_size=page_size)
        self.runner = impl(model, self.attention, self.kv_pool)

    def run(self, batch: ForwardBatch) -> LogitsOutput:
        return run_poisoned(self.runner.forward, batch)


class Steps(Case):
    """Steps: the mode of each, and its number of new tokens for each request (0: not in the step)."""

    config: str = CONFIG
    page_size: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def check(self) -> None:
        if self.page_size < 1 or not self.steps or any(len(step) != 2 for step in self.steps):
            raise ValueError("a step is a mode and numbers of tokens")
        for mode, lens in self.steps:
            if len(lens) != self.num_reqs or not any(lens):
                raise ValueError("every step has a token, and says something about every request")
            if mode == "decode" and max(lens) > 1:
                raise ValueError("a decode step computes one token of a request")

    @property
    def num_reqs(self) -> int:
        return len(self.steps[0][1])

    def draw(self) -> list[tuple[ForwardMode, dict[int, list[int]]]]:
        """The mode and the new ids of every step."""
        inputs = Inputs(self.seed)
        return [
            (MODES[mode], {i: inputs.integers(331, n).tolist() for i, n in enumerate(lens) if n})
            for mode, lens in self.steps
        ]


SCHEDULE = (
    ("extend", (5, 40, 1)),
    ("mixed", (63, 1, 9)),
    ("decode", (1, 1, 1)),
    ("decode", (1, 1, 0)),
    ("mixed", (33, 0, 1)),
    ("decode", (1, 1, 1)),
)
STEPS = (
    Steps("one token", steps=(("extend", (1,)),)),
    Steps("one prompt", steps=(("extend", (100,)),)),
    Steps("a schedule", steps=SCHEDULE),
    Steps("a schedule, pages of 16", steps=SCHEDULE, page_size=16),
    Steps("a schedule, windows", steps=SCHEDULE, config="qwen3-layer-types"),
    Steps("a schedule, experts", steps=SCHEDULE, config="mixtral"),
    *(Steps(f"a schedule, {type_name(t)}", steps=SCHEDULE, dtype=t) for t in HALF_TYPES),
)


@agreement(
    "Logits are those of each request's last token, float32, through extension, decode and both mixed.", STEPS
)
def last_token_logits(impl: type[ModelRunner], case: Steps, reference: type[ModelRunner]) -> None:
    ours = RunnerSession(impl, model_for(case.config, case.dtype), case.num_reqs, case.page_size)
    exact = RunnerSession(
        reference, model_for(case.config, case.dtype).double(), case.num_reqs, case.page_size
    )
    for number, (mode, new_ids) in enumerate(case.draw()):
        found, expected = (
            session.run(session.forward_batch(new_ids, forward_mode=mode)) for session in (ours, exact)
        )
        what = f"step {number}"
        logits = found.next_token_logits
        expect_form(what, logits, like=expected.next_token_logits, dtype=torch.float32)
        expect_close(what, logits, expected.next_token_logits, tolerance("logits", case.dtype))
        expect_equal(f"{what}, input_logprobs", found.input_logprobs, None)


@contract("Row i is the last token of request i: what that request's tokens give alone.", STEPS[2:6])
def rows_belong_to_requests(impl: type[ModelRunner], case: Steps) -> None:
    model = model_for(case.config)
    session = RunnerSession(impl, model, case.num_reqs, case.page_size)
    alone = [ModelSession(model) for _ in range(case.num_reqs)]
    for number, (mode, new_ids) in enumerate(case.draw()):
        logits = session.run(session.forward_batch(new_ids, forward_mode=mode)).next_token_logits
        expected = torch.stack([alone[i].step({0: ids})[0][-1] for i, ids in new_ids.items()])
        expect_close(f"step {number}", logits, expected, LOGITS)


class PromptLogprobs(Case):
    """Prompts of these lengths, with log-probabilities of their tokens from `start` on. The head has 331
    rows; the first `num_token_ids` have a token."""

    seed: int = 0
    num_token_ids: int = 331

    def check(self) -> None:
        if not self.lens or 0 in self.lens or not any(n > self.start + 1 for n in self.lens):
            raise ValueError("there is nothing to compute")


@contract(
    "Prompt log-probabilities are log softmax of the raw logits of the ids that have a token: row r says how "
    "likely its id was to follow row r's token. The best come first, as many as asked for; then the named.",
    table(
        "lens start num_top num_token_ids",
        ("one prompt", (40,), 0, 3),
        ("no alternatives", (40, 9), 0, 0),
        ("a head with padding rows", (40, 9), 0, 3, 100),
        ("some rows of some requests", (30, 2, 50, 1), 7, 1),
        ("more rows than a large vocabulary would allow at once", (250, 3, 250, 129, 80), 0, 5),
        of=PromptLogprobs,
    ),
)
def input_logprobs(impl: type[ModelRunner], case: PromptLogprobs) -> None:
    found, asked, logprobs = prompt_logprobs(impl, case)
    token_logprobs, columns = found.token_logprobs, (found.top_logprobs, found.top_ids)
    expect_close("token_logprobs", token_logprobs, logprobs.gather(1, asked[:, 1:])[:, 0], LOGITS)
    (top_logprobs, asked_logprobs), (top_ids, asked_ids) = (
        [x[:, : case.num_top], x[:, case.num_top :]] for x in columns
    )
    expect_equal("named tokens", asked_ids.cpu(), asked)
    expect_close("log-probability of named tokens", asked_logprobs, logprobs.gather(1, asked), LOGITS)
    best = logprobs.sort(dim=-1, descending=True).values[:, : case.num_top]
    expect_form("top_logprobs", top_logprobs, like=best.to(top_logprobs))
    expect_close("top_logprobs", top_logprobs, best, LOGITS)
    # Sorted by value, as rounding decides the order of two nearly equal ones.
    expect_equal("type of top_ids", top_ids.dtype, torch.int64)
    expect_close("log-probability of top_ids", logprobs.gather(1, top_ids.cpu()), best, LOGITS)
    num_distinct = [len(set(row)) for row in top_ids.tolist()]
    expect_equal("distinct top_ids", num_distinct, [case.num_top] * len(asked))


@contract(
    "The rank of a prompt token is its place, from 1, among the ids that have a token, the likeliest first.",
    (PromptLogprobs("a head with padding rows", lens=(40, 9), start=0, num_top=3, num_token_ids=100),),
)
def input_ranks(impl: type[ModelRunner], case: PromptLogprobs) -> None:
    found, asked, logprobs = prompt_logprobs(impl, case)
    in_order = logprobs.sort(dim=-1, descending=True).values
    of_places = in_order.gather(1, found.token_ranks.cpu()[:, None] - 1)
    expect_close("log-probability in that place", of_places, logprobs.gather(1, asked[:, 1:]), LOGITS)


def prompt_logprobs(
    impl: type[ModelRunner], case: PromptLogprobs
) -> tuple[InputLogprobs, torch.Tensor, torch.Tensor]:
    """What the runner found; the named ids [n, 2] of each row, the prompt's own last; float64 log softmax
    [n, num_token_ids]."""
    inputs = Inputs(case.seed)
    new_ids = {i: inputs.integers(case.num_token_ids, n).tolist() for i, n in enumerate(case.lens)}
    rows, ids, start = list[int](), list[int](), 0
    for i, n in enumerate(case.lens):
        rows += range(start + case.start, start + n - 1)
        ids += new_ids[i][case.start + 1 :]
        start += n
    model = model_for()
    session = RunnerSession(impl, model, len(case.lens))
    asked = torch.stack((torch.arange(len(rows)) % case.num_token_ids, torch.tensor(ids)), dim=1)
    batch = session.forward_batch(
        new_ids,
        input_asked_ids=asked,
        input_logprob_rows=torch.tensor(rows),
        input_logprob_ids=torch.tensor(ids),
        num_top_input_logprobs=case.num_top,
        num_token_ids=case.num_token_ids,
    )
    found = session.run(batch)
    exact = ModelSession(model.double(), len(case.lens))
    logits = torch.cat(exact.step(new_ids)).double().cpu()
    last = torch.tensor(case.lens).cumsum(0) - 1
    expect_close("next_token_logits", found.next_token_logits, logits[last], LOGITS)

    logprobs = logits[rows, : case.num_token_ids].log_softmax(dim=-1)
    assert found.input_logprobs is not None
    return found.input_logprobs, asked, logprobs


class Trees(Case):
    """Requests: the length of the prefix, and each node's parent in the tree drafted after it (-1: the
    prefix)."""

    seed: int = 0

    def check(self) -> None:
        if not self.requests or any(len(request) != 2 for request in self.requests):
            raise ValueError("a request has a prefix and a tree")
        for prefix_len, parents in self.requests:
            if prefix_len < 1 or not parents or any(not -1 <= p < i for i, p in enumerate(parents)):
                raise ValueError(f"after {prefix_len} tokens, {parents} is not a tree")


def path_to(parents: tuple[int, ...], node: int) -> list[int]:
    """The path from the root to the node, both included."""
    return [*(path_to(parents, parents[node]) if parents[node] >= 0 else ()), node]


@contract(
    "TARGET_VERIFY: logits of every token, in order, each as if its own branch were the whole text.",
    (
        Trees("a chain", requests=((9, (-1, 0, 1, 2)),)),
        Trees("a tree", requests=((20, (-1, 0, 0, 1, 2, 2, 4)),)),
        Trees("two trees and a node", requests=((33, (-1, 0, 0, 1)), (5, (-1,)), (1, (-1, 0, 1, 1, 0)))),
        Trees("siblings at the root", requests=((12, (-1, -1, 1)), (7, (-1, -1, -1)))),
    ),
)
def verify_logits(impl: type[ModelRunner], case: Trees) -> None:
    inputs = Inputs(case.seed)
    model = model_for()
    session = RunnerSession(impl, model, len(case.requests))
    prefixes = {i: inputs.integers(331, n).tolist() for i, (n, _) in enumerate(case.requests)}
    drafts = {i: inputs.integers(331, len(parents)).tolist() for i, (_, parents) in enumerate(case.requests)}
    session.run(session.forward_batch(prefixes))

    positions, masks, expected = [], [], []
    for i, (prefix_len, parents) in enumerate(case.requests):
        mask = torch.zeros(len(parents), prefix_len + len(parents), dtype=torch.bool)
        mask[:, :prefix_len] = True
        for node in range(len(parents)):
            path = path_to(parents, node)
            mask[node, [prefix_len + ancestor for ancestor in path]] = True
            positions.append(prefix_len + len(path) - 1)
            branch = [*prefixes[i], *(drafts[i][ancestor] for ancestor in path)]
            expected.append(ModelSession(model).step({0: branch})[0][-1])
        masks.append(mask.flatten())
    batch = session.forward_batch(
        drafts,
        forward_mode=ForwardMode.TARGET_VERIFY,
        positions=torch.tensor(positions),
        custom_mask=torch.cat(masks),
    )
    expect_close("logits", session.run(batch).next_token_logits, torch.stack(expected), LOGITS)


@contract(
    "An IDLE batch gives zero rows of float32 logits on the model's device, and writes nothing.", EXAMPLE
)
def idle(impl: type[ModelRunner], case: Case) -> None:
    session = RunnerSession(impl, model_for(dtype=torch.bfloat16))
    hidden_size = session.model.config.hidden_size
    nothing = torch.empty(0, dtype=torch.int64, device=check_device())
    per_token: Any = dict.fromkeys(("input_ids", "positions", "out_cache_loc"), nothing)
    per_req: Any = dict.fromkeys(
        ("req_pool_indices", "seq_lens", "extend_seq_lens", "extend_start_loc"), nothing
    )
    batch = ForwardBatch(
        forward_mode=ForwardMode.IDLE, **per_token, **per_req, seq_lens_cpu=(), extend_seq_lens_cpu=()
    )
    output = session.run(batch)
    expect_form("logits", output.next_token_logits, like=torch.empty(0, 331, device=check_device()))
    expect_equal("hidden states", output.hidden_states, None)
    for layers, width in (((), hidden_size), ((0, 1), 2 * hidden_size)):
        session.runner.capture_hidden = layers
        like = torch.empty(0, width, dtype=torch.bfloat16, device=check_device())
        expect_form("hidden states", session.run(batch).hidden_states, like=like)
    expect_equal("input_logprobs", output.input_logprobs, None)
    expect_true("no KV is written", all(bool(buffer.isnan().all()) for buffer in session.kv_buffers()))


@contract(
    "A step writes its tokens' KV in every layer, and nothing else: no slot, row or tensor of the batch.",
    STEPS[2:6],
)
def writes_nothing_else(impl: type[ModelRunner], case: Steps) -> None:
    session = RunnerSession(impl, model_for(case.config), case.num_reqs, case.page_size)
    for number, (mode, new_ids) in enumerate(case.draw()):
        batch = session.forward_batch(new_ids, forward_mode=mode)
        tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        tensors |= {"req_to_token": session.req_to_token_pool.req_to_token}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        kv_before = [buffer.clone() for buffer in session.kv_buffers()]
        session.run(batch)
        for name, tensor in tensors.items():
            expect_equal(f"{name} after step {number}", tensor, before[name])
        for i, (buffer, old) in enumerate(zip(session.kv_buffers(), kv_before)):
            what = f"step {number}, buffer {i}"
            new = buffer[batch.out_cache_loc]
            expect_true(f"{what}: the step's slots are written", not bool(new.isnan().any()))
            old[batch.out_cache_loc] = new
            # Page 0 is the dummy page: padding may write there.
            same = (buffer == old) | (buffer.isnan() & old.isnan())
            expect_true(f"{what}: other slots are as before", bool(same[case.page_size :].all()))
