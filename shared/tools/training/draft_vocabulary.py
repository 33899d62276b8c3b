"""Cut a built-in EAGLE-3 head to the tokens that assistants use most in the training text.

python -m diptych.shared.tools.training.draft_vocabulary shared/assets/tiny-dense-eagle3 --size 1088
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file, save_file

from diptych.shared.loading.model_path import ASSETS
from diptych.shared.tools.training.acceptance import save_card
from diptych.shared.tools.training.packing import PackedBatches

NUM_BATCHES = 8


def count_said(vocab_size: int) -> torch.Tensor:
    """How often assistants say each token in NUM_BATCHES batches of text, [vocab_size]."""
    texts = PackedBatches(
        (ASSETS / "tiny-dense" / "tokenizer.json").read_text(), "draft vocabulary", NUM_BATCHES, 64, 1024
    )
    said = [texts[i].target_ids[texts[i].weights == 1.0] for i in range(NUM_BATCHES)]
    return torch.bincount(torch.cat(said), minlength=vocab_size)


def cut(weights: dict[str, torch.Tensor], token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same head for `token_ids` alone, ascending: rows of lm_head, and both tables of public heads."""
    size = len(token_ids)
    of_target = torch.arange(len(weights["d2t"])) + weights["d2t"]
    row_of = dict(zip(of_target.tolist(), range(len(of_target))))
    missing = [token for token in token_ids.tolist() if token not in row_of]
    if missing:
        raise ValueError(f"the head has no row for the tokens {missing[:5]} ({len(missing)} of {size})")
    rows = torch.tensor([row_of[token] for token in token_ids.tolist()])
    t2d = torch.zeros_like(weights["t2d"])
    t2d[token_ids] = True
    head = weights["lm_head.weight"][rows].contiguous()
    return {**weights, "lm_head.weight": head, "d2t": token_ids - torch.arange(size), "t2d": t2d}


def main(
    folder: Annotated[Path, typer.Argument(help="the folder of the head, which is rewritten")],
    size: Annotated[int, typer.Option(help="tokens of the draft vocabulary")] = 1088,
) -> None:
    """Cut the head, and record it in config.json, training.json and README.md. Raises `ValueError`, without
    having written, for a size that the head does not allow."""
    config, record = (json.loads((folder / name).read_text()) for name in ("config.json", "training.json"))
    if not 1 <= size <= config["vocab_size"]:
        raise ValueError(f"--size is {size}; it must be from 1 to {config['vocab_size']}, the model's ids")
    counts = count_said(config["vocab_size"])
    token_ids = counts.topk(size).indices.sort().values
    weights = cut(load_file(folder / "model.safetensors"), token_ids)
    config["draft_vocab_size"] = size
    record["num_parameters"] = sum(
        tensor.numel() for tensor in weights.values() if tensor.is_floating_point()
    )
    acceptance, last_cut = record.pop("acceptance", {}), record.get("draft_vocabulary", {})
    record["draft_vocabulary"] = {
        "command": f"python -m diptych.shared.tools.training.draft_vocabulary {folder} --size {size}",
        "size": size,
        "share_of_tokens": round(float(counts[token_ids].sum() / counts.sum()), 4),
        "acceptance_before": last_cut.get("acceptance_before", acceptance),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, value in (("config.json", config), ("training.json", record)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")
    save_card(folder)
    typer.echo(f"{size} tokens, {record['draft_vocabulary']['share_of_tokens']:.2%} of what assistants say")


if __name__ == "__main__":
    typer.run(main)
