"""NVFP4 checkpoints: weights as compressed-tensors and a loop over all values read them, parts of ranks, and
what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.shared import registry
from diptych.shared.config import EngineConfig, read_config
from diptych.shared.loading.load_model import load_model
from diptych.shared.loading.quantize import num_weight_bytes, quantize_weight
from diptych.shared.loading.quantized_weights import dequantized
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weights import iterate_weights
from diptych.shared.modeling.dequantized_values import dequantize
from diptych.shared.types.quant_scheme import QuantScheme
from tests.quantization.oracle import SIZES, tiny_model, write_checkpoint

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SOME = "model.layers.1.mlp.down_proj"
SCHEME = QuantScheme("nvfp4", group_size=16)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


def load(folder: Path, panel: str = "reference") -> torch.nn.Module:
    flags = EngineConfig(model=str(folder))
    component = lambda name: registry.load(name, panel)  # noqa: E731
    return load_model(folder, read_config(folder), flags, component, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("preset", ["NVFP4A16", "NVFP4"])
def test_weights_equal_those_of_compressed_tensors(preset: str, tmp_path: Path) -> None:
    recorded, _ = write_checkpoint(tmp_path, preset)
    model = load(tmp_path)
    assert len(recorded) == 7 * SIZES["num_hidden_layers"]
    if preset == "NVFP4":  # inputs are not quantized here; its weights are those of NVFP4A16
        (tmp_path / "weights").mkdir()
        recorded, _ = write_checkpoint(tmp_path / "weights", "NVFP4A16")
    for name, (x, y) in recorded.items():
        assert torch.equal(model.get_submodule(name)(x), y), name


def write_modelopt(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint in ModelOpt's layout, of random codes and scales. Returns the weights that it stands for,
    computed value by value."""
    model = tiny_model()
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    stored, expected = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        module, (out, size) = name.removesuffix(".weight"), weight.shape
        codes = torch.randint(16, (out, size), generator=generator, dtype=torch.uint8)
        scale_codes = torch.randint(1, 0x70, (out, size // 16), generator=generator, dtype=torch.uint8)
        scale = scale_codes.view(torch.float8_e4m3fn)
        factor = torch.rand((), generator=generator) / 100
        stored[name] = codes[:, 0::2] | codes[:, 1::2] << 4
        stored[f"{module}.weight_scale"], stored[f"{module}.weight_scale_2"] = scale, factor
        stored[f"{module}.input_scale"] = torch.tensor(0.25)
        table = np.array([*VALUES, *(-value for value in VALUES)], dtype=np.float32)
        of_groups = scale.float().numpy() * np.float32(factor)
        rows = [
            [table[code] * of_groups[i, j // 16] for j, code in enumerate(row)]
            for i, row in enumerate(codes.tolist()[:8])
        ]
        expected[name] = torch.tensor(np.array(rows))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return expected


def write_config(folder: Path, quantization: dict[str, object]) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


def test_modelopts_layout_is_read_value_by_value(tmp_path: Path) -> None:
    expected = write_modelopt(tmp_path)
    write_config(tmp_path, MODELOPT)
    schemes = dict.fromkeys((name.removesuffix(".weight") for name in expected), SCHEME)
    weights = dict(dequantized(iterate_weights(tmp_path), schemes.get))
    for name, wanted in expected.items():
        assert torch.equal(weights[name][: len(wanted)], wanted), name
    # Both panels load them; merged layers are compared by their outputs.
    x = torch.randn(3, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1))
    optimized = load(tmp_path, "optimized").get_submodule(SOME.replace("down_proj", "gate_up_proj"))
    both = torch.cat([weights[SOME.replace("down", part) + ".weight"] for part in ("gate", "up")])
    torch.testing.assert_close(optimized(x), x @ both.T)
    assert optimized.weight.dtype == torch.uint8
    num_bytes = sum(parameter.nbytes for parameter in optimized.parameters())
    assert num_bytes == both.numel() * 9 // 16 + 8 * len(both)  # 4.5 bits, and two scales for an output
    config = read_config(tmp_path)
    shapes = {f"{SOME}.weight": (256, 384)}
    assert num_weight_bytes(shapes, config.quantization, torch.bfloat16) == 256 * (384 * 9 // 16 + 8)


def test_a_rank_reads_its_parts(tmp_path: Path) -> None:
    write_modelopt(tmp_path)
    write_config(tmp_path, MODELOPT)
    config, whole = read_config(tmp_path), dict(iterate_weights(tmp_path))
    parts = [dict(iterate_weights(tmp_path, config, shards=Shards(config, rank, 2))) for rank in range(2)]
    for suffix, dim in (("weight", 1), ("weight_scale", 1)):
        name = f"{SOME}.{suffix}"
        assert torch.equal(torch.cat([part[name].float() for part in parts], dim), whole[name].float())
    for suffix in ("weight", "weight_scale", "weight_global"):
        name, dim = f"{SOME.replace('down', 'up')}.{suffix}", 0
        assert torch.equal(torch.cat([part[name].float() for part in parts], dim), whole[name].float())


def test_the_older_file_of_modelopt(tmp_path: Path) -> None:
    write_modelopt(tmp_path)
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*.0.mlp*"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    found = read_config(tmp_path).quantization
    assert found is not None
    assert str(found.scheme_of(SOME)).startswith("nvfp4 by groups of 16")
    assert found.scheme_of(SOME.replace(".1.", ".0.")) is None
    assert found.scheme_in_memory(SOME) == SCHEME


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{SOME}.weight_scale_2": None}, f"{SOME}.weight_scale_2 is missing"),
        ({f"{SOME}.weight_scale_2": torch.tensor(0.0)}, "weight_scale_2 is 0; it must be positive"),
        ({f"{SOME}.input_scale": torch.tensor(-1.0)}, "input_scale is .*a scale is a finite number above 0"),
        ({f"{SOME}.weight_scale": torch.ones(256, 12)}, "weight_scale is of type F32, not F8_E4M3"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    write_modelopt(tmp_path)
    write_config(tmp_path, MODELOPT)
    stored = load_file(tmp_path / "model.safetensors") | changes
    save_file({name: x for name, x in stored.items() if x is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        dict(iterate_weights(tmp_path))


def test_quantized_weights_are_the_nearest_that_there_are() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    weight[0] = 0.0
    weight[1] *= 1e-4  # its scales are subnormal
    tensors = quantize_weight(weight, SCHEME)
    scale, (factor, divisor) = tensors["weight_scale"].float(), tensors["weight_global"][0].tolist()
    assert (scale.max(), divisor) == (448.0, 1.0)
    assert factor == pytest.approx(float(weight.abs().max()) / (6 * 448))
    found = dequantize(tensors["weight"], tensors["weight_scale"], tensors["weight_global"], SCHEME)
    steps = (scale * factor).repeat_interleave(16, dim=1)
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    nearest = (weight[..., None] - steps[..., None] * table).abs().amin(-1)
    torch.testing.assert_close((weight - found).abs(), nearest, atol=1e-7, rtol=1e-5)  # float32, two ways
    zeros = quantize_weight(torch.zeros(2, 32), SCHEME)
    assert not dequantize(zeros["weight"], zeros["weight_scale"], zeros["weight_global"], SCHEME).any()


def test_a_scale_of_nan_is_refused(tmp_path: Path) -> None:
    write_modelopt(tmp_path)
    write_config(tmp_path, MODELOPT)
    stored = load_file(tmp_path / "model.safetensors")
    stored[f"{SOME}.weight_scale"].view(torch.uint8)[3, 5] = 0x7F
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=f"{SOME}.weight_scale has scales that are negative, NaN or infinite"
    ):
        dict(iterate_weights(tmp_path))
