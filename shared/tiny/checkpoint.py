"""Writes a trained model as a Hugging Face folder, with a record of how it was made."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from shared.tiny.evaluate import Score
from shared.tiny.models import END_OF_TEXT_ID, IM_END_ID

_CARD = """\
# {title}

A {kind} language model of {params:.1f} M parameters, trained from nothing on the text that `shared/tiny/corpus.py` makes up:
short stories to ask about, small sums, JSON records, counting, repeating and small talk, in English. It is there to run,
learn and test the engine without a download. It knows nothing else.

- Architecture `{architecture}`: {layers} layers, hidden size {hidden}, {heads} query and {kv_heads} key/value heads of 64{experts}.
- bfloat16 weights, tied embeddings, 2,048 positions (trained on chats of up to 1,024 tokens).
- {vocab} tokens (byte-level BPE, one token a digit); the embedding has {rows} rows, and the padded rows are never produced.
- Chat format: `<|im_start|>role`, newline, text, `<|im_end|>`, newline. A turn ends with `<|im_end|>`.
- Held-out questions answered exactly (greedy, float32): **{exact:.2%}** of {num_questions}. By kind: `training.json`.

Made by

    {command}

on {device} in {seconds:.0f} s ({tokens:.0f} M tokens). Score it with `python -m shared.tiny.evaluate {out}`.
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


def save_record(
    folder: Path,
    name: str,
    command: str,
    model: PreTrainedModel,
    tokenizer: Any,
    result: Score,
    loss: float,
    seconds: float,
    num_tokens: int,
) -> None:
    """Write training.json and README.md."""
    on_gpu = model.device.type == "cuda"
    device = f"one {torch.cuda.get_device_name()}" if on_gpu else "a CPU"
    record = {
        "command": command,
        "device": device,
        "torch": torch.__version__,
        "seconds": round(seconds, 1),
        "num_tokens": num_tokens,
        "num_parameters": model.num_parameters(),
        "final_loss": round(loss, 5),
        "held_out": {
            "num_questions": result.num_questions,
            "exact": round(result.exact, 4),
            "by_kind": {kind: round(exact, 4) for kind, exact in sorted(result.by_kind.items())},
        },
    }
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    config = model.config
    is_moe = hasattr(config, "num_experts_per_tok")
    experts = (
        f", {config.num_experts} experts of which each token uses {config.num_experts_per_tok}"
        if is_moe
        else ""
    )
    card = _CARD.format(
        title=f"Diptych's built-in {name} model",
        kind="mixture-of-experts" if is_moe else "dense",
        params=model.num_parameters() / 1e6,
        architecture=type(model).__name__,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        experts=experts,
        vocab=f"{len(tokenizer):,}",
        rows=f"{config.vocab_size:,}",
        exact=result.exact,
        num_questions=result.num_questions,
        command=command,
        device=device,
        seconds=seconds,
        tokens=num_tokens / 1e6,
        out=folder,
    )
    (folder / "README.md").write_text(card)
