"""Checkpoints whose experts have static scales of inputs: log-probabilities as computed by hand, ranks."""

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
from diptych.shared.interfaces.quantized_experts import QuantizedExperts
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.loading.weights import dummy_weights, iterate_weights
from tests.parallel.tiny_ranks import QWEN3_MOE

TINY = ASSETS / "tiny-moe"
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["self_attn"]}
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False},
}
INT8 = {
    "quant_method": "compressed-tensors",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {"group_0": GROUP},
}
MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}
FLAGS: dict[str, Any] = {"panel": "reference", "device": "cpu", "dtype": "float32", "max_total_tokens": 512}
OPTIMIZED = {"panel": "optimized", "use": {"attention": "reference"}, "disable_cuda_graph": True}
MOVING = {"ep": 2, "ep_num_redundant_experts": 2, "eplb_rebalance_num_iterations": 4}
Tensors = dict[str, torch.Tensor]


def rounded(values: torch.Tensor, scale: torch.Tensor, is_fp8: bool) -> torch.Tensor:
    if is_fp8:
        return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (values / scale).round().clamp(-128, 127).to(torch.int8)


def quantized(weights: Tensors, is_fp8: bool) -> Tensors:
    """Experts in 8 bits. The scale of the inputs of an expert is up to 100 times that of another one, and
    that of up is larger than that of gate in every second expert."""
    found = dict(weights)
    for name, weight in weights.items():
        match = re.search(r"experts\.(\d+)\.(\w+)_proj\.weight", name)
        if match is not None:
            expert, part = int(match[1]), match[2]
            scale = weight.abs().amax() / 448 if is_fp8 else weight.abs().amax(1, keepdim=True) / 127
            factor = {"gate": 1.0, "up": 1.5 if expert % 2 else 0.5, "down": 3.0}[part]
            found[name], found[f"{name}_scale"] = rounded(weight, scale, is_fp8), scale
            found[name.replace("weight", "input_scale")] = torch.tensor(factor * 100 ** (expert / 7) / 1000)
    return found


def write(folder: Path, quantization: dict[str, Any]) -> Tensors:
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    config = json.loads((TINY / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    plain = {name: tensor.float() for name, tensor in iterate_weights(TINY)}
    stored = quantized(plain, quantization is FP8)
    save_file(stored, folder / "model.safetensors")
    return stored


def run_by_hand(stored: Tensors, layer: str, x: torch.Tensor, topk: Any) -> torch.Tensor:
    """The experts of a layer, a token and an expert at a time."""
    y = torch.zeros_like(x)
    for t, k in topk.topk_ids.ge(0).nonzero().tolist():
        names = [f"{layer}.{topk.topk_ids[t, k]}.{part}_proj" for part in MIXTRAL]
        gate, up, down = (stored[f"{n}.weight"].float() * stored[f"{n}.weight_scale"] for n in names)
        of_gate, of_up, of_down = (stored[f"{n}.input_scale"] for n in names)
        is_fp8, of_x = stored[f"{names[0]}.weight"].dtype != torch.int8, torch.maximum(of_gate, of_up)
        token = rounded(x[t], of_x, is_fp8).float() * of_x
        act = torch.nn.functional.silu(gate @ token) * (up @ token)
        y[t] += topk.topk_weights[t, k] * (down @ (rounded(act, of_down, is_fp8).float() * of_down))
    return y


def logprobs(folder: Path, by_hand: Tensors | None = None, **flags: Any) -> torch.Tensor:
    """Those of a prompt and of its answer."""
    llm = LLM(str(folder), **FLAGS | flags)
    for name, module in llm.assembly.model.named_modules() if by_hand is not None else ():
        if isinstance(module, QuantizedExperts):
            module.forward = lambda *args, name=name: run_by_hand(by_hand, name, *args)  # type: ignore[method-assign,misc]
    sampling = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "progress": False}
    output = llm.generate("What is 12 + 30?", return_logprob=True, logprob_start_len=0, **sampling)
    given = [*output.input_logprobs, *output.output_logprobs]
    return torch.tensor([each.logprob for each in given if each.logprob is not None])


@pytest.mark.parametrize("quantization", [FP8, INT8], ids=["fp8", "int8"])
def test_both_panels_compute_what_a_loop_does(quantization: dict[str, Any], tmp_path: Path) -> None:
    expected = logprobs(tmp_path, write(tmp_path, quantization))
    torch.testing.assert_close(logprobs(tmp_path), expected, atol=1e-3, rtol=1e-3)
    if INTERPRETED and quantization is FP8:
        torch.testing.assert_close(logprobs(tmp_path, **OPTIMIZED), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("flags", [MOVING, pytest.param({}, marks=pytest.mark.full)], ids=["ep", "tp"])
def test_processes_answer_as_one(flags: dict[str, Any], tmp_path: Path) -> None:
    """Over gloo. With ep, experts move with their scales."""
    write(tmp_path, FP8)
    torch.testing.assert_close(logprobs(tmp_path, tp=2, **flags), logprobs(tmp_path), atol=1e-3, rtol=1e-3)


def test_mixtral_has_other_names(tmp_path: Path) -> None:
    config = QWEN3_MOE | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config["num_local_experts"] = config.pop("num_experts")
    (tmp_path / "config.json").write_text(json.dumps(config))
    stored = quantized(dict(dummy_weights(read_config(tmp_path))), is_fp8=True)
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    theirs = {
        re.sub(r"\.(\w+)_proj\.(?=weight|input)", lambda m: f".{MIXTRAL.get(m[1], f'{m[1]}_proj')}.",
               name).replace(".mlp.", ".block_sparse_moe."): tensor
        for name, tensor in stored.items()
    }  # fmt: skip
    save_file(theirs, tmp_path / "model.safetensors")
    found = dict(iterate_weights(tmp_path))
    for name, tensor in stored.items():
        if name.endswith("input_scale"):
            assert torch.equal(found[name], tensor.reshape(1)), name
