import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from model_harness import Session, build_model

from reference.models import MODELS, model_class
from shared.config import ModelConfig
from shared.config.hf_config import FAMILIES
from shared.conformance.configs import CONFIGS
from shared.interfaces import CausalLM
from shared.weight_names import expected_shapes
from shared.weights import dummy_weights, named_targets


def config_of(name: str) -> ModelConfig:
    return ModelConfig.from_dict(CONFIGS[name])


def load(config: ModelConfig, changes: dict[str, torch.Tensor | None]) -> CausalLM:
    """A model with dummy weights, of which some are replaced, added, or (None) left out."""
    model = build_model(config)
    weights = dict(dummy_weights(config)) | changes
    model.load_weights((name, tensor) for name, tensor in weights.items() if tensor is not None)
    return model


def test_every_architecture_that_configs_know_has_a_model() -> None:
    assert set(MODELS) == set(FAMILIES)
    for architecture in MODELS:
        assert issubclass(model_class(architecture), CausalLM)
        assert model_class(architecture).__name__ == architecture


def test_an_unknown_architecture_is_refused_with_a_list() -> None:
    with pytest.raises(ValueError, match=r"'GPT2LMHeadModel'; there are LlamaForCausalLM, .*Qwen3Moe"):
        model_class("GPT2LMHeadModel")


def test_a_family_is_imported_only_when_chosen() -> None:
    script = """
import sys
from reference.models import model_class
assert not any(name.startswith("reference.models.") for name in sys.modules)
model_class("MistralForCausalLM")
assert "reference.models.mixtral" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_wants_exactly_the_expected_weights(name: str) -> None:
    config = config_of(name)
    with torch.device("meta"):
        targets = named_targets(build_model(config))
    assert {name: tuple(tensor.shape) for name, tensor in targets.items()} == expected_shapes(config)


def test_weights_are_cast_to_the_dtype_that_the_model_was_built_with() -> None:
    config = replace(config_of("qwen3-moe"), dtype=torch.bfloat16)
    assert {tensor.dtype for _, tensor in dummy_weights(config)} == {torch.bfloat16}
    model = build_model(config)
    model.load_weights(dummy_weights(config))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    name = "model.layers.1.mlp.experts.6.up_proj.weight"
    assert torch.equal(named_targets(model)[name], dict(dummy_weights(config))[name].float())


def test_a_model_built_on_meta_takes_memory_when_weights_come() -> None:
    config = config_of("mixtral")
    with torch.device("meta"):
        model = build_model(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.load_weights(dummy_weights(config))
    expected = build_model(config)
    expected.load_weights(dummy_weights(config))
    tokens = {0: list(range(30))}
    assert torch.equal(Session(model).step(tokens)[0], Session(expected).step(tokens)[0])


def test_hidden_states_and_logits() -> None:
    config = config_of("llama-llama3")
    model = load(config, {})
    hidden_states = torch.randn(5, config.hidden_size)
    logits = model.compute_logits(hidden_states)
    assert logits.shape == (5, config.vocab_size)
    embedding = dict(dummy_weights(config))["model.embed_tokens.weight"]
    torch.testing.assert_close(logits, hidden_states @ embedding.T)  # the head is tied
    model.to(torch.bfloat16)
    assert model.compute_logits(hidden_states.to(torch.bfloat16)).dtype == torch.float32
    assert model.compute_logits(hidden_states[:0].to(torch.bfloat16)).shape == (0, config.vocab_size)


def test_a_step_runs_in_bfloat16() -> None:
    config = config_of("qwen3-moe")
    model = load(config, {})
    tokens = {0: list(range(30))}
    expected = Session(model).step(tokens)[0]
    logits = Session(model.to(torch.bfloat16)).step(tokens)[0]
    assert logits.dtype == torch.float32
    # bfloat16 rounds to 2^-9: logits of size 1 behind 4 layers. Some experts may be chosen differently.
    difference = (logits - expected).abs()
    assert 0 < difference.median() < 0.05


NORM = "model.norm.weight"
GATE_PROJ = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None, GATE_PROJ: None}, rf"2 of \d+ weights of a Llama.* never came: {GATE_PROJ}, {NORM}$"),
        ({NORM: torch.ones(99)}, rf"{NORM} has shape \[99\]; it must be \[100\]"),
        ({"model.norm.bias": torch.ones(100)}, r"model.norm.bias is no weight of a LlamaForCausalLM"),
    ],
)
def test_weights_that_do_not_fit_are_named(changes: dict[str, torch.Tensor | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(config_of("llama-llama3"), changes)


def test_a_weight_that_comes_twice_is_refused() -> None:
    config = config_of("llama-llama3")
    weights = list(dummy_weights(config))
    with pytest.raises(ValueError, match=f"{NORM} came twice"):
        build_model(config).load_weights([*weights, (NORM, torch.ones(100))])


def test_what_a_tied_model_does_not_need_is_ignored() -> None:
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(10)}
    load(config_of("llama-llama3"), {"lm_head.weight": torch.ones(1), **inv_freq})
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \[1\]; it must be \[331, 64\]"):
        load(config_of("llama-linear"), {"lm_head.weight": torch.ones(1), **inv_freq})


def test_packed_experts_are_taken_apart() -> None:
    """The names that transformers has in memory."""
    config = config_of("mixtral")
    weights = dict(dummy_weights(config))
    expected = load(config, {})
    packed = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer_id in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer_id}.mlp.experts"
        gate, up, down = (
            torch.stack([weights[f"{prefix}.{e}.{proj}.weight"] for e in range(5)])
            for proj in ("gate_proj", "up_proj", "down_proj")
        )
        packed |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
    model = build_model(config)
    model.load_weights(packed.items())
    for ours, theirs in zip(model.parameters(), expected.parameters()):
        assert torch.equal(ours, theirs)
