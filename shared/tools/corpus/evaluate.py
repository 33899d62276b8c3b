"""Exact-match score on the held-out questions, for a model folder or any callable.

python -m diptych.shared.tools.corpus.evaluate shared/assets/tiny-dense
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.corpus.corpus import held_out_questions
from diptych.shared.tools.corpus.exchange import Message, Question

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM

# From chats that end with a user turn to the assistant's texts, in the same order.
AnswerFn = Callable[[list[list[Message]]], list[str]]

# The longest right answer (counting to 100) has fewer tokens than this.
MAX_NEW_TOKENS = 400


@dataclass(frozen=True)
class Mistake:
    question: Question
    given: str


@dataclass(frozen=True)
class Score:
    """Fractions answered exactly right, overall and by kind, and what went wrong."""

    num_questions: int
    by_kind: dict[str, float]
    mistakes: list[Mistake]

    @property
    def exact(self) -> float:
        return 1 - len(self.mistakes) / self.num_questions


def score(answer_fn: AnswerFn, questions: list[Question]) -> Score:
    """Ask every question; an answer counts only if it is the expected text to the letter."""
    answers = answer_fn([question.messages for question in questions])
    if len(answers) != len(questions):
        raise ValueError(f"{len(questions)} questions, but answer_fn returned {len(answers)} answers")
    right: dict[str, list[bool]] = {}
    mistakes = []
    for question, answer in zip(questions, answers):
        right.setdefault(question.kind, []).append(answer == question.answer)
        if answer != question.answer:
            mistakes.append(Mistake(question, answer))
    by_kind = {kind: sum(results) / len(results) for kind, results in right.items()}
    return Score(len(questions), by_kind, mistakes)


def transformers_answers(model: Any, tokenizer: Any, batch_size: int) -> AnswerFn:
    """Greedy answers by transformers' `generate`, in left-padded batches of similar length."""
    import torch

    def answer(chats: list[list[Message]]) -> list[str]:
        prompts = [
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats
        ]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers = [""] * len(prompts)
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            inputs = tokenizer(
                [prompts[index] for index in indices],
                padding=True,
                padding_side="left",
                add_special_tokens=False,
                return_tensors="pt",
            ).to(model.device)
            with torch.inference_mode():
                outputs = model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    max_new_tokens=MAX_NEW_TOKENS,
                    do_sample=False,
                )
            new_ids = outputs[:, inputs["input_ids"].shape[1] :]
            for index, text in zip(indices, tokenizer.batch_decode(new_ids, skip_special_tokens=True)):
                answers[index] = text
        return answers

    return answer


def engine_answers(llm: LLM, after_step: Callable[[int], None] = lambda num_steps: None) -> AnswerFn:
    """Greedy answers by our own engine. `after_step` is called with the number of steps so far."""
    from diptych.shared.types import SamplingParams

    greedy = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0.0)

    def answer(chats: list[list[Message]]) -> list[str]:
        collectors = [llm.submit(llm.chat_prompt(chat), greedy)[0] for chat in chats]
        num_steps = 0
        while llm.step():
            num_steps += 1
            after_step(num_steps)
        return [collector.whole().text for collector in collectors]

    return answer


def load_answers(folder: Path, device: str = "cpu") -> AnswerFn:
    """A model folder's answers through transformers, its weights run in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(device).eval()
    # Small batches of similar length suit a CPU: padding costs it time.
    batch_size = 16 if device == "cpu" else 100
    return transformers_answers(model, AutoTokenizer.from_pretrained(folder), batch_size)


def main(
    folder: Annotated[Path, typer.Argument(help="a model folder in Hugging Face format")],
    num_questions: Annotated[int, typer.Option(help="how many held-out questions")] = 400,
    device: Annotated[str, typer.Option(help="cpu, cuda or mps")] = "cpu",
    show_mistakes: Annotated[int, typer.Option(help="print so many wrong answers")] = 0,
) -> None:
    """Score a model on the held-out questions."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    result = score(load_answers(folder, device), held_out_questions(num_questions))
    table = Table("kind", "exact", title=f"{folder}: {result.exact:.2%} of {result.num_questions} questions")
    for kind, exact in sorted(result.by_kind.items()):
        table.add_row(kind, f"{exact:.1%}")
    console = Console()
    console.print(table)
    for mistake in result.mistakes[:show_mistakes]:
        prompt = mistake.question.messages[-1]["content"]
        console.print(
            f"[bold]{mistake.question.kind}[/bold] {escape(prompt[-200:])}\n"
            f"  expected: {escape(mistake.question.answer)}\n  given:    {escape(mistake.given)}"
        )


if __name__ == "__main__":
    typer.run(main)
