"""A GGUF file as a model folder: config.json and tokenizer from its metadata, and a link to the file, from
which `gguf_weights` reads the tensors.

The folder is in the user's cache and takes a few MB. Its name has a hash of the file's place, size and time,
and of this code, so a change of any makes a new folder."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from diptych.shared.loading.cache_folder import cache_folder, new_folder
from diptych.shared.loading.gguf_tokenizer import tokenizer_files
from diptych.shared.loading.gguf_weights import LINK, open_gguf

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""Name in GGUF -> architecture in config.json."""

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all Llama 3 models. GGUF has the divisors of the frequencies that they make, as a tensor."""


def gguf_folder(file: Path) -> Path:
    """The model folder of a GGUF file. Raises `ValueError` for a damaged file and for what is not supported,
    `ImportError` without the package `gguf`, `OSError` if the cache cannot be written."""
    file = file.resolve()
    stat = file.stat()
    digest = hashlib.blake2b(f"{file} {stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=8)
    for name in ("gguf_folder.py", "gguf_tokenizer.py"):
        digest.update((Path(__file__).parent / name).read_bytes())
    folder = cache_folder() / f"{file.stem}-gguf-{digest.hexdigest()}"
    if folder.is_dir():
        return folder
    reader = open_gguf(file)
    values = {name: field.contents() for name, field in reader.fields.items()}
    files = {"config.json": json.dumps(config_of(values, reader, file)), **tokenizer_files(values, file)}
    with new_folder(folder) as temporary:
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8")
        (temporary / LINK).symlink_to(file)
    return folder


def config_of(values: dict[str, Any], reader: Any, file: Path) -> dict[str, Any]:
    """config.json, from the metadata and the names of the tensors."""
    arch = values.get("general.architecture")
    if arch not in ARCHITECTURES or values.get("split.count", 0) > 1:
        what = f"architecture {arch!r}" if arch not in ARCHITECTURES else "a file of several parts"
        raise ValueError(f"{file}: {what} is not supported; supported are {', '.join(ARCHITECTURES)}, whole")
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def of(name: str, default: Any = None) -> Any:
        value = values.get(f"{arch}.{name}", default)
        if value is None:
            raise ValueError(f"{file}: {arch}.{name} is missing")
        # A float32, which config.json has as the decimal number that it was.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    if of("attention.sliding_window", 0) or (arch != "qwen3moe" and of("expert_count", 0)):
        raise ValueError(f"{file}: {arch} with sliding windows or experts is not supported")
    rope = _rope(of, tensors, file)
    heads, hidden_size = of("attention.head_count"), of("embedding_length")
    ends = [values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else 0,
        "hidden_size": hidden_size,
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of("attention.head_count_kv", heads),
        "head_dim": of("attention.key_length", hidden_size // heads),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "torch_dtype": _dtype(tensors),
        "eos_token_id": sorted({token_id for token_id in ends if token_id is not None}),
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
    }
    if arch == "qwen3moe":
        config |= {
            "num_experts": of("expert_count"),
            "num_experts_per_tok": of("expert_used_count"),
            "moe_intermediate_size": of("expert_feed_forward_length"),
            "norm_topk_prob": True,  # llama.cpp always does for this family
        }
    return config


def _rope(of: Any, tensors: dict[str, Any], file: Path) -> dict[str, Any]:
    """`rope_parameters`. Raises `ValueError` for a scaling that they cannot express exactly."""
    theta, kind = of("rope.freq_base", 10000.0), of("rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        divisors = [float(each) for each in tensors["rope_freqs.weight"].data]
        rope = {"rope_type": "llama3", "rope_theta": theta, "factor": max(divisors), **LLAMA3}
        expected = llama3_divisors(theta, len(divisors), max(divisors))
        if kind != "none" or not all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(divisors, expected)):
            raise ValueError(f"{file}: rope_freqs.weight is not that of a Llama 3 model")
        return rope
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": of("rope.scaling.factor")}
    if kind != "none":
        raise ValueError(f"{file}: RoPE scaling {kind!r} is not supported; supported are none and linear")
    return {"rope_type": "default", "rope_theta": theta}


def llama3_divisors(theta: float, num: int, factor: float) -> list[float]:
    """What each of `num` frequencies is divided by."""
    low, high, length = LLAMA3.values()
    found = []
    for i in range(num):
        wavelength = 2 * math.pi * theta ** (i / num)
        share = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - share) / factor + share))
    return found


def _dtype(tensors: dict[str, Any]) -> str:
    """F32 and F16 as they are; bfloat16 for quantized matrices."""
    stored = tensors.get("blk.0.attn_output.weight")
    name = stored.tensor_type.name if stored is not None else ""
    return {"F32": "float32", "F16": "float16"}.get(name, "bfloat16")
