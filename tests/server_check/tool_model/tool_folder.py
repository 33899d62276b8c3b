"""Writes the model folder: python -m tests.server_check.tool_model.tool_folder FOLDER [--long]"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from diptych.shared.loading.model_path import ASSETS

BASE = ASSETS / "tiny-dense"
HERE = Path(__file__).parent
ADAPTER = HERE / "adapter.safetensors"
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
FIRST_ID = 1871  # the first row of the embedding without a token
MARKER_IDS = list(range(FIRST_ID, FIRST_ID + len(MARKERS)))
EMBEDDING = "model.embed_tokens.weight"
LONG, LONG_ID = "=" * 64, FIRST_ID + len(MARKERS)
LONG_CONTEXT = 131_072


def write_folder(folder: Path, adapter: Path = ADAPTER) -> Path:
    """Weights of tiny-dense plus the adapter; markers are tokens that are not special, as Qwen3's."""
    write_tokenizer(folder)
    weights, delta = load_file(BASE / "model.safetensors"), load_file(adapter)
    for name in {key.rpartition(".")[0] for key in delta if key != "rows"}:
        factors = (delta[f"{name}.{part}"] * delta[f"{name}.{part}_scale"][..., None] for part in "ab")
        for layer, (a, b) in enumerate(zip(*factors)):
            weight = weights[f"model.layers.{layer}.{name}"]
            weight.copy_(weight.float() + b.T @ a)
    weights[EMBEDDING][MARKER_IDS] = delta["rows"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_long(folder: Path) -> Path:
    """A longer context, and a token of 64 characters that the model writes where they may come."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": LONG_CONTEXT}), "utf-8"
    )
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": LONG_ID, "content": LONG})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    weights = load_file(folder / "model.safetensors")
    weights[EMBEDDING][LONG_ID] = weights[EMBEDDING][:FIRST_ID].float().mean(0)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def compressed(a: torch.Tensor, b: torch.Tensor, rank: int) -> dict[str, torch.Tensor]:
    """The closest matrix to `b.T @ a` of this rank, in int8 with a scale for each row of both factors."""
    u, size, v = torch.linalg.svd(b.T @ a, full_matrices=False)
    root = size[:rank, None].sqrt()
    found = {}
    for part, factor in (("a", root * v[:rank]), ("b", root * u.T[:rank])):
        scale = (factor.abs().amax(1) / 127).clamp_min(1e-12)  # of a row of zeros, which stay zeros
        found |= {part: (factor / scale[:, None]).round().to(torch.int8), f"{part}_scale": scale}
    return found


def write_tokenizer(folder: Path) -> None:
    """Everything but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        shutil.copy(BASE / name, folder / name)
    tokenizer = json.loads((BASE / "tokenizer.json").read_text("utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"] += [
        {"id": token_id, "content": text, **flags} for token_id, text in zip(MARKER_IDS, MARKERS)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    shutil.copy(HERE / "chat_template.jinja", folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    written = write_folder(Path(sys.argv[1]))
    print(make_long(written) if "--long" in sys.argv else written)
