"""GGUF files of families whose tensors differ from the checkpoint's: a random model of transformers,
converted as llama.cpp does, has the same config, weights, logits and greedy text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import converted, same_logits, write_file

from diptych.shared.config import read_config
from diptych.shared.loading.gguf_config import config_of
from diptych.shared.loading.gguf_reader import Gguf
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weights import iterate_weights

SHAPE = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "eos_token_id": 2}
SHAPE |= {"bos_token_id": 1, "pad_token_id": 0, "dtype": "float32"}
KEYS = {
    "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
    "attention.head_count_kv": 2, "context_length": 64, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
FACTORS = {"long": [1.5 + i / 4 for i in range(4)], "short": [1.0 + i / 8 for i in range(4)]}

FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma2": (
        {
            "model_type": "gemma2", "num_hidden_layers": 3, "head_dim": 24, "query_pre_attn_scalar": 24,
            "sliding_window": 7, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 12.0,
        },
        {
            "block_count": 3, "attention.key_length": 24, "attention.value_length": 24,
            "attention.sliding_window": 7, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 12.0,
        },
    ),
    "gemma3": (
        {
            "model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 24, "query_pre_attn_scalar": 24,
            "sliding_window": 7, "sliding_window_pattern": 6, "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "block_count": 7, "attention.key_length": 24, "attention.value_length": 24,
            "attention.sliding_window": 7, "rope.freq_base": 1e6, "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "phi3": (
        {
            "model_type": "phi3", "num_hidden_layers": 2, "sliding_window": 10, "tie_word_embeddings": False,
            "original_max_position_embeddings": 8, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "longrope", **{f"{key}_factor": values for key, values in FACTORS.items()},
            },
        },
        {
            "block_count": 2, "attention.sliding_window": 10, "rope.dimension_count": 8,
            "rope.freq_base": 10000.0, "rope.scaling.original_context_length": 8,
            "rope.scaling.attn_factor": 1.4142135,
        },
    ),
    "gpt-oss": (
        {
            "model_type": "gpt_oss", "num_hidden_layers": 2, "head_dim": 24, "attention_bias": True,
            "num_local_experts": 6, "num_experts_per_tok": 4, "sliding_window": 9,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False,
                "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
            },
        },
        {
            "block_count": 2, "attention.key_length": 24, "attention.value_length": 24, "expert_count": 6,
            "expert_used_count": 4, "expert_feed_forward_length": 96, "attention.sliding_window": 9,
            "rope.freq_base": 150000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16, "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
        },
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_model(hf_config: dict[str, Any]) -> Any:
    """Vectors are random too: norms, biases and sinks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**SHAPE, **hf_config})
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1 or name.endswith("_bias"):
                weight.normal_(1.0 if "norm" in name and "gemma" not in hf_config["model_type"] else 0.0, 0.2,
                               generator=generator)  # fmt: skip
            else:
                weight.normal_(0.0, 0.3 if "embed" in name else 1.5 * weight.shape[-1] ** -0.5,
                               generator=generator)  # fmt: skip
    return model.eval()


def values_of(arch: str, **more: Any) -> dict[str, Any]:
    """`more`: without the keys that are None."""
    keys = KEYS | FAMILIES[arch][1] | more
    own = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    return own | {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 1}


def make(arch: str, folder: Path, **split: Any) -> tuple[Any, Path]:
    """The model, and its file. GPT-OSS's experts are in MXFP4."""
    model = random_model(FAMILIES[arch][0])
    tensors = converted(model, arch, "MXFP4" if arch == "gpt-oss" else "F32")
    if arch == "phi3":
        for key, factors in FACTORS.items():
            tensors[f"rope_factors_{key}.weight"] = torch.tensor(factors).numpy()
    file = folder / "model.gguf"
    write_file(file, arch, values_of(arch), tensors, **split)
    return model, file


@pytest.mark.full
@pytest.mark.parametrize("arch", FAMILIES)
def test_config_weights_and_logits(arch: str, tmp_path: Path) -> None:
    model, file = make(arch, tmp_path)
    model.save_pretrained(tmp_path / "hf")
    folder = resolve_model_path(str(file))
    ours, theirs = vars(read_config(folder)), vars(read_config(tmp_path / "hf"))
    different = {name for name in ours if ours[name] != theirs[name]}
    if arch == "phi3":  # float32 in the file
        assert ours["rope"].attention_factor == pytest.approx(2**0.5, abs=1e-6)
        different -= {"rope"}
    assert different == set(), {name: (ours[name], theirs[name]) for name in different}
    found, stored = dict(iterate_weights(folder)), dict(iterate_weights(tmp_path / "hf"))
    assert found.keys() == stored.keys()
    for name in stored:
        rounding = 2**-23 if "gemma" in arch and "norm" in name else 0.0  # of 1 + w
        torch.testing.assert_close(found[name], stored[name], rtol=0, atol=rounding)
    same_logits(model, file)


@pytest.mark.full
def test_ranks_read_their_parts_of_fused_and_packed_tensors(tmp_path: Path) -> None:
    for arch in ("phi3", "gpt-oss"):
        (tmp_path / arch).mkdir()
        folder = resolve_model_path(str(make(arch, tmp_path / arch)[1]))
        config, whole = read_config(folder), dict(iterate_weights(folder))
        for rank in range(2):
            shards = Shards(config, rank, 2)
            parts = dict(iterate_weights(folder, shards=shards))
            assert parts.keys() == whole.keys()
            assert all(torch.equal(parts[name], shards.cut(name, whole[name])) for name in parts)


def config(arch: str, tensors: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    values = {"general.architecture": arch, **values_of(arch, **more)}
    return config_of(Gguf(values, tensors or {}), Path("x.gguf"))


def test_what_only_large_models_have() -> None:
    assert config("gemma2", block_count=46)["query_pre_attn_scalar"] == 64 // 4
    assert config("gemma3", block_count=62)["query_pre_attn_scalar"] == 64 // 4
    assert config("gemma3")["query_pre_attn_scalar"] == 24
    layers = config("gpt-oss", **{"attention.sliding_window_pattern": [False, True]})["layer_types"]
    assert layers == ["full_attention", "sliding_attention"]
    plain = config("phi3", **{"attention.sliding_window": 0, "rope.scaling.attn_factor": None})
    assert (plain["sliding_window"], plain["rope_parameters"]["rope_type"]) == (None, "default")


def test_tokens_that_end_an_answer() -> None:
    tokens = ["<|call|>", "a", "<eos>", "<|return|>", "<|end|>"]
    assert config("gpt-oss")["eos_token_id"] == [2]
    values = {"general.architecture": "gpt-oss", **values_of("gpt-oss"), "tokenizer.ggml.tokens": tokens}
    assert config_of(Gguf(values, {}), Path("x"))["eos_token_id"] == [0, 2, 3]


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("gemma2", {"final_logit_scale": 2.0}, r"x.gguf: gemma2.final_logit_scale is not supported"),
        ("gemma2", {"rope.freq_base_swa": 7.0}, r"gemma2.rope.freq_base_swa is 7.0, which is not supported"),
        (
            "gemma3",
            {"rope.scaling.type": "longrope"},
            r"gemma3.rope.scaling.type is 'longrope', which is not",
        ),
        ("gemma3", {"attn_logit_softcapping": 5.0}, r"gemma3.attn_logit_softcapping is not supported"),
        ("gpt-oss", {"rope.dimension_count": 12}, r"gpt-oss.rope.dimension_count is 12, which is not"),
        ("gpt-oss", {"expert_shared_count": 1}, r"gpt-oss.expert_shared_count is not supported"),
        ("phi3", {"expert_count": 8}, r"phi3.expert_count is 8, which is not supported"),
    ],
)
def test_keys_that_are_not_supported(arch: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(arch, **changes)
