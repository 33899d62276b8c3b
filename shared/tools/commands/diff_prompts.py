"""The prompts that `diptych diff` compares engines on."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM

QUESTIONS = (
    "What is 12 + 30?",
    "Mara is a baker. Mara lives in Bergen. Otto bought 12 eggs. Otto has a red notebook. "
    "In which city does Mara live?",
    "Write a JSON record about a baker named Mara.",
)
RANDOM_PROMPT_LENS = (5, 17, 40)  # for a model without a tokenizer


def make_prompts(llm: LLM, texts: list[str] | None, raw: bool, seed: int) -> list[list[int]]:
    """Token ids of the texts or, without texts, of the built-in questions; random ids for a model without
    tokenizer."""
    if llm.tokenizer is None:
        if texts:
            raise ValueError(f"{llm.config.model} has no tokenizer: it takes no --prompt")
        generator = random.Random(seed)
        size = llm.model_config.vocab_size
        return [[generator.randrange(size) for _ in range(length)] for length in RANDOM_PROMPT_LENS]
    return encode_prompts(llm.tokenizer, texts, raw)


def encode_prompts(tokenizer: Any, texts: list[str] | None, raw: bool) -> list[list[int]]:
    """Token ids of the texts or, without texts, of the built-in questions."""
    texts = texts or list(QUESTIONS)
    if raw:
        return [tokenizer.encode(text) for text in texts]
    return [tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
