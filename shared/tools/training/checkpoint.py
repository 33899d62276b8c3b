"""Writes a trained model as a Hugging Face folder, with a record of how it was made and a model card."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from diptych.shared.tools.corpus.evaluate import Score
from diptych.shared.tools.training.learn_tokenizer import VOCAB_SIZE
from diptych.shared.tools.training.tiny_models import END_OF_TEXT_ID, IM_END_ID

_CARD = """\
# Diptych's built-in {name} model

A language model of {params:.1f} M parameters, trained from nothing on the text that
`shared/tools/corpus/corpus.py` makes up: short stories to ask about, small sums, JSON records, counting,
repeating and small talk, in English. It is there to run, learn and test the engine without a download. It
knows nothing else.

- `{architecture}`: {layers} layers, hidden size {hidden},
  {heads} query and {kv_heads} key/value heads of {head_dim}{more}.
- bfloat16 weights, tied embeddings, 2,048 positions (trained on chats of up to {row_len:,} tokens).
- {vocab:,} tokens (byte-level BPE, one token a digit). The embedding has {rows:,} rows; the padded rows are
  trained to be improbable (together below one in a million wherever it was measured).
- Chat format: `<|im_start|>role`, newline, text, `<|im_end|>`, newline. A turn ends with `<|im_end|>`.
- Held-out questions answered exactly (greedy, float32): **{exact:.2%}** of {num_questions}.
  By kind, and for a run with another seed where there was one: `training.json`.

Made by

    {command}

on {device} in {seconds:.0f} s ({tokens:.0f} M tokens). Score it with

    python -m diptych.shared.tools.corpus.evaluate shared/assets/tiny-{name}
"""


def save_checkpoint(model: PreTrainedModel, folder: Path) -> None:
    """Round the weights to bfloat16 and write config.json, generation_config.json and model.safetensors."""
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=[IM_END_ID, END_OF_TEXT_ID], pad_token_id=END_OF_TEXT_ID, do_sample=False
    )
    model.save_pretrained(folder)
    # Older readers look for these names, newer ones for `dtype`, `rope_parameters` and `num_local_experts`.
    config = json.loads((folder / "config.json").read_text())
    config |= {"torch_dtype": "bfloat16", "rope_theta": config["rope_parameters"]["rope_theta"]}
    if "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def score_record(result: Score) -> dict[str, Any]:
    by_kind = {kind: round(exact, 4) for kind, exact in sorted(result.by_kind.items())}
    return {"num_questions": result.num_questions, "exact": round(result.exact, 4), "by_kind": by_kind}


def save_record(folder: Path, record: dict[str, Any]) -> None:
    """Write training.json, and the model card README.md from it and config.json.

    `record` holds name, command, device, torch, seconds, num_tokens, row_len, num_parameters, final_loss and
    held_out (a `score_record`); started_from is the record of the training whose weights it began with.
    """
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    config = json.loads((folder / "config.json").read_text())
    runs = [record]
    while "started_from" in runs[0]:
        runs.insert(0, runs[0]["started_from"])
    more = ""
    if "num_experts" in config:
        more = f", {config['num_experts']} experts of which a token uses {config['num_experts_per_tok']}"
    if "linear_num_value_heads" in config:
        num_linear = config["layer_types"].count("linear_attention")
        more = (
            f" in {config['num_hidden_layers'] - num_linear} layers,\n  {num_linear} gated DeltaNet layers "
            f"of {config['linear_num_key_heads']} key and {config['linear_num_value_heads']} value heads of "
            f"{config['linear_value_head_dim']}"
        )
    card = _CARD.format(
        name=record["name"],
        params=record["num_parameters"] / 1e6,
        architecture=config["architectures"][0],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        more=more,
        row_len=record["row_len"],
        vocab=VOCAB_SIZE,
        rows=config["vocab_size"],
        exact=record["held_out"]["exact"],
        num_questions=record["held_out"]["num_questions"],
        command="\n    ".join(each["command"] for each in runs),
        device=record["device"],
        seconds=sum(each["seconds"] for each in runs),
        tokens=sum(each["num_tokens"] for each in runs) / 1e6,
    )
    (folder / "README.md").write_text(card)
