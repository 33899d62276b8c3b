"""Clauses of loading weights into a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from diptych.shared.config import ModelConfig, parse_config
from diptych.shared.interfaces import CausalLM
from diptych.shared.loading.live_weights import LiveWeights, specs_of
from diptych.shared.loading.weights import dummy_weights
from diptych.shared.parallel.alone import ALONE
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import Mismatch, expect_close, expect_equal, expect_true
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import HALF_TYPES
from diptych.shared.tools.conformance.clauses.poison import poison_
from diptych.shared.tools.conformance.clauses.tolerance import EXACT
from diptych.shared.tools.conformance.contracts.models.logits import (
    Models,
    Text,
    logits_of,
    make_model,
    new_model,
)
from diptych.shared.tools.conformance.oracles.configs import CONFIGS

NORM = "model.norm.weight"


class Family(Case):
    def model_config(self) -> ModelConfig:
        return parse_config(CONFIGS[self.name])

    def text(self) -> Text:
        return Text(self.name, config=self.name, num_prompt=20)


FAMILIES = tuple(Family(name) for name in CONFIGS)


def expect_loaded(model: CausalLM, impl: Models, case: Family) -> None:
    """Check that the model equals a plainly loaded one, bit for bit."""
    expected = logits_of(make_model(impl, case.model_config()), case.text())
    expect_close("logits", logits_of(model.eval(), case.text()), expected, EXACT)


@contract("Each tensor may be dropped once the next is asked for: nothing is kept but copies.", FAMILIES)
def tensors_may_be_dropped(impl: Models, case: Family) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in dummy_weights(case.model_config()):
            yield name, tensor
            poison_(tensor)

    model = new_model(impl, case.model_config())
    model.load_weights(weights())
    expect_loaded(model, impl, case)


@contract("New weights that are copied in place take effect, and nothing of the old ones is kept.", FAMILIES)
def weights_change(impl: Models, case: Family) -> None:
    config = case.model_config()
    model = make_model(impl, config)
    logits_of(model, case.text())
    live = LiveWeights(model, config, next(model.parameters()).device, None, ALONE)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    new = {name: tensor.clone() for name, tensor in dummy_weights(config, seed=1)}
    live.update(zip(specs_of(new), new.values()))
    expect_equal("places of the weights", [parameter.data_ptr() for parameter in model.parameters()], places)
    expected = logits_of(make_model(impl, config, seed=1), case.text())
    expect_close("logits", logits_of(model, case.text()), expected, EXACT)


@contract('A model built on "meta" takes memory when its weights come.', FAMILIES)
def built_on_meta(impl: Models, case: Family) -> None:
    model = new_model(impl, case.model_config(), device="meta")
    expect_true("built on meta", all(parameter.is_meta for parameter in model.parameters()))
    with check_device():
        model.load_weights(dummy_weights(case.model_config()))
    expect_loaded(model, impl, case)


@contract("Weights may come in any order.", FAMILIES)
def any_order(impl: Models, case: Family) -> None:
    model = new_model(impl, case.model_config())
    model.load_weights(reversed(list(dummy_weights(case.model_config()))))
    expect_loaded(model, impl, case)


@contract(
    "Weights are cast to the type that the model was built with.",
    tuple(family for family in FAMILIES if family.name in ("llama-biases", "qwen3-moe")),
)
def cast(impl: Models, case: Family) -> None:
    config = case.model_config()
    for dtype in HALF_TYPES:
        model = new_model(impl, config)
        model.load_weights((name, tensor.to(dtype)) for name, tensor in dummy_weights(config))
        expect_equal("types", {parameter.dtype for parameter in model.parameters()}, {torch.float32})
        exact = new_model(impl, config)
        exact.load_weights((name, tensor.to(dtype).float()) for name, tensor in dummy_weights(config))
        expect_close("logits", logits_of(model, case.text()), logits_of(exact, case.text()), EXACT)


@contract(
    "Experts may come packed, all of a layer in one tensor, and under Mixtral's own names.",
    tuple(family for family in FAMILIES if "moe" in family.name or "mixtral" in family.name),
)
def other_names_of_experts(impl: Models, case: Family) -> None:
    config = case.model_config()
    assert config.moe is not None
    weights = dict(dummy_weights(config))
    packed = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer_id in config.moe_layers:
        prefix = f"model.layers.{layer_id}.{'moe' if config.moe.beside_mlp else 'mlp'}.experts"
        gate, up, down = (
            torch.stack([weights[f"{prefix}.{e}.{name}.weight"] for e in range(config.moe.num_experts)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        packed |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
    matrices = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    mixtral = {}
    for name, tensor in weights.items():
        if ".experts." in name or name.endswith("mlp.gate.weight"):
            name = name.replace(".mlp.", ".block_sparse_moe.")
            for ours, theirs in matrices.items():
                name = name.replace(f".{ours}.", f".{theirs}.")
        mixtral[name] = tensor
    for names in (packed,) if config.moe.beside_mlp else (packed, mixtral):
        model = new_model(impl, config)
        model.load_weights(names.items())
        expect_loaded(model, impl, case)


@contract("What no model needs is passed over: RoPE's frequencies, and the head of a tied model.", EXAMPLE)
def harmless_tensors(impl: Models, case: Case) -> None:
    tied = Family("llama-llama3")
    model = new_model(impl, tied.model_config())
    extra = {"lm_head.weight": torch.ones(1), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(10)}
    model.load_weights([*extra.items(), *dummy_weights(tied.model_config())])
    expect_loaded(model, impl, tied)


def expect_refused(what: str, load: Callable[[], None], *parts: str) -> None:
    """Check for a `ValueError` whose message contains every part."""
    try:
        load()
    except ValueError as error:
        missing = [part for part in parts if part not in str(error)]
        expect_true(f"{what}: the error says {missing}", not missing, str(error))
        return
    raise Mismatch(what, "ValueError", "nothing was raised")


@contract("A tensor of the wrong shape is refused: which, what came, and what would be right.", FAMILIES)
def wrong_shape(impl: Models, case: Family) -> None:
    config = case.model_config()
    for name, tensor in dict(dummy_weights(config)).items():
        if name.startswith(("model.layers.1.", "model.norm", "model.embed", "lm_head")):
            wrong = torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:])
            weights = {**dict(dummy_weights(config)), name: wrong}
            model = new_model(impl, config)
            shapes = [str(size) for size in (*wrong.shape, *tensor.shape)]
            expect_refused(name, partial(model.load_weights, weights.items()), name, *shapes)


@contract("A name that the model does not have is refused, and so is one that comes twice.", FAMILIES)
def unknown_name(impl: Models, case: Family) -> None:
    config = case.model_config()
    for name in ("model.norm.bias", "model.layers.99.input_layernorm.weight", "transformer.wte.weight"):
        weights = [*dummy_weights(config), (name, torch.ones(config.hidden_size))]
        model = new_model(impl, config)
        expect_refused(name, partial(model.load_weights, weights), name)
    model = new_model(impl, config)
    twice = [*dummy_weights(config), (NORM, torch.ones(config.hidden_size))]
    expect_refused("a name that comes twice", lambda: model.load_weights(twice), NORM)


@contract("Names that never came are named.", FAMILIES)
def missing_names(impl: Models, case: Family) -> None:
    config = case.model_config()
    for name in dict(dummy_weights(config)):
        if name.startswith(("model.layers.0.", "model.norm", "model.embed", "lm_head")):
            model = new_model(impl, config)
            weights = [(n, tensor) for n, tensor in dummy_weights(config) if n != name]
            expect_refused(name, partial(model.load_weights, weights), name)
