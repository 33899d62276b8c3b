"""Checkpoints whose experts have static scales of inputs: logits as computed by hand, on ranks too."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diptych import LLM
from diptych.optimized.kernels.portable import INTERPRETED
from diptych.shared.config import read_config
from diptych.shared.interfaces import TopKOutput
from diptych.shared.interfaces.quantized_experts import QuantizedExperts
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.loading.weights import dummy_weights, iterate_weights
from tests.parallel.tiny_ranks import QWEN3_MOE

TINY = ASSETS / "tiny-moe"
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["self_attn"]}
INT8 = {
    "quant_method": "compressed-tensors",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False},
        }
    },
}
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
FLAGS: dict[str, Any] = {"panel": "reference", "device": "cpu", "dtype": "float32", "max_total_tokens": 512}
PROMPT = "What is 12 + 30?"
Tensors = dict[str, torch.Tensor]


def rounded(values: torch.Tensor, scale: torch.Tensor, is_fp8: bool) -> torch.Tensor:
    if is_fp8:
        return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (values / scale).round().clamp(-128, 127).to(torch.int8)


def quantized(weights: Tensors, is_fp8: bool) -> Tensors:
    """Experts in 8 bits. The scale of the inputs of an expert is up to 100 times that of another one, and
    larger for up than for gate in every second expert."""
    found: Tensors = {}
    for name, weight in weights.items():
        match = re.search(r"experts\.(\d+)\.(\w+)_proj\.weight", name)
        if match is None:
            found[name] = weight
            continue
        expert, part = int(match[1]), match[2]
        of_tensor, of_rows = weight.abs().amax() / 448, weight.abs().amax(1, keepdim=True) / 127
        scale = of_tensor if is_fp8 else of_rows
        factor = {"gate": 1.0, "up": 1.5 if expert % 2 else 0.5, "down": 3.0}[part]
        found[name] = rounded(weight, scale, is_fp8)
        found[f"{name}_scale"] = scale
        found[name.replace("weight", "input_scale")] = torch.tensor(factor * 100 ** (expert / 7) / 1000)
    return found


def write(folder: Path, quantization: dict[str, Any]) -> Tensors:
    for name in {path.name for path in TINY.iterdir()} - {"model.safetensors"}:
        shutil.copy(TINY / name, folder)
    config = json.loads((TINY / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    plain = {name: tensor.float() for name, tensor in iterate_weights(TINY)}
    stored = quantized(plain, quantization is FP8)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return stored


def run_by_hand(stored: Tensors, layer: str, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
    """The experts of a layer, a token and an expert at a time."""

    def matrix(expert: int, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        name = f"{layer}.{expert}.{part}_proj"
        weight = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"]
        return weight, stored[f"{name}.input_scale"]

    def fake(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        is_fp8 = stored[f"{layer}.0.up_proj.weight"].dtype == torch.float8_e4m3fn
        return rounded(values, scale, is_fp8).float() * scale

    y = torch.zeros_like(x)
    for t, (factors, ids) in enumerate(zip(topk.topk_weights, topk.topk_ids.tolist())):
        for factor, expert in zip(factors, ids):
            if expert < 0:
                continue
            (gate, of_gate), (up, of_up), (down, of_down) = (
                matrix(expert, p) for p in ("gate", "up", "down")
            )
            token = fake(x[t], torch.maximum(of_gate, of_up))
            act = torch.nn.functional.silu(gate @ token) * (up @ token)
            y[t] += factor * (down @ fake(act, of_down))
    return y


def logprobs(llm: LLM, max_tokens: int = 12) -> tuple[list[int], torch.Tensor]:
    output = llm.generate(
        PROMPT, temperature=0, max_tokens=max_tokens, ignore_eos=True, return_logprob=True,
        logprob_start_len=0, progress=False,
    )  # fmt: skip
    given = [*output.input_logprobs, *output.output_logprobs]
    return output.output_ids, torch.tensor([each.logprob for each in given if each.logprob is not None])


def answer_by_hand(folder: Path, stored: Tensors, **asked: Any) -> tuple[list[int], torch.Tensor]:
    llm = LLM(str(folder), **FLAGS)
    for name, module in llm.assembly.model.named_modules():
        if isinstance(module, QuantizedExperts):
            module.forward = lambda x, topk, name=name: run_by_hand(stored, name, x, topk)  # type: ignore[method-assign]
    return logprobs(llm, **asked)


@pytest.mark.parametrize("quantization", [FP8, INT8], ids=["fp8", "int8"])
def test_logits_are_those_of_a_loop_by_hand(quantization: dict[str, Any], tmp_path: Path) -> None:
    stored = write(tmp_path, quantization)
    ids, expected = answer_by_hand(tmp_path, stored)
    found_ids, found = logprobs(LLM(str(tmp_path), **FLAGS))
    assert found_ids == ids
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    plain = logprobs(LLM("tiny-moe", **FLAGS))[1]
    assert (plain - expected).abs().max() > 1e-2  # the scales are felt


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on CPU tensors")
def test_optimized_logits(tmp_path: Path) -> None:
    stored = write(tmp_path, FP8)
    ids, expected = answer_by_hand(tmp_path, stored, max_tokens=2)
    use = {"attention": "reference", "sampler": "reference"}
    flags = FLAGS | {"panel": "optimized", "disable_cuda_graph": True, "use": use}
    found_ids, found = logprobs(LLM(str(tmp_path), **flags), max_tokens=2)
    assert found_ids == ids
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    "ranks",
    [
        {"ep": 2, "ep_num_redundant_experts": 2, "eplb_rebalance_num_iterations": 4},
        pytest.param({}, marks=pytest.mark.full),
    ],
    ids=["ep", "tp"],
)
def test_ranks_answer_as_one(ranks: dict[str, Any], tmp_path: Path) -> None:
    """Processes over gloo; with ep, experts move with their scales."""
    write(tmp_path, FP8)
    ids, expected = logprobs(LLM(str(tmp_path), **FLAGS))
    found_ids, found = logprobs(LLM(str(tmp_path), tp=2, **ranks, **FLAGS))
    assert found_ids == ids
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_mixtral_has_other_names(tmp_path: Path) -> None:
    config = QWEN3_MOE | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {"num_local_experts": 6, "quantization_config": FP8}
    del config["num_experts"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in config.items() if k != "quantization_config"}))
    stored = quantized(dict(dummy_weights(read_config(tmp_path))), is_fp8=True)
    path.write_text(json.dumps(config))
    theirs = {}
    for name, tensor in stored.items():
        name = name.replace(".mlp.", ".block_sparse_moe.")
        name = re.sub(r"(\.experts\.\d+\.)(\w+_proj)", lambda m: m[1] + MIXTRAL[m[2]], name)
        theirs[name] = tensor.contiguous()
    save_file(theirs, tmp_path / "model.safetensors")
    found = dict(iterate_weights(tmp_path))
    for name, tensor in stored.items():
        if name.endswith("input_scale"):
            assert torch.equal(found[name], tensor.reshape(1)), name
