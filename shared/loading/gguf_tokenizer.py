"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json, which `transformers` reads.

GGUF has the tokens and merges of a byte-level BPE, and names how a text is split before; llama.cpp has the
splits in a table, of which `SPLITS` has those of the supported architectures. The other kind is in
`gguf_spm`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from diptych.shared.loading.gguf_spm import CONTROL, NORMAL, USER_DEFINED, Row, around, spm_parts, vocabulary

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
DEEPSEEK_SPLIT = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _bytes(use_regex: bool) -> dict[str, Any]:
    """use_regex: GPT-2's split first."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


SPLITS: dict[str, list[dict[str, Any]]] = {
    "qwen2": [_split(QWEN_SPLIT), _bytes(False)],
    "llama-bpe": [_split(LLAMA3_SPLIT), _bytes(False)],
    "dbrx": [_split(LLAMA3_SPLIT), _bytes(False)],
    "gpt-4o": [_split(GPT4O_SPLIT), _bytes(False)],
    "deepseek-v3": [
        *map(_split, (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK_SPLIT)),
        _bytes(False),
    ],
    "smollm": [{"type": "Digits", "individual_digits": True}, _bytes(True)],
    "gpt-2": [_bytes(True)],
}
"""tokenizer.ggml.pre -> pre-tokenizers of tokenizer.json."""

IGNORE_MERGES = ("llama-bpe",)
"""A piece that is a token is that token, whatever the merges make of it."""


def tokenizer_files(values: dict[str, Any], file: Path) -> dict[str, str]:
    """Names and texts of the files. Of a tokenizer that is not supported there are none, and a line of stderr
    says so; `--tokenizer` may name a folder that has it."""
    model, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    is_spm = model == "llama" and "tokenizer.ggml.scores" in values
    if not is_spm and (model != "gpt2" or pre not in SPLITS):
        print(
            f"{file}: no tokenizer is made of model {model!r}, split {pre!r}; supported are llama with "
            f"scores, and gpt2 with {', '.join(SPLITS)}. Name a folder that has it with --tokenizer",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        return {}
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    types: list[int] = values.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    rows = [(token_id, token, kind) for token_id, (token, kind) in enumerate(zip(tokens, types))]
    added = [
        {
            "id": token_id, "content": token, "special": kind == CONTROL, "normalized": False,
            "single_word": False, "lstrip": False, "rstrip": False,
        }
        for token_id, token, kind in rows
        if kind in (CONTROL, USER_DEFINED)
    ]  # fmt: skip
    tokenizer = {"version": "1.0", "added_tokens": added}
    tokenizer |= spm_parts(values, rows) if is_spm else _byte_level_parts(values, rows)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": values.get("tokenizer.chat_template"),
    }
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    for name, in_gguf in names.items():
        token_id = values.get(f"tokenizer.ggml.{in_gguf}_token_id")
        if token_id is not None and token_id < len(tokens):
            settings[name] = tokens[token_id]
    settings = {name: value for name, value in settings.items() if value is not None}
    return {"tokenizer.json": json.dumps(tokenizer), "tokenizer_config.json": json.dumps(settings)}


def _byte_level_parts(values: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    pre = values["tokenizer.ggml.pre"]
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[pre]},
        "post_processor": around(values, add_bos=False) or _bytes(True),
        "decoder": _bytes(True),
        "model": {
            "type": "BPE",
            "vocab": vocabulary(rows),
            "merges": [merge.split(" ", 1) for merge in values.get("tokenizer.ggml.merges") or ()],
            "ignore_merges": pre in IGNORE_MERGES,
        },
    }
