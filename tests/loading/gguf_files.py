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
