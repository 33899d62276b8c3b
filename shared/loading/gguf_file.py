"""Writes a checkpoint as one GGUF file, which llama.cpp reads: weights, shape, tokenizer and chat template.

Needs the package `gguf` (`pip install 'diptych[gguf]'`), which knows the layout of the file, the names of
metadata and tensors, and the rounding of Q8_0. Vectors and the router stay in float32, as llama.cpp needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diptych.shared.config import read_config
from diptych.shared.config.hf_config import read_json
from diptych.shared.loading.gguf_tokenizer import QWEN_SPLIT
from diptych.shared.loading.weights import Weights, iterate_weights

ARCHITECTURES = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe"}
"""Architecture in config.json -> its name in GGUF. For these families llama.cpp rotates halves of a head, as
the checkpoint does. In a Llama model it rotates neighbours, so rows would have to be permuted."""

FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
"""Format of the matrices -> the file type in the metadata."""

BUILTIN_SPLIT = r"[ ]?\p{L}+|\p{N}|[ ]?[^\s\p{L}\p{N}]+|[\r\n]+|\s+"
PRE_TOKENIZERS = {QWEN_SPLIT: "qwen2", BUILTIN_SPLIT: "deepseek-v3"}
"""Regex of tokenizer.json -> the pre-tokenizer of llama.cpp, which has a fixed list and takes no regex. The
list does not include that of the built-in models. The one named here keeps groups together that the regex
separates, which changes no id, because no merge of the vocabulary joins them. It separates one case that the
regex keeps together: the last of several spaces before a word is part of the word."""

_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)(\.\w+\.weight)")


def write_gguf(
    source: Path, output: Path, dtype: str, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the checkpoint in `source` to the file `output`, its matrices in `dtype`, a key of `FILE_TYPES`.

    Raises `ValueError` for a format, architecture, RoPE or tokenizer that is not supported, a quantized or
    damaged checkpoint, weights beyond the range of float16, and an `output` that exists; `ImportError`
    without the package."""
    if dtype not in FILE_TYPES:
        raise ValueError(f"no format {dtype!r} of a GGUF file; there are {', '.join(FILE_TYPES)}")
    if output.exists():
        raise ValueError(f"{output} exists; name a new file")
    try:
        import gguf
    except ImportError:
        raise ImportError("a GGUF file needs the package gguf: pip install 'diptych[gguf]'") from None
    config = read_config(source)
    arch = ARCHITECTURES.get(config.architecture)
    if arch is None:
        raise ValueError(f"no GGUF of {config.architecture}; there are {', '.join(ARCHITECTURES)}")
    if config.quantization is not None:
        raise ValueError(f"{source} is quantized; a GGUF file is written from an unquantized checkpoint")
    tokenizer = read_tokenizer(source, config.vocab_size)
    description = read_json(source / "config.json")
    weights = iterate_weights(source, config, on_progress)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f"{output.name}.unfinished")
    writer = gguf.GGUFWriter(unfinished, arch, use_temp_file=True)
    try:
        writer.add_name(source.name)
        writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[dtype]])
        _add_shape(writer, description)
        _add_tokenizer(writer, tokenizer, source)
        _add_tensors(writer, weights, arch, description, dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        unfinished.rename(output)
    finally:
        unfinished.unlink(missing_ok=True)


def _add_shape(writer: Any, description: dict[str, Any]) -> None:
    """Add the numbers of config.json under GGUF's names."""
    rope = description.get("rope_parameters") or description.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"no GGUF of a model whose RoPE is scaled: {rope}")
    if description.get("use_sliding_window"):
        raise ValueError("no GGUF of a model with sliding windows")
    heads = description["num_attention_heads"]
    head_dim = description.get("head_dim") or description["hidden_size"] // heads
    writer.add_block_count(description["num_hidden_layers"])
    writer.add_context_length(description["max_position_embeddings"])
    writer.add_embedding_length(description["hidden_size"])
    writer.add_feed_forward_length(description["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(description["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(description.get("rope_theta") or rope["rope_theta"])
    writer.add_layer_norm_rms_eps(description["rms_norm_eps"])
    if "num_experts" in description:
        if not description.get("norm_topk_prob") or description.get("mlp_only_layers"):
            raise ValueError("no GGUF of experts without norm_topk_prob, or of dense layers between them")
        writer.add_expert_count(description["num_experts"])
        writer.add_expert_used_count(description["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(description["moe_intermediate_size"])


def read_tokenizer(source: Path, vocab_size: int) -> dict[str, Any]:
    """tokenizer.json as GGUF stores a byte-level BPE: `tokens` and `types` [vocab_size], `merges`, `pre`.
    Rows of the embedding without a token get a name of their own and the type UNUSED."""
    from gguf import TokenType

    data = read_json(source / "tokenizer.json")
    model, pre_tokenizer = data["model"], data.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step.get("type") for step in steps]
    if model.get("type") != "BPE" or kinds != ["Split", "ByteLevel"]:
        raise ValueError(
            f"{source}: GGUF is written for a byte-level BPE after one split; "
            f"found {model.get('type')}, {kinds}"
        )
    regex = steps[0]["pattern"].get("Regex")
    if regex not in PRE_TOKENIZERS:
        raise ValueError(f"{source}: no pre-tokenizer of llama.cpp is known for the regex {regex!r}")
    tokens = [f"[PAD{token_id}]" for token_id in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    for token, token_id in model["vocab"].items():
        tokens[token_id], types[token_id] = token, TokenType.NORMAL
    for added in data["added_tokens"]:
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], kind
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return {"tokens": tokens, "types": types, "merges": merges, "pre": PRE_TOKENIZERS[regex]}


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], source: Path) -> None:
    writer.add_tokenizer_model("gpt2")  # GGUF's name of a byte-level BPE
    writer.add_tokenizer_pre(tokenizer["pre"])
    writer.add_token_list(tokenizer["tokens"])
    writer.add_token_types(tokenizer["types"])
    writer.add_token_merges(tokenizer["merges"])
    writer.add_add_bos_token(False)
    settings = read_json(source / "tokenizer_config.json")
    for name, add in (("eos_token", writer.add_eos_token_id), ("pad_token", writer.add_pad_token_id)):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            add(tokenizer["tokens"].index(token))
    template = source / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
    if text is not None:
        writer.add_chat_template(text)


def _add_tensors(writer: Any, weights: Weights, arch: str, description: dict[str, Any], dtype: str) -> None:
    """Add every weight under GGUF's name. The experts of a layer and matrix are one tensor [experts, out,
    in]."""
    import gguf

    of_arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(of_arch, description["num_hidden_layers"])
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in weights:
        if match := _EXPERT.fullmatch(name):
            name = match[1] + match[3]
            found = experts.setdefault(name, {})
            found[int(match[2])] = tensor
            if len(found) < description["num_experts"]:
                continue
            tensor = torch.stack([expert for _, expert in sorted(experts.pop(name).items())])
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise ValueError(f"no name in GGUF for {name} of {arch}")
        is_plain = tensor.ndim == 1 or "ffn_gate_inp" in stored
        kind = gguf.GGMLQuantizationType["F32" if is_plain else dtype.upper()]
        writer.add_tensor(stored, _rounded(tensor, kind, name), raw_dtype=kind)


def _rounded(tensor: torch.Tensor, kind: Any, name: str) -> np.ndarray:
    """The values as GGUF stores them: float32, float16, or bytes [..., bytes of a row]."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import quantize

    block, _ = GGML_QUANT_SIZES[kind]
    if tensor.shape[-1] % block:
        raise ValueError(
            f"{name}: rows of {tensor.shape[-1]} values are not a multiple of {kind.name}'s {block}"
        )
    values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    if kind.name == "F16" and np.abs(values).max() > np.finfo(np.float16).max:
        raise ValueError(f"{name} holds {np.abs(values).max():.3g}, which float16 cannot; choose bf16 or f32")
    return quantize(values, kind)
