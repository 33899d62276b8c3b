"""GGUF files for tests: written with the package `gguf`, as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")  # a package of the tests, which a computer with a GPU may not have

from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize

from diptych import LLM


def write_file(file: Path, arch: str, values: dict[str, Any], tensors: dict[str, Any], **split: Any) -> None:
    """`values`: of metadata, by full name. `tensors`: arrays, or pairs of bytes and their type."""
    writer = GGUFWriter(file, arch, **split)
    for name, value in values.items():
        kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        kinds |= {float: writer.add_float32, list: writer.add_array}
        kinds[type(value)](name, value)
    for name, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(name, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(model: Any, arch: str, expert_type: str = "F32") -> dict[str, Any]:
    """The tensors of a model of transformers. With a quantized `expert_type` the model gets the experts that
    are stored."""
    of_arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(of_arch, model.config.num_hidden_layers)
    found = {}
    for name, value in _separate(model, arch, expert_type):
        if name.endswith("norm.weight") and arch in ("gemma2", "gemma3"):
            value = value + 1
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is not None:
            assert stored not in found
            found[stored] = value
    return found


def _separate(model: Any, arch: str, expert_type: str) -> Any:
    """Weights as the converter names them; GPT-OSS's packed experts one below the other."""
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name == "lm_head.weight" and tied:
            continue
        if name.endswith(".sinks"):
            name += ".weight"
        if arch != "gpt-oss" or ".experts." not in name:
            yield name, values
            continue
        parent, _, matrix = name.rpartition(".")
        kind = "bias" if matrix.endswith("_bias") else "weight"
        rows = values if kind == "bias" else values.swapaxes(1, 2)
        parts = {"down_proj": rows}
        if matrix.startswith("gate_up"):
            parts = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]}
        for proj, part in parts.items():
            if kind == "weight" and expert_type != "F32":
                wanted = GGMLQuantizationType[expert_type]
                data = quantize(np.ascontiguousarray(part), wanted)
                part[:] = dequantize(data, wanted).reshape(part.shape)  # in the model
                yield f"{parent}.{proj}.weight", (data, wanted)
            else:
                yield f"{parent}.{proj}.{kind}", part


def same_logits(model: Any, file: Path) -> None:
    """Log-probabilities of every position, and greedy tokens."""
    llm = LLM(str(file), panel="reference", dtype="float32")
    prompt = [7, 3, 90, 41, 41, 2, 66, 15, 30, 8, 77, 51]
    out = llm.generate(
        prompt, temperature=0, max_tokens=6, return_logprob=True, logprob_start_len=0, ignore_eos=True
    )
    with torch.inference_mode():
        logprobs = model(torch.tensor([[*prompt, *out.output_ids]])).logits[0].log_softmax(-1)
    assert out.output_ids == logprobs[len(prompt) - 1 : -1].argmax(-1).tolist()
    ours = torch.tensor([each.logprob for each in [*out.input_logprobs[1:], *out.output_logprobs]])
    ids = torch.tensor([*prompt, *out.output_ids])
    torch.testing.assert_close(ours, logprobs[:-1].gather(1, ids[1:, None])[:, 0], rtol=0, atol=1e-4)


SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 96}
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{each}_proj": f"attn_{each}" for each in "qkv"}, "self_attn.o_proj": "attn_output",
    **{f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def llama(tmp_path: Path, matrices: Any, **changes: Any) -> tuple[Any, Path, dict[str, torch.Tensor]]:
    """A random Llama of transformers, and a GGUF file of it. `matrices(writer, name, values)` adds a matrix
    and returns what is stored; the result has that as weights of the model."""
    from gguf import GGUFWriter
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    rope = changes.pop("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope, tie_word_embeddings=False))
    file, weights = tmp_path / "llama.gguf", {}
    writer = GGUFWriter(file, "llama")
    for name, value in {
        "block_count": 2, "context_length": 128, "embedding_length": 256, "feed_forward_length": 512,
        "attention.head_count": 4, "attention.head_count_kv": 2,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", model.config.rms_norm_eps)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    for name, value in changes.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(name.replace("__", "."), value)
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        _, _, index, part = (*stem.split(".", 3), "", "", "")[:4]
        stored = TOP.get(stem) or f"blk.{index}.{LAYER[part]}"
        values = tensor.float().numpy()
        if heads := {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(part):  # as convert_hf_to_gguf.py
            values = values.reshape(heads, 2, 32, 256).swapaxes(1, 2).reshape(values.shape)
        if values.ndim == 1:
            writer.add_tensor(f"{stored}.weight", values)
        else:
            values = matrices(writer, f"{stored}.weight", values)
        if heads:
            values = values.reshape(heads, 32, 2, 256).swapaxes(1, 2).reshape(values.shape)
        weights[name] = torch.tensor(values)
    if rope["rope_type"] == "llama3":
        inverse = 10000.0 ** (-np.arange(0, 64, 2) / 64)
        divisors = inverse / model.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(weights)
    return model.eval(), file, weights


def as_type(kind: str) -> Any:
    """Matrices in this type. Of the types that the package cannot write the bytes are random, but the scales,
    which are float16, are small."""

    def add(writer: Any, name: str, values: np.ndarray) -> np.ndarray:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize, quantize

        wanted = GGMLQuantizationType[kind]
        try:
            data = quantize(values, wanted)
        except NotImplementedError:
            block, size = GGML_QUANT_SIZES[wanted]
            rng = np.random.default_rng(len(name))
            data = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size), np.uint8)
            scales = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0, 2))
            for start in scales:
                data[..., start : start + 2] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
            data = data.reshape(*values.shape[:-1], -1)
        writer.add_tensor(name, data, raw_dtype=wanted)
        return dequantize(data, wanted).reshape(values.shape)

    return add
