"""GGUF files of `diptych convert`: the weights of the checkpoint, in a form that other libraries read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from diptych.shared.loading.gguf_file import FILE_TYPES, read_tokenizer, write_gguf
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.tools.cli import app

WORST = {"f32": 0.0, "bf16": 0.0, "f16": 2**-24, "q8_0": 0.5 / 127}
"""Largest error of a matrix, relative to its largest value. The checkpoint is in bfloat16: float16 has the
same digits and more, but below 2^-14 it is spaced by 2^-24. Q8_0 has 127 steps on each side of zero."""


def changed(tmp_path: Path, file: str, **values: Any) -> Path:
    """A copy of the dense built-in model with other values at the top of one of its JSON files."""
    folder = tmp_path / "model"
    shutil.copytree(resolve_model_path("tiny-dense"), folder)
    data = json.loads((folder / file).read_text(encoding="utf-8"))
    (folder / file).write_text(json.dumps(data | values), encoding="utf-8")
    return folder


def read(path: Path) -> Any:
    from gguf import GGUFReader

    return GGUFReader(path)


@pytest.mark.parametrize("dtype", FILE_TYPES)
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
def test_tensors_are_those_of_the_checkpoint(model: str, dtype: str, tmp_path: Path) -> None:
    from gguf.quants import dequantize

    source = resolve_model_path(model)
    write_gguf(source, tmp_path / "model.gguf", dtype)
    stored = {t.name: t for t in read(tmp_path / "model.gguf").tensors}
    weights = load_file(source / "model.safetensors")
    layer = "model.layers.5.mlp."
    pairs = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "blk.5.attn_k.weight": weights["model.layers.5.self_attn.k_proj.weight"],
        "blk.5.attn_output.weight": weights["model.layers.5.self_attn.o_proj.weight"],
        "blk.5.ffn_norm.weight": weights["model.layers.5.post_attention_layernorm.weight"],
        "blk.5.attn_q_norm.weight": weights["model.layers.5.self_attn.q_norm.weight"],
    }
    if model == "tiny-moe":
        experts = [weights[f"{layer}experts.{e}.up_proj.weight"] for e in range(8)]
        pairs |= {"blk.5.ffn_up_exps.weight": torch.stack(experts)}
        pairs |= {"blk.5.ffn_gate_inp.weight": weights[f"{layer}gate.weight"]}
    else:
        pairs |= {"blk.5.ffn_down.weight": weights[f"{layer}down_proj.weight"]}
    for name, weight in pairs.items():
        tensor = stored.pop(name)
        values = dequantize(tensor.data, tensor.tensor_type).reshape(weight.shape)
        exact = weight.float().numpy()
        keeps_float32 = weight.ndim == 1 or "gate_inp" in name
        assert tensor.tensor_type.name == ("F32" if keeps_float32 else dtype.upper()), name
        bound = 0.0 if keeps_float32 else WORST[dtype] * max(1.0, float(np.abs(exact).max()))
        assert np.abs(values - exact).max() <= bound, name
    assert len(stored) + len(pairs) == (2 + 6 * 11 if model == "tiny-dense" else 2 + 6 * 12)


@pytest.mark.full
def test_transformers_reads_the_file(tmp_path: Path) -> None:
    """Another implementation finds the weights by their names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = resolve_model_path("tiny-dense")
    write_gguf(source, tmp_path / "model.gguf", "f32")
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, config=AutoConfig.from_pretrained(source)
    ).eval()
    expected: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = torch.arange(0, 1868, 31)[None]
    with torch.inference_mode():
        torch.testing.assert_close(theirs(ids).logits, expected(ids).logits, rtol=0, atol=1e-4)


def test_tokens() -> None:
    from transformers import AutoTokenizer

    source = resolve_model_path("tiny-dense")
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    found = read_tokenizer(source, 1920)
    assert found["tokens"][:1868] == tokenizer.convert_ids_to_tokens(range(1868))
    assert found["tokens"][1868:1871] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert [int(kind) for kind in found["types"]] == [1] * 1868 + [3] * 3 + [5] * 49
    assert len(set(found["tokens"])) == 1920


def test_metadata(tmp_path: Path) -> None:
    write_gguf(resolve_model_path("tiny-moe"), tmp_path / "model.gguf", "bf16")
    fields = read(tmp_path / "model.gguf").fields
    values = {name: field.contents() for name, field in fields.items() if "tokenizer.ggml" not in name}
    expected = {
        "general.architecture": "qwen3moe",
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.attention.head_count_kv": 2,
        "qwen3moe.attention.key_length": 64,
        "qwen3moe.embedding_length": 192,
        "qwen3moe.expert_count": 8,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.expert_feed_forward_length": 96,
        "qwen3moe.rope.freq_base": 10000.0,
        "tokenizer.chat_template": (resolve_model_path("tiny-moe") / "chat_template.jinja").read_text(),
    }
    assert {name: values[name] for name in expected} == expected
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 1870
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config.json", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "RoPE is scaled"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "ByteLevel"}}, "byte-level BPE after one split"),
        ("tokenizer.json", {"model": {"type": "Unigram"}}, "byte-level BPE after one split; found Unigram"),
    ],
)
def test_what_is_not_supported(file: str, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write_gguf(changed(tmp_path, file, **values), tmp_path / "model.gguf", "f32")
    assert not [*tmp_path.glob("model.gguf*")]


def test_an_unknown_regex_is_refused(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": r"\w+"}, "behavior": "Isolated", "invert": False}
    steps = {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel"}]}
    with pytest.raises(ValueError, match=r"no pre-tokenizer of llama.cpp is known for the regex '\\\\w\+'"):
        read_tokenizer(changed(tmp_path, "tokenizer.json", pre_tokenizer=steps), 1920)


def test_weights_beyond_float16_leave_no_file(tmp_path: Path) -> None:
    folder = changed(tmp_path, "config.json")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"][0, 0] = 1e5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"q_proj.weight holds .*, which float16 cannot; choose bf16 or f32"):
        write_gguf(folder, tmp_path / "model.gguf", "f16")
    assert not [*tmp_path.glob("model.gguf*")]


def test_the_command(tmp_path: Path) -> None:
    output = tmp_path / "new" / "tiny.gguf"
    result = CliRunner().invoke(app, ["convert", "tiny-dense", "-o", str(output), "--dtype", "q8_0"])
    assert result.exit_code == 0, result.output
    assert "4.0 MB" in result.output
    again = CliRunner().invoke(app, ["convert", "tiny-dense", "-o", str(output)])
    assert again.exit_code == 2
    assert "exists; name a new file" in again.output
    other = CliRunner().invoke(app, ["convert", "tiny-dense", "-o", str(tmp_path / "x"), "--dtype", "q4_k"])
    assert other.exit_code == 2
    assert "f32, f16, bf16, q8_0" in other.output
