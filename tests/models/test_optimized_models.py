"""The optimized models beyond the contract: which kernels run, and that fusing changes no result."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch

import diptych.optimized.layers
import diptych.optimized.mla.mla_model
import diptych.reference.layers
from diptych.optimized.kernels.linear import linear_choice
from diptych.optimized.layers import MLP, Linear, MergedLinear
from diptych.optimized.models import CLASSES, model_class
from diptych.reference.moe import MoE
from diptych.shared.config import parse_config
from diptych.shared.config.families import FAMILIES
from diptych.shared.interfaces import CausalLM
from diptych.shared.interfaces.layers import Layers
from diptych.shared.loading.weight_names import expected_shapes
from diptych.shared.loading.weights import dummy_weights, named_targets
from diptych.shared.tools.conformance.clauses.compare import expect_close
from diptych.shared.tools.conformance.clauses.device import building, check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.tools.conformance.oracles.model_session import ModelSession
from tests.conformance.mutants.mutant import module_with

KERNELS = (
    "qk_norm_rope_store",
    "rotate",
    "rms_norm",
    "rms_norm_add",
    "add_rms_norm",
    "add_partial_sums_rms_norm",
    "act_and_mul",
)
SKINNY = ("linear", "norm_linear", "norm_linear_silu", "linear_add")
FEW, MANY = 2, 52
assert FEW <= linear_choice.max_tokens(torch.float32) < MANY


def build(
    name: str, layers: Layers = diptych.optimized.layers, dtype: torch.dtype = torch.float32
) -> CausalLM:
    config = parse_config(CONFIGS[name])
    with building(dtype):
        model = model_class(config.architecture)(config, layers, MoE)
    model.load_weights(dummy_weights(config))
    return model.eval()


def logits(model: CausalLM) -> torch.Tensor:
    """Logits of many tokens together, then of 2, then of 1: by cuBLAS, by the skinny kernels, and again by
    these."""
    ids = Inputs(0).integers(331, MANY + FEW + 1).tolist()
    session = ModelSession(model)
    pieces = (ids[:MANY], ids[MANY:-1], ids[-1:])
    return torch.cat([session.step({0: piece})[0] for piece in pieces])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel's launcher is called."""
    counts: Counter[str] = Counter()

    def count(module: object, name: str) -> None:
        launch = getattr(module, name)

        def counting(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return launch(*args, **kwargs)

        monkeypatch.setattr(module, name, counting)

    for name in KERNELS:
        count(diptych.optimized.layers, name)
    count(diptych.optimized.mla.mla_model, "mla_rope_store")
    for name in SKINNY:
        count(diptych.optimized.layers.small_batch_linear, name)
    return counts


def test_every_architecture_that_configs_know_has_a_model() -> None:
    assert {family.decoder for family in FAMILIES.values()} == set(CLASSES)
    for architecture in FAMILIES:
        assert issubclass(model_class(architecture), CausalLM)


def test_a_family_is_imported_only_when_chosen() -> None:
    script = """
import sys
from diptych.optimized.models import model_class
assert "triton" not in sys.modules and "diptych.optimized.layers" not in sys.modules
model_class("MistralForCausalLM")
assert "diptych.optimized.decoder" in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_wants_exactly_the_expected_weights(name: str) -> None:
    config = parse_config(CONFIGS[name])
    with torch.device("meta"):
        targets = named_targets(model_class(config.architecture)(config, diptych.optimized.layers, MoE))
    assert {name: tuple(tensor.shape) for name, tensor in targets.items()} == expected_shapes(config)


@pytest.mark.parametrize("name", ["qwen3-yarn", "qwen2-yarn"])
def test_kernels_of_a_dense_layer(name: str, calls: Counter[str]) -> None:
    model = build(name)
    session, num_layers = ModelSession(model), model.config.num_hidden_layers
    session.step({0: list(range(MANY))})
    assert calls == {
        "qk_norm_rope_store": num_layers,
        "rms_norm": 2 * num_layers + 1,
        "act_and_mul": num_layers,
    }
    for num_tokens in (1, FEW):
        calls.clear()
        session.step({0: list(range(num_tokens))})
        assert calls == {
            "norm_linear": num_layers,
            "qk_norm_rope_store": num_layers,
            "linear_add": 2 * num_layers,
            "norm_linear_silu": num_layers,
            "rms_norm": 1,
            "linear": 1,  # the head
        }


def test_what_an_moe_gives_is_added_by_the_next_norm(calls: Counter[str]) -> None:
    model = build("mixtral")
    ModelSession(model).step({0: list(range(MANY))})
    num_layers = model.config.num_hidden_layers
    assert calls["add_rms_norm"] == num_layers  # of every layer but the first, and the last
    assert calls["rms_norm"] == num_layers + 1


def in_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[:, i::3] @ weight[:, i::3].T for i in range(3)]).float()


class AddsItself(diptych.optimized.layers.RMSNorm):
    """Ours, but for how it adds: what the contract names, and no parts."""

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.shape == residual.shape
        return self(x + residual), x + residual


OWN, OTHERS = diptych.optimized.layers, diptych.reference.layers
INHERITED = module_with(diptych.optimized.layers, RMSNorm=AddsItself)


@pytest.mark.parametrize("layers", [OWN, OTHERS, INHERITED], ids=["own", "others", "inherited"])
@pytest.mark.parametrize("name", ["qwen3-yarn", "mixtral"])
def test_what_products_leave_in_parts_is_added_by_the_next_norm(
    name: str, layers: Layers, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or before it, if it is user-provided."""
    expected = logits(build(name, layers))
    monkeypatch.setattr(diptych.optimized.layers.small_batch_linear, "linear_partial_sums", in_parts)
    calls.clear()
    model = build(name, layers)
    expect_close("logits", logits(model), expected, tolerance("logits", torch.float32))
    left = model.config.num_hidden_layers * (1 if name == "mixtral" else 2)
    # In two steps of three: `logits`.
    assert calls["add_partial_sums_rms_norm"] == (2 * left if layers is OWN else 0)
    assert calls["linear_add"] == 0


def test_hidden_states_are_whole_where_products_leave_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured() -> dict[int, torch.Tensor]:
        session, wanted = ModelSession(build("qwen3-yarn")), dict.fromkeys((0, 1, 2), torch.empty(0))
        session.hidden_states(session.forward_batch({0: [5, 6]}), wanted)
        return wanted

    expected = captured()
    monkeypatch.setattr(diptych.optimized.layers.small_batch_linear, "linear_partial_sums", in_parts)
    for layer_id, hidden_states in captured().items():
        close = tolerance("moe", torch.float32)
        expect_close(f"before layer {layer_id}", hidden_states, expected[layer_id], close)


@pytest.mark.parametrize("name", ["qwen3-yarn", "mixtral"])
def test_the_last_layer_ends_with_the_tokens_that_are_wanted(name: str) -> None:
    model, counts = build(name), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: counts.append(output[0].shape[0]))
    session = ModelSession(model)
    rows = torch.tensor([MANY - 1, 3], device=session.device)
    session.hidden_states(session.forward_batch({0: list(range(MANY))}), None, rows)
    assert counts == [MANY] * (len(counts) - 1) + [2]
    assert len(counts) == model.config.num_hidden_layers


IN_FAST_CUT = ("qwen2-yarn", "qwen3-layer-types", "mixtral")
THINNED = [pytest.param(name, marks=[] if name in IN_FAST_CUT else pytest.mark.full) for name in CONFIGS]


@pytest.mark.parametrize("name", THINNED)
def test_user_provided_layers_are_called_as_they_are(name: str, calls: Counter[str]) -> None:
    """And give what the fused kernels give."""
    expected = logits(build(name))
    # Llama 4 norms q and k after RoPE, Gemma 4 norms v, as layers of their own; GLM turns neighbours.
    if not name.startswith(("llama4", "gemma4")) and name not in ("glm", "glm4"):
        assert calls["qk_norm_rope_store"] + calls["mla_rope_store"] > 0
    assert set(calls) & {*KERNELS, "mla_rope_store"}
    calls.clear()
    found = logits(build(name, diptych.reference.layers))
    assert not set(calls) & {*KERNELS, "mla_rope_store"}
    expect_close("logits", found, expected, tolerance("logits", torch.float32))


@pytest.mark.parametrize("num_tokens", [1, FEW, MANY])
@pytest.mark.parametrize("bias", [False, True])
def test_cublas_linear(bias: bool, num_tokens: int) -> None:
    inputs = Inputs(0)
    with building(torch.float32):
        merged = MergedLinear(24, {"a": 5, "b": 7, "c": 1}, bias)
        linear, mlp = Linear(24, 10, bias), MLP(24, 12, bias)
        norm = diptych.optimized.layers.RMSNorm(24, 1e-5)
    for module in (merged, linear, mlp, norm):
        inputs.fill_(module)
    x, residual = inputs.normal(num_tokens, 24), inputs.normal(num_tokens, 10)
    close = tolerance("moe", torch.float32)

    def product(layer: Linear, x: torch.Tensor) -> torch.Tensor:
        y = x @ layer.weight.double().T
        return y if layer.bias is None else y + layer.bias.double()

    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight.double()
    with torch.inference_mode():
        expect_close("linear", linear(x), product(linear, x.double()), close)
        expect_close("of the norm", merged(x, norm), product(merged, normed), close)
        added = linear.add_to(residual.clone(), x)
        expect_close("with residual", added, residual + product(linear, x.double()), close)
        gate, up = product(mlp.gate_up_proj, normed).chunk(2, -1)
        activated = gate / (1 + (-gate).exp()) * up
        expect_close("activated", mlp.activate(x, norm), activated, close)
        gate, up = product(mlp.gate_up_proj, x.double()).chunk(2, -1)
        expect_close("mlp", mlp(x), product(mlp.down_proj, gate / (1 + (-gate).exp()) * up), close)


def test_logits_of_few_tokens_take_the_kernel_for_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("small_batch_linear", "cublas_linear"):
        module = getattr(diptych.optimized.layers, name)
        monkeypatch.setattr(module, "linear", lambda *_, name=name, **__: calls.append(name))
    most = linear_choice.max_tokens(torch.float32)
    for num_tokens in (1, most, most + 1):
        diptych.optimized.layers.logits(torch.zeros(num_tokens, 8), torch.zeros(4, 8))
    assert calls == ["small_batch_linear", "small_batch_linear", "cublas_linear"]


def test_parts_of_a_merged_product() -> None:
    merged = MergedLinear(3, {"a": 2, "b": 4}, bias=True)
    views = merged.weight_views()
    shapes = {"a.weight": (2, 3), "b.weight": (4, 3), "a.bias": (2,), "b.bias": (4,)}
    assert {name: tuple(view.shape) for name, view in views.items()} == shapes
    for i, view in enumerate(views.values()):
        view.fill_(i)
    assert merged.weight[:, 0].tolist() == [0, 0, 1, 1, 1, 1]
    assert merged.bias.tolist() == [2, 2, 3, 3, 3, 3]
    y = torch.arange(6.0).repeat(5, 1)
    parts = merged.split(y)
    assert {name: part.tolist()[0] for name, part in parts.items()} == {"a": [0, 1], "b": [2, 3, 4, 5]}


def test_the_stream_is_added_to_in_place_where_many_tokens_are() -> None:
    linear = Linear(4, 4).to(check_device())
    linear.weight.data.fill_(1.0)
    residual = torch.ones(MANY, 4, device=check_device())
    assert linear.add_to(residual, torch.ones_like(residual)).data_ptr() == residual.data_ptr()
    assert bool((residual == 5.0).all())
