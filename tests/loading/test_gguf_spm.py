"""The tokenizer kind `llama` of GGUF files against llama.cpp's rule, written down here step by step."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from diptych.shared.loading.gguf_tokenizer import tokenizer_files
from diptych.shared.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [
    "▁",
    "a",
    "b",
    "c",
    "n",
    ".",
    "▁a",
    "ab",
    "an",
    "▁an",
    "ban",
    "▁ban",
    "ana",
    "abc",
    "bc",
    "▁▁",
    "na",
]
SCORES = random.Random(2).sample(range(-len(PIECES), 0), len(PIECES))


def values(**more: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "[PAD]", "<turn>", "\n\n"]
    types = [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [5, 3, 4]
    scores = [0.0] * 259 + [float(score) for score in SCORES] + [-1000.0] * 3
    own = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    own |= {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **more}
    return {f"tokenizer.ggml.{name}": value for name, value in own.items()}


def loaded(folder: Path, **more: Any) -> Tokenizer:
    for name, text in tokenizer_files(values(**more), Path("x")).items():
        (folder / name).write_text(text, encoding="utf-8")
    return Tokenizer.from_pretrained(folder)


def joined(text: str) -> list[int]:
    """One character each; the two neighbours that make the token of the highest score are joined, the first
    of several; at the end, the bytes of what is no token."""
    scores, parts = dict(zip(PIECES, SCORES)), list(text.replace(" ", "▁"))
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(pairwise(parts))]
        best = max((pair for pair in pairs if pair[0] is not None), default=None)
        if best is None:
            break
        i = -best[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = [[259 + PIECES.index(p)] if p in scores else [3 + byte for byte in p.encode()] for p in parts]
    return [token_id for piece in ids for token_id in piece]


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_ids_are_those_of_the_rule(add_space_prefix: bool, tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, add_space_prefix=add_space_prefix)
    prefix, rng = " " * add_space_prefix, random.Random(1)
    for _ in range(200):
        text = "".join(
            rng.choices(["a", "b", "c", "n", " ", ".", "ban", "é", "\n", "東"], k=rng.randint(1, 12))
        )
        if "\n\n" in text:
            continue
        assert tokenizer.encode(text, add_special_tokens=False) == joined(prefix + text), text
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_tokens(tmp_path: Path) -> None:
    tokenizer, after = loaded(tmp_path), 259 + len(PIECES)
    assert tokenizer.encode("ban") == [1, *joined(" ban")]
    # What follows a special token begins as a text does.
    turn = [after + 1, *joined(" ban"), after + 2, *joined(" a")]
    assert tokenizer.encode("<turn>ban\n\na", add_special_tokens=False) == turn
    assert tokenizer.encode("") == [1]
    assert tokenizer.special_ids == {1, 2, after + 1}
    assert tokenizer.eos_token_ids == {2}


def test_tokens_around_a_text(tmp_path: Path) -> None:
    assert loaded(tmp_path, add_bos_token=False).encode("a") == joined(" a")
    assert loaded(tmp_path, add_eos_token=True).encode("a") == [1, *joined(" a"), 2]
