"""Clauses of the models: logits of every family, for any split of the tokens into steps."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config import ModelConfig, parse_config
from diptych.shared.interfaces import CausalLM
from diptych.shared.loading.weights import dummy_weights
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import (
    expect_close,
    expect_equal,
    expect_form,
    expect_true,
)
from diptych.shared.tools.conformance.clauses.device import building
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, HALF_TYPES, Inputs
from diptych.shared.tools.conformance.clauses.poison import run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import EXACT, tolerance
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.tools.conformance.oracles.model_session import ModelSession

Models = Any
"""A module (or namespace) with `model_class(architecture)`, and perhaps `LAYERS`, a choice of layers."""


class Text(Case):
    """A family's small model with random weights, and random tokens: a prompt in chunks of these lengths and
    the rest, then `num_decode` tokens one by one."""

    chunks: tuple[int, ...] = ()
    num_decode: int = 0
    page_size: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def check(self) -> None:
        if sum(self.chunks) >= self.num_prompt or 0 in self.chunks:
            raise ValueError(f"chunks {self.chunks} do not cut a prompt of {self.num_prompt} tokens")

    def model_config(self) -> ModelConfig:
        return parse_config(CONFIGS[self.config])

    def pieces(self) -> list[list[int]]:
        length = self.num_prompt + self.num_decode
        ids = Inputs(self.seed).integers(self.model_config().vocab_size, length).tolist()
        lens = [*self.chunks, self.num_prompt - sum(self.chunks), *[1] * self.num_decode]
        ends = [sum(lens[: i + 1]) for i in range(len(lens))]
        return [ids[end - size : end] for size, end in zip(lens, ends)]


def texts(num_prompt: int, chunks: tuple[int, ...] = (), num_decode: int = 0) -> tuple[Text, ...]:
    lens = {"num_prompt": num_prompt, "num_decode": num_decode}
    return grid("{config}", of=Text, config=list(CONFIGS), chunks=[chunks], **lens)


def make_model(
    impl: Models, config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0
) -> CausalLM:
    model = new_model(impl, config, dtype)
    model.load_weights(dummy_weights(config, seed))
    return model.eval()


def new_model(
    impl: Models, config: ModelConfig, dtype: torch.dtype = torch.float32, device: str | None = None
) -> CausalLM:
    """A model without weights, with the reference's experts, and the reference's layers unless the module
    names fused ones."""
    layers = registry.load("layers", getattr(impl, "LAYERS", "reference"))
    moe = registry.load("moe", "reference")
    with building(dtype, device):
        return impl.model_class(config.architecture)(config, layers, moe)


def logits_of(model: CausalLM, case: Text) -> torch.Tensor:
    """The logits of every token, in order."""
    session = ModelSession(model, max_len=case.num_prompt + case.num_decode, page_size=case.page_size)
    return torch.cat([run_poisoned(session.step, {0: piece})[0] for piece in case.pieces()])


def expect_same_logits(impl: Models, case: Text, reference: Models) -> None:
    """Compare with the reference, which has the same weights (rounded to the case's type) and computes in
    float64."""
    config = case.model_config()
    actual = logits_of(make_model(impl, config, case.dtype, case.seed), case)
    expected = logits_of(make_model(reference, config, case.dtype, case.seed).double(), case)
    expect_form("logits", actual, like=expected, dtype=torch.float32)
    expect_close("logits", actual, expected, tolerance("logits", case.dtype))


DECODED = (
    *texts(60, num_decode=6),  # across position 64, where most trained lengths end
    Text("llama-dynamic, across 48", config="llama-dynamic", num_prompt=45, chunks=(), num_decode=6),
)


@agreement("Logits of a prompt computed at once are the reference's, for every family.", texts(80))
def prefill(impl: Models, case: Text, reference: Models) -> None:
    expect_same_logits(impl, case, reference)


@agreement(
    "Logits of a prompt computed in chunks are the reference's, for every family.", texts(80, (1, 33, 15))
)
def chunked_prefill(impl: Models, case: Text, reference: Models) -> None:
    expect_same_logits(impl, case, reference)


@agreement("Logits of tokens computed one by one are the reference's, for every family.", DECODED)
def decode(impl: Models, case: Text, reference: Models) -> None:
    expect_same_logits(impl, case, reference)


@agreement(
    "In a half type logits are float32 still, and close to those of exact arithmetic.",
    grid(
        "{config}, {dtype}",
        of=Text,
        config=("llama-biases", "llama-llama3", "mistral-window", "qwen2-yarn", "qwen3-layer-types"),
        dtype=HALF_TYPES,
        num_prompt=40,
        chunks=[(17,)],
        num_decode=3,
        page_size=4,
    ),
)
def half_types(impl: Models, case: Text, reference: Models) -> None:
    """Cases in half types, of dense families only: in MoE models a rounded router logit may choose another
    expert."""
    expect_same_logits(impl, case, reference)


@agreement(
    "forward gives the hidden states after the final norm, and writes every layer's K and V to "
    "out_cache_loc, nothing elsewhere.",
    texts(30, (13,)),
)
def hidden_states_and_kv(impl: Models, case: Text, reference: Models) -> None:
    config = case.model_config()
    sessions = [
        ModelSession(make_model(impl, config), max_len=64),
        ModelSession(make_model(reference, config).double(), max_len=64),
    ]
    close = tolerance("logits", torch.float32)
    for piece in case.pieces():
        batches = [session.forward_batch({0: piece}) for session in sessions]
        actual, expected = (run_poisoned(s.hidden_states, batch) for s, batch in zip(sessions, batches))
        expect_form("hidden states", actual, like=expected, dtype=torch.float32)
        expect_close("hidden states", actual, expected, close)
        buffers = zip(*(session.kv_buffers() for session in sessions))
        for i, (ours, theirs) in enumerate(buffers):
            what = f"{'KV'[i // config.num_hidden_layers]} of layer {i % config.num_hidden_layers}"
            # Rows that were never written hold NaN.
            expect_close(what, ours, theirs, close)


@agreement(
    "With attention.rows a model that selects rows gives the hidden states of these tokens, in their order; "
    "K and V are as without.",
    texts(30, (13,)),
)
def hidden_states_of_rows(impl: Models, case: Text, reference: Models) -> None:
    config = case.model_config()
    model = make_model(impl, config)
    if not model.selects_rows:
        return
    ours = ModelSession(model, max_len=64)
    exact = ModelSession(make_model(reference, config).double(), max_len=64)
    close = tolerance("logits", torch.float32)
    for piece in case.pieces():
        last = len(piece) - 1
        rows = torch.tensor([last, 0, last // 2], device=ours.device)
        actual = run_poisoned(ours.hidden_states, ours.forward_batch({0: piece}), None, rows)
        expected = run_poisoned(exact.hidden_states, exact.forward_batch({0: piece}))[rows]
        expect_form("hidden states", actual, like=expected, dtype=torch.float32)
        expect_close("hidden states", actual, expected, close)
        for i, (found, wanted) in enumerate(zip(ours.kv_buffers(), exact.kv_buffers())):
            what = f"{'KV'[i // config.num_hidden_layers]} of layer {i % config.num_hidden_layers}"
            expect_close(what, found, wanted, close)


@agreement(
    "captured gets the streams that go into the layers named, and into the final norm; hidden states and KV "
    "are as without. They are copies: later layers do not touch them.",
    texts(30, (13,)),
)
def captured_streams(impl: Models, case: Text, reference: Models) -> None:
    config = case.model_config()
    model, close = make_model(impl, config), tolerance("logits", torch.float32)
    ours, plain = ModelSession(model, max_len=64), ModelSession(model, max_len=64)
    exact = ModelSession(make_model(reference, config).double(), max_len=64)
    layers = (*range(config.num_hidden_layers + 1),)
    for wanted in (layers, layers[1::2]):
        for piece in case.pieces() if wanted is layers else case.pieces()[:1]:
            found, expected = (dict.fromkeys(wanted, torch.empty(0)) for _ in range(2))
            hidden_states = run_poisoned(ours.hidden_states, ours.forward_batch({0: piece}), found)
            run_poisoned(exact.hidden_states, exact.forward_batch({0: piece}), expected)
            expect_equal("keys", sorted(found), sorted(wanted))
            for layer_id, stream in found.items():
                expect_form(f"into {layer_id}", stream, like=expected[layer_id], dtype=torch.float32)
                expect_close(f"into {layer_id}", stream, expected[layer_id], close)
            without = run_poisoned(plain.hidden_states, plain.forward_batch({0: piece}))
            expect_close("hidden states", hidden_states, without, EXACT)


@contract("embed gives what goes into layer 0, for ids of any shape.", texts(9))
def embeddings(impl: Models, case: Text) -> None:
    model = make_model(impl, case.model_config())
    (piece,) = case.pieces()
    session, captured = ModelSession(model, max_len=64), {0: torch.empty(0)}
    run_poisoned(session.hidden_states, session.forward_batch({0: piece}), captured)
    ids = torch.tensor(piece, device=session.device)
    with torch.inference_mode():
        expect_close("embeddings", model.embed(ids), captured[0], EXACT)
        expect_close("in a square", model.embed(ids.view(3, 3)), captured[0].view(3, 3, -1), EXACT)


class Mates(Case):
    """Requests in one batch: the lengths of the prompt and of its first chunk."""

    requests: tuple[tuple[int, int], ...] = ((80, 50), (1, 1), (37, 36))
    page_size: int = 1
    seed: int = 0

    def check(self) -> None:
        if not self.requests or any(len(request) != 2 or min(request) < 1 for request in self.requests):
            raise ValueError("a request has a prompt and a first chunk")

    def texts(self) -> list[Text]:
        return [
            Text(
                "",
                config=self.config,
                num_prompt=n,
                chunks=(chunk,)[: chunk < n],
                num_decode=2,
                seed=self.seed + i,
            )
            for i, (n, chunk) in enumerate(self.requests)
        ]


@contract(
    "A request's logits do not depend on its batch-mates, whether they extend or decode beside it.",
    grid(
        "{config}, page {page_size}",
        of=Mates,
        config=("llama-llama3", "llama-dynamic", "qwen3-layer-types", "qwen3-moe", "mixtral", "deepseek-v3"),
        page_size=(1, 4),
    ),
)
def batch_mates(impl: Models, case: Mates) -> None:
    texts = case.texts()
    model = make_model(impl, texts[0].model_config())
    alone = [logits_of(model, text) for text in texts]
    session = ModelSession(model, num_reqs=len(texts), page_size=case.page_size)
    pieces = [text.pieces() for text in texts]
    together: list[list[torch.Tensor]] = [[] for _ in texts]
    for step in range(max(len(p) for p in pieces)):
        new_ids = {i: pieces[i][step] for i in reversed(range(len(texts))) if step < len(pieces[i])}
        for i, logits in zip(new_ids, run_poisoned(session.step, new_ids)):
            together[i].append(logits)
    for i, logits in enumerate(alone):
        expect_close(f"request {i}", torch.cat(together[i]), logits, tolerance("logits", torch.float32))


@contract(
    "A model holds no state of requests: two sessions that take turns give what each gives alone.",
    grid(
        "{config}",
        of=Mates,
        config=("llama-dynamic", "mistral-window", "qwen3-moe"),
        requests=[((40, 21), (33, 5))],
    ),
)
def turns(impl: Models, case: Mates) -> None:
    texts = case.texts()
    model = make_model(impl, texts[0].model_config())
    alone = [logits_of(model, text) for text in texts]
    sessions = [ModelSession(model, max_len=64) for _ in texts]
    pieces = [text.pieces() for text in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for step in range(max(len(p) for p in pieces)):
        for i, session in enumerate(sessions):
            if step < len(pieces[i]):
                found[i] += run_poisoned(session.step, {0: pieces[i][step]})
    for i, logits in enumerate(alone):
        expect_close(f"session {i}", torch.cat(found[i]), logits, tolerance("logits", torch.float32))


@contract(
    "compute_logits: float32 [n, vocab_size], the product with the head, which may be the embedding.",
    grid(
        "{config}, {num_rows} rows, {dtype}",
        config=("llama-llama3", "llama-linear"),
        dtype=FLOAT_TYPES,
        num_rows=(0, 1, 63),
    ),
)
def head(impl: Models, case: Case) -> None:
    config = parse_config(CONFIGS[case.config])
    model = make_model(impl, config, case.dtype)
    hidden_states = Inputs(0).normal(case.num_rows, config.hidden_size, dtype=case.dtype)
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    weight = dict(dummy_weights(config))[name].to(case.dtype).double()
    logits = run_poisoned(model.compute_logits, hidden_states)
    expected = hidden_states.cpu().double() @ weight.T
    expect_form("logits", logits, like=expected.to(hidden_states.device), dtype=torch.float32)
    expect_close("logits", logits, expected, tolerance("logits", case.dtype))


@contract(
    "model_class knows every family, and refuses the others by name, listing those that it knows.", EXAMPLE
)
def model_class(impl: Models, case: Case) -> None:
    known = {config["architectures"][0] for config in CONFIGS.values()}
    for architecture in known:
        found = impl.model_class(architecture)
        expect_true(f"{architecture} is a CausalLM", issubclass(found, CausalLM), found)
    try:
        result: object = impl.model_class("GPT2LMHeadModel")
    except ValueError as error:
        result = str(error)
    for name in ("GPT2LMHeadModel", *known):
        expect_true(f"the error names {name}", isinstance(result, str) and name in result, result)
    expect_equal("type of what came", type(result), str)
