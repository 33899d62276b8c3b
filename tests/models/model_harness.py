"""A reference model stepped by hand, and its Hugging Face twin."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import diptych.reference.layers
from diptych.reference.models import model_class
from diptych.reference.moe import MoE
from diptych.shared.config import ModelConfig, read_config
from diptych.shared.interfaces import CausalLM
from diptych.shared.loading.weights import iterate_weights
from diptych.shared.tools.conformance.oracles.model_session import ModelSession


def build_model(config: ModelConfig) -> CausalLM:
    return model_class(config.architecture)(config, diptych.reference.layers, MoE)


RIGHT_SINCE = {"minimax_m2": "5.24", "olmo3": "5.24"}
"""Kind of model -> a version of transformers whose model is right; 5.17 computes another one, or fails."""


def has_oracle(hf_config: dict[str, Any]) -> bool:
    """Whether the installed transformers computes the model as published."""
    return Version(transformers.__version__) >= Version(RIGHT_SINCE.get(hf_config["model_type"], "5.0"))


def random_hf_model(hf_config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """Weights so large that logits lie far apart: their spread is a few units, so that rounding (1e-5) does
    not decide which token is the best."""
    if not has_oracle(hf_config):
        kind = hf_config["model_type"]
        pytest.skip(f"the oracle of {kind} is transformers {RIGHT_SINCE[kind]} or later")
    config = AutoConfig.for_model(**deepcopy(hf_config))  # it completes nested dicts in place
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.config._experts_implementation = "eager"  # its grouped GEMM takes whole 16 bytes only
    for module in model.modules():
        if hasattr(module, "limit"):  # transformers 5.17 ignores the config
            module.limit = hf_config.get("swiglu_limit", module.limit)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
            else:
                std = 0.3 if "embed" in name or "lm_head" in name else 1.5 * parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, std, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3, generator=generator)
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2, generator=generator)
    return model


def load_saved(hf_model: PreTrainedModel, folder: Path) -> CausalLM:
    """Through the files that transformers writes."""
    hf_model.save_pretrained(folder)
    config = read_config(folder)
    model = build_model(config)
    model.load_weights(iterate_weights(folder, config))
    return model


def greedy(
    model: CausalLM, prompt: list[int], num_new: int, chunks: Sequence[int] = ()
) -> tuple[list[int], torch.Tensor]:
    """The next `num_new` tokens, and the logits of every position on the way. `chunks` cuts the prompt into
    pieces of these lengths and the rest."""
    session = ModelSession(model, max_len=len(prompt) + num_new)
    logits = [session.step({0: chunk})[0] for chunk in cut(prompt, chunks)]
    output_ids: list[int] = []
    while len(output_ids) < num_new:
        output_ids.append(int(logits[-1][-1].argmax()))
        logits.append(session.step({0: output_ids[-1:]})[0])
    return output_ids, torch.cat(logits)


def hf_greedy(
    model: PreTrainedModel, prompt: list[int], num_new: int, chunks: Sequence[int] = ()
) -> tuple[list[int], torch.Tensor]:
    """The same with transformers and its KV cache."""
    logits, cache = [], None
    output_ids: list[int] = []

    def forward(ids: Sequence[int]) -> None:
        nonlocal cache
        with torch.inference_mode():
            out = model(torch.tensor([list(ids)], device=model.device), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits[0])

    for chunk in cut(prompt, chunks):
        forward(chunk)
    while len(output_ids) < num_new:
        output_ids.append(int(logits[-1][-1].argmax()))
        forward(output_ids[-1:])
    return output_ids, torch.cat(logits)


def cut(prompt: list[int], chunks: Sequence[int]) -> list[list[int]]:
    pieces, start = [], 0
    for length in chunks:
        pieces.append(prompt[start : start + length])
        start += length
    return [*pieces, prompt[start:]]
