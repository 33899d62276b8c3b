"""Clauses of the LoRA pool: logits are those of models whose weights have the adapter added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config import ModelConfig, parse_config
from diptych.shared.interfaces import LoraPool
from diptych.shared.interfaces.lora import NO_ADAPTER
from diptych.shared.loading.lora_adapter import adaptable_modules, content_id_of
from diptych.shared.loading.weights import dummy_weights
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal, expect_raises
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.contracts.models.logits import make_model
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.tools.conformance.oracles.model_session import ModelSession
from diptych.shared.types import ForwardBatch, LoraAdapter, LoraWeights

NUM_SLOTS, MAX_RANK, MAX_TOKENS = 3, 20, 64
EVERY, SOME = ("_proj",), ("k_proj", "o_proj", "up_proj")


def make_adapter(
    config: ModelConfig, rank: int, targets: Sequence[str] = EVERY, seed: int = 0, scale: float = 0.7
) -> LoraAdapter:
    """A random adapter that changes logits by several units, on the CPU as one that was read from a file."""
    inputs = Inputs(seed)
    modules = {
        name: LoraWeights(
            inputs.normal(rank, size_in).cpu() * size_in**-0.5, inputs.normal(size_out, rank).cpu(), scale
        )
        for name, (size_out, size_in) in adaptable_modules(config).items()
        if name.endswith(tuple(targets))
    }
    return LoraAdapter(f"rank-{rank}", content_id_of(modules), modules)


class Session(ModelSession):
    """Requests of a model with a pool; request i is in row `req_pool_indices[i]`."""

    def __init__(self, impl: type[LoraPool], config: ModelConfig, num_reqs: int) -> None:
        self.model = make_model(registry.load("models", impl.models), config)
        self.pool = impl(self.model, NUM_SLOTS, MAX_RANK, num_reqs, MAX_TOKENS)
        super().__init__(self.model, num_reqs=num_reqs, max_len=32)
        self.after_prepare: Any = lambda: None

    def hidden_states(self, batch: ForwardBatch, *args: Any) -> torch.Tensor:
        with torch.inference_mode():
            self.pool.prepare(batch)
            self.after_prepare()
        return super().hidden_states(batch, *args)

    def assign(self, slots: Sequence[int]) -> None:
        self.pool.assign(self.req_pool_indices[: len(slots)], slots)


def merged_logits(
    config: ModelConfig, adapter: LoraAdapter | None, pieces: Sequence[list[int]]
) -> torch.Tensor:
    """The logits of every token, in float64, of the reference's model with the adapter added to its
    weights."""
    model = make_model(registry.load("models", "reference"), config).double()
    weights = {name: tensor.double() for name, tensor in dummy_weights(config, 0)}
    for name, change in (adapter.modules if adapter is not None else {}).items():
        weights[f"{name}.weight"] += change.scale * (change.b.double() @ change.a.double())
    model.load_weights(weights.items())
    session = ModelSession(model, num_reqs=1, max_len=32)
    return torch.cat([session.step({0: piece})[0] for piece in pieces])


def tokens(config: ModelConfig, num_reqs: int) -> list[list[list[int]]]:
    """A prompt and a single token for each request."""
    ids = Inputs(5).integers(config.vocab_size, num_reqs, 12).tolist()
    return [[each[: 4 + i], each[-1:]] for i, each in enumerate(ids)]


def expect_merged(session: Session, adapters: Sequence[LoraAdapter | None]) -> None:
    """Run all requests in one batch, and compare each with the model merged with its adapter."""
    config = session.model.config
    pieces = tokens(config, len(adapters))
    steps = [session.step({i: own[k] for i, own in enumerate(pieces)}) for k in range(2)]
    for i, adapter in enumerate(adapters):
        actual = torch.cat([step[i] for step in steps])
        expected = merged_logits(config, adapter, pieces[i])
        expect_close(f"logits of request {i}", actual, expected, tolerance("logits", torch.float32))


@contract(
    "Each token's logits are those of the model with its request's adapter added to the weights; without an "
    "adapter, those of the model.",
    grid("{config}", config=("deepseek-v2-lite", "gemma3")),
)
def mixed_batch(impl: type[LoraPool], case: Case) -> None:
    config = parse_config(CONFIGS[case.config])
    first = make_adapter(config, 8, seed=1)
    second = make_adapter(config, 3, SOME, seed=2, scale=2.0)
    third = make_adapter(config, MAX_RANK, ("q_proj", "v_proj", "gate_proj"), seed=3, scale=0.3)
    session = Session(impl, config, 5)
    for slot, adapter in enumerate((third, first, second)):
        session.pool.load(slot, adapter)
    session.assign([1, NO_ADAPTER, 2, 0, 1])
    expect_merged(session, [first, None, second, third, first])


@contract("What a slot had before has no effect, whatever its rank and modules; nor what a row had.", EXAMPLE)
def reloaded_slot(impl: type[LoraPool], case: Case) -> None:
    config = parse_config(CONFIGS["llama-biases"])
    session = Session(impl, config, 3)
    large, small = make_adapter(config, MAX_RANK, seed=1), make_adapter(config, 2, SOME, seed=2)
    session.pool.load(0, large)
    session.assign([0, 0, 0])
    session.step({0: [5, 6, 7]})
    session.pool.load(0, small)
    session.assign([0, NO_ADAPTER, 0])
    session.lens = [0] * 3
    session.last_locs = [-1] * 3
    expect_merged(session, [small, None, small])


@contract("Steps under way keep what they were prepared with.", EXAMPLE)
def load_during_a_step(impl: type[LoraPool], case: Case) -> None:
    config = parse_config(CONFIGS["llama-biases"])
    session = Session(impl, config, 2)
    old, new = make_adapter(config, 8, seed=1), make_adapter(config, 8, seed=2)
    session.pool.load(0, old)
    session.assign([0, NO_ADAPTER])
    session.after_prepare = lambda: session.pool.load(0, new)
    ids = [3, 1, 4, 1, 5]
    logits = session.step({0: ids, 1: ids})
    expected = merged_logits(config, old, [ids])
    expect_close("logits of the step under way", logits[0], expected, tolerance("logits", torch.float32))


@contract(
    "A module that the model does not have, a wrong shape and a rank above max_rank are each a ValueError.",
    EXAMPLE,
)
def refusals(impl: type[LoraPool], case: Case) -> None:
    config = parse_config(CONFIGS["llama-biases"])
    pool = Session(impl, config, 1).pool
    good = make_adapter(config, 2, ("layers.0.self_attn.q_proj",))
    (weights,) = good.modules.values()
    wide = LoraWeights(weights.a[:, 1:], weights.b, 1.0)
    for modules in (
        {"model.embed_tokens": weights},
        {"model.layers.0.self_attn.q_proj": wide},
        make_adapter(config, MAX_RANK + 1, SOME).modules,
    ):
        adapter = LoraAdapter("bad", "", modules)
        expect_raises("load", ValueError, pool.load, 0, adapter)
    expect_equal("num_slots", pool.num_slots, NUM_SLOTS)
