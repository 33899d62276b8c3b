"""Clauses of the models: rows in place of token ids, and positions of images."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from diptych.shared.config import ModelConfig, parse_config
from diptych.shared.tools.conformance.clauses.case import Case, grid
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_form, expect_true
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.poison import run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import EXACT, tolerance
from diptych.shared.tools.conformance.contracts.models.logits import Models, make_model
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.tools.conformance.oracles.model_session import ModelSession

CLOSE = tolerance("logits", torch.float32)
NUM_TOKENS = 9


def takes_rows(models: Models, config: ModelConfig) -> bool:
    """Whether `forward` has the optional argument."""
    parameters = signature(make_model(models, config).forward).parameters.values()
    return any(each.name == "input_embeds" or each.kind is each.VAR_KEYWORD for each in parameters)


@contract(
    "input_embeds go into layer 0, and input_ids are not read; parts of a row behind the first are added to "
    "the inputs of layers 1, 2 and so on.",
    grid("{config}", config=("llama-llama3", "qwen3-moe")),
)
def given_inputs(impl: Models, case: Case) -> None:
    config, inputs = parse_config(CONFIGS[case.config]), Inputs(1)
    if not takes_rows(impl, config):
        return
    model, num_layers, size = make_model(impl, config), config.num_hidden_layers, config.hidden_size
    rows = inputs.normal(NUM_TOKENS, num_layers * size)

    def run(num_parts: int, ids: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        session, streams = ModelSession(model, max_len=16), dict.fromkeys(range(num_layers), torch.empty(0))
        session.inputs = {"input_embeds": rows[:, : num_parts * size].contiguous()}
        batch = session.forward_batch({0: ids.tolist()})
        return run_poisoned(session.hidden_states, batch, streams), streams

    ids = inputs.integers(config.vocab_size, 2, NUM_TOKENS)
    before, streams = run(1, ids[0])
    expect_close("into layer 0", streams[0], rows[:, :size], EXACT)
    expect_close("hidden states with other ids", run(1, ids[1])[0], before, EXACT)
    for layer_id in range(1, num_layers):
        expected = streams
        hidden_states, streams = run(layer_id + 1, ids[0])
        part = rows[:, layer_id * size : (layer_id + 1) * size]
        for i in range(layer_id):
            expect_close(f"into layer {i} with {layer_id + 1} parts", streams[i], expected[i], EXACT)
        expect_close(f"into layer {layer_id}", streams[layer_id], expected[layer_id] + part, CLOSE)
        is_read = not torch.allclose(hidden_states, before, rtol=1e-2)
        expect_true(f"layer {layer_id} reads what is added", is_read, hidden_states)
        before = hidden_states


def with_axes() -> ModelConfig:
    """A Qwen3 whose tokens turn by three positions, as that of Qwen3-VL."""
    fields: dict[str, Any] = CONFIGS["qwen3-layer-types"]
    section = [fields["head_dim"] // 2 - 4, 2, 2]
    rope = {**fields["rope_parameters"], "mrope_interleaved": True, "mrope_section": section}
    return parse_config({**fields, "rope_parameters": rope})


@agreement(
    "Of a model with mrope_section positions may be [3, num_tokens], in time, by rows and by columns; three "
    "equal ones give what one gives.",
    grid("{num_tokens} tokens", num_tokens=(1, 33)),
)
def axes_of_tokens(impl: Models, case: Case, reference: Models) -> None:
    config, inputs = with_axes(), Inputs(2)
    if not takes_rows(impl, config):
        return
    ids = inputs.integers(config.vocab_size, case.num_tokens).tolist()
    places = inputs.integers(60, 3, case.num_tokens)
    own = torch.arange(case.num_tokens).repeat(3, 1)

    def run(models: Models, dtype: torch.dtype, positions: torch.Tensor | None) -> torch.Tensor:
        session = ModelSession(make_model(models, config).to(dtype), max_len=64)
        return run_poisoned(session.hidden_states, session.forward_batch({0: ids}, rope_positions=positions))

    found, expected = run(impl, torch.float32, places), run(reference, torch.float64, places)
    expect_form("hidden states", found, like=expected, dtype=torch.float32)
    expect_close("hidden states", found, expected, CLOSE)
    plain = run(impl, torch.float32, None)
    expect_close("of three equal positions", run(impl, torch.float32, own), plain, CLOSE)
