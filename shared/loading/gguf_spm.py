"""The tokenizer kind `llama` of a GGUF file: SentencePiece's BPE, as parts of a tokenizer.json.

The file has a score for each token, and no merges. llama.cpp joins, again and again, the two neighbours whose
joined text is the token of the highest score. That is a BPE with one merge for each pair of tokens that makes
a token, ordered by its score. A character that is no token becomes the tokens of its bytes."""

from __future__ import annotations

from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens
SPACE = "▁"

Row = tuple[int, str, int]
"""Id, token and type."""


def spm_parts(values: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    scores = values["tokenizer.ggml.scores"]
    unknown = values.get("tokenizer.ggml.unknown_token_id")
    # A space is put before the text, and before what follows a special token.
    has_prefix = values.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [{"type": "Prepend", "prepend": SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, _replace(" ", SPACE)]},
        "pre_tokenizer": None,
        "post_processor": around(values, add_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [_replace(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "vocab": vocabulary(rows),
            "merges": merges_of({token: scores[i] for i, token, kind in rows if kind == NORMAL}),
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": None if unknown is None else rows[unknown][1],
        },
    }


def vocabulary(rows: list[Row]) -> dict[str, int]:
    """All tokens but unused ones at the end. Those that are matched before the merges have to be among them:
    `tokenizers` numbers others anew."""
    used = max((token_id for token_id, _, kind in rows if kind != UNUSED), default=-1)
    return {token: token_id for token_id, token, _ in rows[: used + 1]}


# --8<-- [start:spm-merges]
def merges_of(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Each pair of tokens that makes a token, those of the highest score first."""
    found = [
        (-score, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    return [(left, right) for _, left, right in sorted(found, key=lambda merge: merge[0])]


# --8<-- [end:spm-merges]


def around(values: dict[str, Any], add_bos: bool) -> dict[str, Any] | None:
    """The step that puts the first and the last token around a text; None: there are none. `add_bos`: where
    the file does not say it."""
    first = _special(values, "bos", add_bos)
    last = _special(values, "eos", False)
    if not first and not last:
        return None
    text = [{"Sequence": {"id": each, "type_id": 0}} for each in "AB"]
    pieces = [[{"SpecialToken": {"id": name, "type_id": 0}} for name in each] for each in (first, last)]
    single = [*pieces[0], text[0], *pieces[1]]
    special = {
        name: {"id": name, "ids": [token_id], "tokens": [name]} for name, token_id in (first | last).items()
    }
    pair = [*single, *pieces[0], text[1], *pieces[1]]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _special(values: dict[str, Any], name: str, default: bool) -> dict[str, int]:
    token_id = values.get(f"tokenizer.ggml.{name}_token_id")
    if token_id is None or not values.get(f"tokenizer.ggml.add_{name}_token", default):
        return {}
    return {values["tokenizer.ggml.tokens"][token_id]: token_id}


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}
