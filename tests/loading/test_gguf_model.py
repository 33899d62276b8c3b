"""Models that are GGUF files: weights, numbers and tokens of the folder of which the file is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import as_type, llama, same_logits, write_file
from safetensors.torch import load_file

from diptych import LLM
from diptych.shared.config import EngineConfig, read_config
from diptych.shared.loading.gguf_file import write_gguf
from diptych.shared.loading.gguf_tokenizer import SPLITS, tokenizer_files
from diptych.shared.loading.gguf_weights import FLOATS, LINK, QUANTIZED
from diptych.shared.loading.kv_scales import kv_cache_of
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weights import iterate_weights
from diptych.shared.text.tokenizer import Tokenizer
from diptych.shared.types.attention import FP8

# Without several spaces before a word, the one case that `gguf_file` says is split otherwise.
TEXTS = [
    "What is 12 + 30?",
    "Otto is a baker.\n\n He's 45678 years",
    "Grüße, 東京 — ok!\t{x}",
    " <|im_end|>x",
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of GGUF files are made below the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def file_of(model: str, tmp_path: Path, dtype: str = "bf16") -> Path:
    write_gguf(resolve_model_path(model), tmp_path / "model.gguf", dtype)
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("model", [pytest.param("tiny-dense", marks=pytest.mark.full), "tiny-moe"])
def test_a_file_is_the_folder_that_it_was_made_of(model: str, tmp_path: Path) -> None:
    source, folder = resolve_model_path(model), resolve_model_path(str(file_of(model, tmp_path)))
    ours, theirs = vars(read_config(folder)), vars(read_config(source))
    assert {name for name in ours if ours[name] != theirs[name]} == {"eos_token_ids"}
    assert ours["eos_token_ids"] <= theirs["eos_token_ids"]
    found, stored = dict(iterate_weights(folder)), load_file(source / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name].float()) for name in stored)
    tokenizer, original = Tokenizer.from_pretrained(folder), Tokenizer.from_pretrained(source)
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text)
        assert tokenizer.decode(original.encode(text)) == text
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    assert tokenizer.chat(messages) == original.chat(messages)
    assert (tokenizer.eos_token_ids, tokenizer.special_ids) == (original.eos_token_ids, original.special_ids)


def test_the_engine_answers(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    texts = [
        LLM(model, panel="reference").chat(messages, temperature=0, max_tokens=8).text
        for model in ("tiny-dense", str(file_of("tiny-dense", tmp_path)))
    ]
    assert texts[0] == texts[1] != ""


@pytest.mark.full
def test_ranks_read_their_parts(tmp_path: Path) -> None:
    folder = resolve_model_path(str(file_of("tiny-moe", tmp_path)))
    config = read_config(folder)
    for rank in range(2):
        parts = dict(iterate_weights(folder, shards=Shards(config, rank, 2)))
        expected = dict(iterate_weights(resolve_model_path("tiny-moe"), shards=Shards(config, rank, 2)))
        assert parts.keys() == expected.keys()
        assert all(torch.equal(parts[name], expected[name].float()) for name in parts)


@pytest.mark.full
def test_the_folder_is_made_once(tmp_path: Path, cache: Path) -> None:
    file = file_of("tiny-dense", tmp_path)
    assert resolve_model_path(str(file)) == resolve_model_path(str(file))
    file.write_bytes(file.read_bytes() + b"\0")
    resolve_model_path(str(file))
    assert len([*(cache / "diptych").iterdir()]) == 2


def test_an_fp8_cache_has_no_scales(tmp_path: Path) -> None:
    (tmp_path / LINK).touch()
    config = EngineConfig(kv_cache_dtype="fp8_e4m3")
    assert kv_cache_of(tmp_path, read_config(resolve_model_path("tiny-dense")), config) == (FP8, None)


# ---- files written here, tensor by tensor ----


FAST = ("Q4_1",)


@pytest.mark.parametrize(
    "kind",
    [
        *FAST,
        *(pytest.param(kind, marks=pytest.mark.full) for kind in (*FLOATS, *QUANTIZED) if kind not in FAST),
    ],
)
def test_values_are_those_of_the_package(kind: str, tmp_path: Path, capfd: Any) -> None:
    """Bit for bit, rows of q and k in the order of the checkpoint."""
    _, file, weights = llama(tmp_path, as_type(kind))
    folder = resolve_model_path(str(file))
    found = dict(iterate_weights(folder))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert read_config(folder).dtype == {"F32": torch.float32, "F16": torch.float16}.get(kind, torch.bfloat16)
    assert (f"weights in {kind}: no kernel multiplies them" in capfd.readouterr().err) == (kind in QUANTIZED)


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("Q4_1", {"rope_type": "default"}),
        pytest.param("Q8_0", {"rope_type": "default"}, marks=pytest.mark.full),
        pytest.param("Q6_K", {"rope_type": "default"}, marks=pytest.mark.full),
        pytest.param("F32", {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_logits_are_those_of_transformers(kind: str, rope: dict[str, Any], tmp_path: Path) -> None:
    model, file, _ = llama(tmp_path, as_type(kind), rope_parameters={"rope_theta": 10000.0, **rope})
    same_logits(model, file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "mamba"}, "architecture 'mamba' is not supported; supported are llama, qwen2"),
        ({"llama.expert_count": 8}, "llama.expert_count is 8, which is not supported"),
        ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window is 8, which is not"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope', which is not"),
        (
            {"llama.logit_scale": 8, "llama.pooling_type": 1},
            "llama.logit_scale, llama.pooling_type is not sup",
        ),
        ({"split.count": 2}, "is one of 2 parts; their names must end in"),
    ],
)
def test_what_is_not_supported(changes: dict[str, Any], message: str, tmp_path: Path, cache: Path) -> None:
    arch = changes.pop("arch", "llama")
    keys = (
        "embedding_length",
        "attention.head_count",
        "block_count",
        "context_length",
        "feed_forward_length",
    )
    values = {f"llama.{key}": 64 for key in keys} | {"llama.attention.layer_norm_rms_epsilon": 1e-5}
    tensors = {"token_embd.weight": np.zeros((4, 64), np.float32)}
    write_file(tmp_path / "x.gguf", arch, values | changes, tensors)
    with pytest.raises(ValueError, match=message):
        resolve_model_path(str(tmp_path / "x.gguf"))
    assert not cache.exists()


@pytest.mark.full
def test_types_and_tensors_that_are_not_supported(tmp_path: Path) -> None:
    _, file, _ = llama(tmp_path, as_type("IQ4_NL"))
    with pytest.raises(ValueError, match=r"is of type IQ4_NL; supported are F32, .*Q6_K"):
        iterate_weights(resolve_model_path(str(file)))

    def unknown(writer: Any, name: str, values: np.ndarray) -> np.ndarray:
        writer.add_tensor(name.replace("ffn_up", "ffn_other"), values)
        return values

    _, file, _ = llama(tmp_path, unknown)
    with pytest.raises(ValueError, match=r"no weight of LlamaForCausalLM is named blk\.0\.ffn_other\.weight"):
        iterate_weights(resolve_model_path(str(file)))


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 16, b"{}" * 100])
def test_damaged_files(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.gguf is no GGUF file, or is damaged"):
        resolve_model_path(str(tmp_path / "x.gguf"))


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    file = file_of("tiny-dense", tmp_path)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="is no GGUF file, or is damaged"):
        resolve_model_path(str(file))


# ---- tokenizers ----


def values_of(pre: str, **more: Any) -> dict[str, Any]:
    """A byte-level BPE of all bytes, one merge and an end token."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "12", "<end>"]
    own = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [1] * 257 + [3], "merges": ["1 2"]}
    return {f"tokenizer.ggml.{name}": value for name, value in {**own, **more}.items()}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", "!\n"]),
        ("llama-bpe", ["it", "'s", " ", "123", "4", "!\n"]),
        ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "!", "Ċ"]),
        ("gpt-2", ["it", "'s", " 1234", "!", "\n"]),
        ("dbrx", ["it", "'s", " ", "123", "4", "!\n"]),
        ("gpt-4o", ["it's", " ", "123", "4", "!\n"]),
        ("deepseek-v3", ["it", "'s", " ", "123", "4", "!\n"]),
    ],
)
def test_splits(pre: str, pieces: list[str]) -> None:
    from tokenizers import Tokenizer as Fast

    fast = Fast.from_str(tokenizer_files(values_of(pre), Path("x"))["tokenizer.json"])
    assert [piece for piece, _ in fast.pre_tokenizer.pre_tokenize_str("it's 1234!\n")] == [
        piece.replace(" ", "Ġ").replace("\n", "Ċ") for piece in pieces
    ]
    assert fast.decode(fast.encode("it's 1234!\n Grüße").ids) == "it's 1234!\n Grüße"
    assert SPLITS.keys() == {"qwen2", "llama-bpe", "dbrx", "gpt-4o", "smollm", "gpt-2", "deepseek-v3"}


def test_a_first_token(tmp_path: Path) -> None:
    files = tokenizer_files(values_of("gpt-2", bos_token_id=257, add_bos_token=True), Path("x"))
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("12") == [257, 256]
    assert tokenizer.encode("12", add_special_tokens=False) == [256]
    assert tokenizer.encode("1<end>", add_special_tokens=False)[-1] == 257


def test_special_tokens_keep_their_ids(tmp_path: Path) -> None:
    """SmolLM2's are the first of the vocabulary, and so not behind the others."""
    values = values_of("gpt-2", bos_token_id=0, eos_token_id=1)
    for name, first in (("tokens", ["<start>", "<stop>"]), ("token_type", [3, 3])):
        values[f"tokenizer.ggml.{name}"] = [*first, *values[f"tokenizer.ggml.{name}"]]
    for name, text in tokenizer_files(values, Path("x")).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("<start>12<stop>") == [0, 258, 1]
    assert (tokenizer.special_ids, tokenizer.eos_token_ids) == ({0, 1, 259}, {1})
    assert tokenizer.decode([0, 258, 1, 259]) == "<start>12<stop><end>"


@pytest.mark.parametrize("changes", [{"model": "llama"}, {"model": "bert"}, {"pre": "falcon"}])
def test_other_tokenizers_are_left_out_with_a_line(changes: dict[str, Any], capsys: Any) -> None:
    assert tokenizer_files(values_of(**{"pre": "gpt-2", **changes}), Path("x.gguf")) == {}
    assert "supported are llama with scores, and gpt2 with qwen2, llama-bpe" in capsys.readouterr().err
