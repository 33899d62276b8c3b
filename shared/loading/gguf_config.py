"""config.json from the metadata of a GGUF file. A key of the architecture that nothing reads is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from diptych.shared.loading.gguf_names import GGUF_FAMILIES
from diptych.shared.loading.gguf_reader import Gguf

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all Llama 3 models. GGUF has the divisors of the frequencies that they make, as a tensor."""

WITHOUT_EFFECT = (
    *("vocab_size", "attention.value_length", "tensor_data_layout"),
    *("rope.scaling.finetuned", "rope.scaling.original_context_length"),
)
"""Keys that say what the tensors say, or belong to a scaling that reads them itself."""

WINDOW_EVERY = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}
"""The layer without a window, where the file does not say it."""

ENDS = {
    "gemma2": ("<end_of_turn>",),
    "gemma3": ("<end_of_turn>",),
    "phi3": ("<|end|>", "<|endoftext|>"),
    "gpt-oss": ("<|return|>", "<|call|>", "<|endoftext|>"),
}
"""Tokens that end an answer beside those that the file names, which has one or two."""

WIDE_SCALE = {("gemma2", 46), ("gemma3", 62)}
"""The 27B models, by their number of layers. They scale q by hidden_size / heads, and not by head_dim. GGUF
has no key for it."""


class Fields:
    """The keys of the file's architecture."""

    def __init__(self, values: dict[str, Any], file: Path) -> None:
        self.arch, self.values, self.file = values["general.architecture"], values, file
        self._read = set(WITHOUT_EFFECT)

    def __call__(self, name: str, default: Any = None) -> Any:
        """Raises `ValueError` for a key that is missing and has no default."""
        self._read.add(name)
        value = self.values.get(f"{self.arch}.{name}", default)
        if value is None:
            raise ValueError(f"{self.file}: {self.arch}.{name} is missing")
        # A float32, which config.json has as the decimal number that it was.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def refuse(self, name: str, *allowed: Any) -> None:
        value = self(name, allowed[0])
        if value not in allowed:
            raise ValueError(f"{self.file}: {self.arch}.{name} is {value!r:.80}, which is not supported")

    def refuse_others(self) -> None:
        names = [
            name.removeprefix(f"{self.arch}.") for name in self.values if name.startswith(f"{self.arch}.")
        ]
        unknown = [f"{self.arch}.{name}" for name in names if name not in self._read]
        if unknown:
            raise ValueError(f"{self.file}: {', '.join(unknown[:5])} is not supported")


def config_of(gguf: Gguf, file: Path) -> dict[str, Any]:
    """Raises `ValueError` for what is missing or not supported."""
    values, tensors = gguf
    arch = values.get("general.architecture")
    if arch not in GGUF_FAMILIES:
        known = ", ".join(GGUF_FAMILIES)
        raise ValueError(f"{file}: architecture {arch!r} is not supported; supported are {known}")
    of = Fields(values, file)
    heads, hidden_size = of("attention.head_count"), of("embedding_length")
    head_dim = of("attention.key_length", hidden_size // heads)
    config = {
        "architectures": [GGUF_FAMILIES[arch].architecture],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else 0,
        "hidden_size": hidden_size,
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": _dtype(tensors),
        "eos_token_id": _ends(values, arch),
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        **_rope(of, tensors, head_dim),
        **_windows(of),
        **_mlp(of),
    }
    if arch in ("gemma2", "gemma3"):
        wide = (arch, config["num_hidden_layers"]) in WIDE_SCALE
        config["query_pre_attn_scalar"] = hidden_size // heads if wide else head_dim
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            cap = of(key, 0.0) if key.startswith("final") or arch == "gemma2" else 0.0
            config[key] = cap or None
    of.refuse_others()
    return config


def _mlp(of: Fields) -> dict[str, Any]:
    if of.arch not in ("qwen3moe", "gpt-oss"):
        of.refuse("expert_count", 0)
        of.refuse("expert_used_count", 0)
        return {"intermediate_size": of("feed_forward_length")}
    of.refuse("expert_weights_norm", True)
    config = {"num_experts": of("expert_count"), "num_experts_per_tok": of("expert_used_count")}
    size = of("expert_feed_forward_length")
    if of.arch == "gpt-oss":
        of("feed_forward_length", size)
        return config | {"intermediate_size": size}
    # llama.cpp normalizes the weights of this family's experts, whatever the file says.
    sizes = {"intermediate_size": of("feed_forward_length"), "moe_intermediate_size": size}
    return config | sizes | {"norm_topk_prob": True}


def _windows(of: Fields) -> dict[str, Any]:
    """Raises `ValueError` for a window in an architecture that has none here."""
    window = of("attention.sliding_window", 0)
    if of.arch == "phi3":
        return {"sliding_window": window or None}
    if of.arch not in WINDOW_EVERY:
        of.refuse("attention.sliding_window", 0)
        return {}
    every = of("attention.sliding_window_pattern", WINDOW_EVERY[of.arch])
    if isinstance(every, list):
        kinds = {True: "sliding_attention", False: "full_attention"}
        return {"sliding_window": window or None, "layer_types": [kinds[bool(each)] for each in every]}
    return {"sliding_window": window or None, "sliding_window_pattern": every}


def _rope(of: Fields, tensors: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Raises `ValueError` for a scaling that a config.json cannot express exactly."""
    theta = of("rope.freq_base", 1e6 if of.arch == "gemma3" else 10000.0)
    rope = {"rope_theta": theta, **_scaling(of, tensors, theta)}
    config: dict[str, Any] = {"rope_parameters": rope}
    if of.arch == "phi3":
        rope["partial_rotary_factor"] = of("rope.dimension_count", head_dim) / head_dim
    else:
        of.refuse("rope.dimension_count", head_dim)
    if of.arch == "gemma3":
        config["rope_local_base_freq"] = of("rope.freq_base_swa", 10000.0)
    elif of.arch in WINDOW_EVERY:
        of.refuse("rope.freq_base_swa", theta)
    return config


def _scaling(of: Fields, tensors: dict[str, Any], theta: float) -> dict[str, Any]:
    kind = of("rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        of.refuse("rope.scaling.type", "none")
        return _llama3(tensors["rope_freqs.weight"].data, theta, of.file)
    if "rope_factors_long.weight" in tensors:
        of.refuse("rope.scaling.type", "none", "longrope")
        return _longrope(of, tensors)
    if kind == "linear":
        return {"rope_type": "linear", "factor": of("rope.scaling.factor")}
    if kind == "yarn":
        rope = {"rope_type": "yarn", "factor": of("rope.scaling.factor"), "truncate": of.arch != "gpt-oss"}
        rope["original_max_position_embeddings"] = of("rope.scaling.original_context_length")
        rope["beta_fast"] = of("rope.scaling.yarn_beta_fast", 32.0)
        rope["beta_slow"] = of("rope.scaling.yarn_beta_slow", 1.0)
        rope["attention_factor"] = of("rope.scaling.yarn_attn_factor", 0.0) or None
        return rope
    of.refuse("rope.scaling.type", "none")
    return {"rope_type": "default"}


def _longrope(of: Fields, tensors: dict[str, Any]) -> dict[str, Any]:
    """Phi-3's two sets of divisors."""
    divisors = {}
    for key in ("long", "short"):
        if (tensor := tensors.get(f"rope_factors_{key}.weight")) is None:
            raise ValueError(f"{of.file}: rope_factors_{key}.weight is missing")
        divisors[f"{key}_factor"] = [float(str(each)) for each in tensor.data]
    return {
        "rope_type": "longrope",
        **divisors,
        "original_max_position_embeddings": of("rope.scaling.original_context_length"),
        "attention_factor": of("rope.scaling.attn_factor", 0.0) or None,
    }


def _llama3(data: Any, theta: float, file: Path) -> dict[str, Any]:
    divisors = [float(each) for each in data]
    expected = llama3_divisors(theta, len(divisors), max(divisors))
    if not all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(divisors, expected)):
        raise ValueError(f"{file}: rope_freqs.weight is not that of a Llama 3 model")
    return {"rope_type": "llama3", "factor": max(divisors), **LLAMA3}


def llama3_divisors(theta: float, num: int, factor: float) -> list[float]:
    """What each of `num` frequencies is divided by."""
    low, high, length = LLAMA3.values()
    found = []
    for i in range(num):
        wavelength = 2 * math.pi * theta ** (i / num)
        share = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - share) / factor + share))
    return found


def _ends(values: dict[str, Any], arch: str) -> list[int]:
    ids = {values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    if arch in ENDS:
        tokens = values.get("tokenizer.ggml.tokens") or []
        ids |= {token_id for token_id, token in enumerate(tokens) if token in ENDS[arch]}
    return sorted(token_id for token_id in ids if token_id is not None)


def _dtype(tensors: dict[str, Any]) -> str:
    """F32 and F16 as they are; bfloat16 for quantized matrices."""
    stored = tensors.get("blk.0.attn_output.weight")
    name = stored.tensor_type.name if stored is not None else ""
    return {"F32": "float32", "F16": "float16"}.get(name, "bfloat16")
