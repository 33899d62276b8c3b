"""Checkpoints as people publish them: names of files, prefixes of names, and GPTQ in all its forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.shared.config import read_config
from diptych.shared.config.hf_quantization import parse_quantization
from diptych.shared.loading.kv_scales import read_kv_scales
from diptych.shared.loading.quantize import quantize_weight
from diptych.shared.loading.safetensors_file import read_checkpoint
from diptych.shared.loading.weights import iterate_weights
from diptych.shared.types.quant_scheme import QuantScheme
from tests.quantization.test_checkpoints import Tensors, load, quantized_layers, write

NAME = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("file", "is_read"),
    [
        ("model-00001-of-00001.safetensors", True),
        ("gptq_model-4bit-128g.safetensors", True),
        ("model-00001-of-00002.safetensors", False),
        ("model-00003-of-00010.safetensors", False),
        ("adapter_model.safetensors", False),
    ],
)
def test_one_file_without_an_index(file: str, is_read: bool, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / file)
    if is_read:
        assert list(read_checkpoint(tmp_path)) == ["a"]
    else:
        with pytest.raises(ValueError, match=rf"found {file}; weights must be"):
            read_checkpoint(tmp_path)


def test_two_files_without_an_index(tmp_path: Path) -> None:
    for file in ("a.safetensors", "b.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / file)
    with pytest.raises(ValueError, match=r"found a.safetensors, b.safetensors; weights must be"):
        read_checkpoint(tmp_path)


LAYER = "model.layers.0.self_attn.q_proj"
OTHER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize(
    "form", ["{}layers.0.self_attn.q_proj", "re:{}layers.*self_attn.*", "re:.*self_attn.*"]
)
def test_prefixes(prefix: str, form: str) -> None:
    entry = form.format(prefix)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights}
    ignoring = [
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": group},
            "ignore": [entry, "re:.*lm_head"],
        },
    ]
    if not form.startswith("re:"):
        ignoring.append({"quant_method": "fp8", "modules_to_not_convert": [entry]})
        ignoring.append(
            {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": [entry]}
        )
        ignoring.append(
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [f"{prefix}layers.0.self_attn*"]}
        )
    for values in ignoring:
        config = parse_quantization(values)
        assert config.scheme_of(LAYER) is None
        assert config.scheme_of(OTHER) is not None
    values = {"quant_method": "compressed-tensors", "config_groups": {"a": {**group, "targets": [entry]}}}
    config = parse_quantization(values)
    assert config.scheme_of(LAYER) is not None
    assert config.scheme_of(OTHER) is None


def test_a_multimodal_checkpoint_with_scales(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, scales of FP8 and of KV, and tensors for images, under the names of a multimodal model."""
    scheme = QuantScheme("fp8", 1, None, "token")

    def pack(module: str, weight: torch.Tensor) -> Tensors:
        if module.endswith("o_proj"):
            return {f"{module}.weight": weight}
        return {f"{module}.{name}": tensor for name, tensor in quantize_weight(weight, scheme).items()}

    group = {
        "targets": [r"re:model\.language_model\.layers.*"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    }
    values = {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": group},
        "ignore": ["lm_head", r"re:model\.language_model\.layers\.\d+\.self_attn\.o_proj", "re:.*visual.*"],
    }
    write(tmp_path, values, pack)
    file = tmp_path / "model.safetensors"
    plain = {name: layer.dequantized_weight() for name, layer in quantized_layers(load(tmp_path)).items()}
    assert plain
    assert not any("o_proj" in name for name in plain)
    tensors = load_file(file)
    for layer in range(read_config(tmp_path).num_hidden_layers):
        tensors |= {f"model.layers.{layer}.self_attn.{k}_scale": torch.tensor(0.5) for k in "kv"}
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file({**tensors, "model.visual.merger.norm.weight": torch.ones(4)}, file)
    capsys.readouterr()
    found = {name: layer.dequantized_weight() for name, layer in quantized_layers(load(tmp_path)).items()}
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert "tensors that are not of the language model: 1 for images\n" in capsys.readouterr().err
    scales = read_kv_scales(tmp_path, read_config(tmp_path))
    assert scales is not None
    assert scales[0].k == 0.5
    save_file({**tensors, "model.audio.weight": torch.ones(4)}, file)
    with pytest.raises(ValueError, match=r"model.audio.weight"):
        load(tmp_path)


def gptq(num_bits: int, group_size: int, symmetric: bool, any_order: bool, bias: float = 0.0) -> Any:
    """What packs a weight as GPTQ does, and what it stands for."""
    expected: Tensors = {}
    generator = torch.Generator().manual_seed(1)

    def pack(module: str, weight: torch.Tensor) -> Tensors:
        out, size = weight.shape
        groups = torch.arange(size) // group_size
        if any_order:
            groups = groups[torch.randperm(size, generator=generator)]
        num_groups, largest = size // group_size, 2**num_bits - 1
        scale = torch.rand(out, num_groups, generator=generator) + 0.1
        zero = torch.full((out, num_groups), (largest + 1) // 2)
        if not symmetric:
            zero = torch.randint(1, largest, zero.shape, generator=generator)
        q = torch.randint(0, largest + 1, (out, size), generator=generator)
        expected[module] = ((q - zero[:, groups]) * scale[:, groups]).float()
        return {
            f"{module}.qweight": words(q, num_bits).T,
            f"{module}.qzeros": words(zero.T - 1, num_bits),
            f"{module}.scales": scale.T,
            f"{module}.g_idx": groups.int(),
            f"{module}.bias": torch.full((out,), bias),
        }

    return pack, expected


def words(values: torch.Tensor, num_bits: int) -> torch.Tensor:
    """[rows, n] -> int32 [rows, n * num_bits / 32], the first value in the lowest bits."""
    each = values.to(torch.int64).unflatten(1, (-1, 32 // num_bits))
    found = (each << torch.arange(0, 32, num_bits)).sum(-1)
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32)


@pytest.mark.parametrize(
    ("num_bits", "symmetric", "any_order"),
    [
        (4, False, True),
        (8, True, False),
        pytest.param(4, True, True, marks=pytest.mark.full),
        pytest.param(8, True, True, marks=pytest.mark.full),
        pytest.param(4, True, False, marks=pytest.mark.full),
    ],
)
def test_gptq(
    num_bits: int, symmetric: bool, any_order: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With zeros for biases that the model does not have."""
    pack, expected = gptq(num_bits, 32, symmetric, any_order)
    values = {"quant_method": "gptq", "bits": num_bits, "group_size": 32, "sym": symmetric}
    write(tmp_path, {**values, "desc_act": any_order}, pack)
    (tmp_path / "model.safetensors").rename(tmp_path / f"gptq_model-{num_bits}bit-32g.safetensors")
    model = load(tmp_path)
    layers = dict(model.named_modules())
    for name, weight in expected.items():
        layer: Any = layers[name]
        found = layer.weight if any_order else layer.dequantized_weight()
        torch.testing.assert_close(found, weight, rtol=1e-6, atol=0.0)
    assert ("are dequantized when they are loaded" in capsys.readouterr().err) == any_order


def test_gptq_refuses(tmp_path: Path) -> None:
    values = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
    write(tmp_path, values, gptq(4, 32, True, True, bias=0.5)[0])
    with pytest.raises(ValueError, match=r"bias is not 0, and .* has no bias in this model"):
        list(iterate_weights(tmp_path))
    write(tmp_path, values, gptq(4, 32, True, True)[0])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, f"{NAME}.g_idx": tensors[f"{NAME}.g_idx"] + 1}, file)
    with pytest.raises(ValueError, match=rf"{NAME}.g_idx names groups beyond the"):
        list(iterate_weights(tmp_path))
    for changes, message in (({"bits": 3}, "bits is 3"), ({"bits": 8, "sym": False}, "sym is false")):
        with pytest.raises(ValueError, match=message):
            parse_quantization({**values, **changes})
