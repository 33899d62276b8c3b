"""How much of what the built-in EAGLE-3 head drafts is accepted, on held-out questions, through the engine.

python -m diptych.shared.tools.training.acceptance shared/assets/tiny-dense-eagle3
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.corpus.corpus import held_out_questions
from diptych.shared.tools.corpus.evaluate import MAX_NEW_TOKENS
from diptych.shared.types import DraftShape, SamplingParams, SpeculationStats

_CARD = """\
# Diptych's built-in EAGLE-3 head

Drafts for `tiny-dense`: one layer of {params:.1f} M parameters that reads the target's hidden states and
guesses its next tokens. It is there to see speculative decoding at work without a download.

- `LlamaForCausalLMEagle3`, the public format. It takes the inputs of the target's layers {layers}, shares the
  target's embedding, and drafts over {vocabulary}.
- bfloat16 weights, trained on texts of up to {row_len:,} tokens from `shared/tools/corpus/corpus.py`,
  {draft_steps} drafted steps deep (training-time test).
- Held-out questions, the right answers as text{before}: the target's next token is the head's best guess,
  or among its best four,

  | drafted step | best | best four |
  |---|---|---|
{steps}

- Held-out questions, greedy, float32, through the reference panel: tokens per verification, the bonus token
  included,

  | steps / top-k / nodes | tokens per verification | questions |
  |---|---|---|
{acceptance}

Made by an earlier form of `train_dflash --eagle3`,

    {commands}

on {device} in {seconds:.0f} s ({tokens:.1f} M tokens). Tokens per verification are measured by

    python -m diptych.shared.tools.training.acceptance shared/assets/tiny-dense-eagle3
"""


def measure_acceptance(head: str, shape: DraftShape, num_questions: int, **flags: Any) -> SpeculationStats:
    """Greedy answers of tiny-dense to held-out questions."""
    llm = LLM(
        model="tiny-dense",
        speculative="eagle3",
        speculative_draft_model=head,
        speculative_num_steps=shape.num_steps,
        speculative_topk=shape.top_k,
        speculative_num_draft_tokens=shape.num_draft_tokens,
        **{"max_total_tokens": 16384, **flags},
    )
    assert llm.tokenizer is not None
    prompts = [llm.tokenizer.chat(question.messages) for question in held_out_questions(num_questions)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=MAX_NEW_TOKENS))
    return llm.scheduler.stats().speculation


def save_card(folder: Path) -> None:
    """README.md, from training.json and config.json."""
    record = json.loads((folder / "training.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    layers = [n + 1 for n in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    steps = [
        f"  | {i} | {means['top1']:.1%} | {means['top4']:.1%} |"
        for i, means in enumerate(record["held_out"]["steps"], start=1)
    ]
    acceptance = [
        f"  | {shape} | **{found['with_bonus']:.2f}** | {found['num_questions']} |"
        for shape, found in record.get("acceptance", {}).items()
    ]
    cut, commands = record.get("draft_vocabulary"), [record["command"]]
    vocabulary, before = "the target's whole vocabulary", ""
    if cut is not None:
        commands.append(cut["command"])
        vocabulary = (
            f"{cut['size']:,} of the target's {config['vocab_size']:,}\n  ids, which are "
            f"{cut['share_of_tokens']:.1%} of what assistants say in the training text"
        )
        before = " and the head still whole"
    card = _CARD.format(
        vocabulary=vocabulary,
        before=before,
        params=record["num_parameters"] / 1e6,
        layers=", ".join(map(str, layers)),
        row_len=record["row_len"],
        draft_steps=record["draft_steps"],
        steps="\n".join(steps),
        acceptance="\n".join(acceptance),
        commands="\n    ".join(commands),
        device=record["device"],
        seconds=record["seconds"],
        tokens=record["num_tokens"] / 1e6,
    )
    (folder / "README.md").write_text(card)


def main(
    folder: Annotated[Path, typer.Argument(help="the folder of the draft model")],
    steps: Annotated[int, typer.Option(help="deepest draft")] = 5,
    top_k: Annotated[int, typer.Option(help="beams kept while drafting")] = 4,
    draft_tokens: Annotated[int, typer.Option(help="nodes of a tree")] = 16,
    questions: Annotated[int, typer.Option(help="held-out questions")] = 60,
    record: Annotated[
        bool, typer.Option(help="write it into training.json, and the built-in head's README.md")
    ] = False,
) -> None:
    """Answer held-out questions speculatively, and count."""
    shape = DraftShape(steps, top_k, draft_tokens)
    stats = measure_acceptance(str(folder), shape, questions)
    typer.echo(
        f"{stats.acceptance_length_with_bonus:.3f} tokens per verification, the bonus token included; "
        f"{stats.acceptance_rate:.1%} of the drafted depth accepted ({stats.num_verifications} verifications)"
    )
    if record:
        path = folder / "training.json"
        written = json.loads(path.read_text())
        written.setdefault("acceptance", {})["/".join(map(str, shape))] = {
            "num_questions": questions,
            "with_bonus": round(stats.acceptance_length_with_bonus, 3),
            "rate": round(stats.acceptance_rate, 4),
            "num_verifications": stats.num_verifications,
        }
        path.write_text(json.dumps(written, indent=2) + "\n")
        if "held_out" in written:  # of the built-in head
            save_card(folder)


if __name__ == "__main__":
    typer.run(main)
