"""MXFP4 experts in the layout of GPT-OSS, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych import LLM
from diptych.shared.config import parse_config, read_config
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.loading.quantize import quantize_weight
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weights import iterate_weights
from diptych.shared.modeling.dequantized_values import dequantize
from diptych.shared.parallel.expert_map import in_order
from diptych.shared.types.quant_scheme import FP4_VALUES, QuantScheme

SCHEME = QuantScheme("mxfp4", group_size=32)
EXPERTS = "model.layers.{}.mlp.experts"


def packed(num_experts: int, rows: int, size: int, seed: int) -> dict[str, torch.Tensor]:
    """Random codes and exponents, as a checkpoint has them."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_experts, rows, size // 32
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 124, shape, generator=generator, dtype=torch.uint8)
    return {"blocks": blocks, "scales": scales}


def make_checkpoints(folder: Path) -> tuple[Path, Path]:
    """tiny-moe with MXFP4 experts, and the same with the values that they stand for, by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = ASSETS / "tiny-moe"
    values = json.loads((source / "config.json").read_text())
    config = parse_config(values)
    assert config.moe is not None
    num_experts, hidden, inter = config.moe.num_experts, config.hidden_size, config.moe.intermediate_size
    tensors = {n: t for n, t in load_file(source / "model.safetensors").items() if ".experts." not in n}
    plain: dict[str, torch.Tensor] = dict(tensors)
    for layer_id in sorted(config.moe_layers):
        prefix = EXPERTS.format(layer_id)
        for matrix, rows, size in (("gate_up_proj", 2 * inter, hidden), ("down_proj", hidden, inter)):
            parts = packed(num_experts, rows, size, seed=layer_id * 2 + rows)
            tensors |= {f"{prefix}.{matrix}_{kind}": part for kind, part in parts.items()}
            dense = convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=torch.float32)
            for e, weight in enumerate(dense.transpose(1, 2).contiguous()):
                if matrix == "down_proj":
                    plain[f"{prefix}.{e}.down_proj.weight"] = weight
                else:
                    plain[f"{prefix}.{e}.gate_proj.weight"] = weight[0::2].contiguous()
                    plain[f"{prefix}.{e}.up_proj.weight"] = weight[1::2].contiguous()
    for name, weights, more in (
        ("mxfp4", tensors, {"quantization_config": {"quant_method": "mxfp4"}}),
        ("plain", plain, {}),
    ):
        (folder / name).mkdir()
        for path in source.iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                (folder / name / path.name).write_bytes(path.read_bytes())
        (folder / name / "config.json").write_text(json.dumps(values | more))
        save_file(weights, folder / name / "model.safetensors", {"format": "pt"})
    return folder / "mxfp4", folder / "plain"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_checkpoints(tmp_path_factory.mktemp("mxfp4"))


def expert_weights(folder: Path, shards: Shards | None = None) -> dict[str, torch.Tensor]:
    """In float32, by name."""
    read = {name: tensor for name, tensor in iterate_weights(folder, shards=shards) if ".experts." in name}
    if not any(name.endswith("weight_scale") for name in read):
        return read
    return {
        name: dequantize(weight, read[f"{name}_scale"], None, SCHEME)
        for name, weight in read.items()
        if name.endswith(".weight")
    }


def test_values_are_those_of_transformers(checkpoints: tuple[Path, Path]) -> None:
    """Exactly, for every expert and matrix."""
    ours, theirs = (expert_weights(folder) for folder in checkpoints)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_rank_reads_its_part(checkpoints: tuple[Path, Path]) -> None:
    config = read_config(checkpoints[0])
    assert config.moe is not None
    experts = in_order(len(config.moe_layers), config.moe.num_experts, config.moe.num_experts)
    for rank in range(2):
        shards = Shards(config, rank, 2, 2, experts)
        ours, theirs = (expert_weights(folder, shards) for folder in checkpoints)
        assert len(ours) == len(config.moe_layers) * config.moe.num_experts // 2 * 3
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_cut_group_is_refused(checkpoints: tuple[Path, Path]) -> None:
    shards = Shards(read_config(checkpoints[0]), 0, 2)
    with pytest.raises(ValueError, match=r"down_proj is cut into 2 parts of 48 inputs, which cuts a group"):
        expert_weights(checkpoints[0], shards)


def test_answers_are_those_of_the_dequantized_model(checkpoints: tuple[Path, Path]) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4, "return_logprob": True}
    first, second = (
        LLM(str(folder), max_total_tokens=256).generate("Count from 3 to 9.", **options)
        for folder in checkpoints
    )
    assert first.text == second.text
    pairs = zip(first.output_logprobs, second.output_logprobs)
    assert all(a.logprob == pytest.approx(b.logprob, abs=1e-4) for a, b in pairs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, name: t.pop(f"{name}_scales"), r"down_proj_scales is missing"),
        (lambda t, name: t.update({f"{name}_scales": t[f"{name}_scales"][:, 1:].clone()}), r"not U8 \["),
        (lambda t, name: t[f"{name}_scales"][1].fill_(255), r"down_proj_scales has scales that are NaN"),
    ],
)
def test_damaged_checkpoints(
    checkpoints: tuple[Path, Path], tmp_path: Path, change: Any, message: str
) -> None:
    folder = checkpoints[0]
    tensors = load_file(folder / "model.safetensors")
    change(tensors, f"{EXPERTS.format(0)}.down_proj")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        list(iterate_weights(tmp_path))


def test_rounding_is_to_the_nearest_value() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    parts = quantize_weight(weight, SCHEME)
    rounded = dequantize(parts["weight"], parts["weight_scale"], None, SCHEME)
    scale = torch.ldexp(torch.ones(()), parts["weight_scale"].int() - 127).repeat_interleave(32, 1)
    distances = (weight[..., None] / scale[..., None] - torch.tensor(FP4_VALUES)).abs()
    assert torch.allclose((weight - rounded).abs() / scale, distances.amin(-1), atol=1e-6)
    assert torch.equal(dequantize(**_kwargs(quantize_weight(rounded, SCHEME))), rounded)


def _kwargs(parts: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"weight": parts["weight"], "scale": parts["weight_scale"], "zero": None, "scheme": SCHEME}
