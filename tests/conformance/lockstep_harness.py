"""Two engines on the built-in models, and files to plant differences with."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.diff.lockstep import Lockstep
from diptych.shared.tools.conformance.diff.outcome import Divergence, Outcome
from diptych.shared.types import SamplingParams

NUM_NEW = 5
QUESTIONS = ("What is 12 + 30?", "What is 12 + 31? Mara lives in Bergen.", "Write a JSON record about Mara.")


def engine(**flags: Any) -> LLM:
    return LLM(**{"device": "cpu", "panel": "reference", "max_total_tokens": 2048, **flags})


def compare(
    a: dict[str, Any] | None = None,
    b: dict[str, Any] | None = None,
    *,
    max_steps: int | None = None,
    num_new: int = NUM_NEW,
    **options: Any,
) -> Outcome:
    engines = engine(**(a or {})), engine(**(b or {}))
    params = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
    return Lockstep(*engines, **options).run(prompts(engines[0]), params, max_steps)


def prompts(llm: LLM) -> list[list[int]]:
    return [llm.tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]


def num_tokens(llm: LLM) -> int:
    """Tokens that a whole run computes: the last sampled one has no KV."""
    return sum(len(prompt) + NUM_NEW - 1 for prompt in prompts(llm))


def plant(folder: Path, code: str, name: str = "planted.py") -> str:
    file = folder / name
    file.write_text(textwrap.dedent(code))
    return str(file)


def divergence_of(outcome: Outcome) -> Divergence:
    assert outcome.divergence is not None
    return outcome.divergence


MODEL = """
    from diptych.reference import models
    from diptych.reference.decoder import DecoderForCausalLM

    class Bad(DecoderForCausalLM):
        {body}

    def model_class(architecture):
        return Bad
"""
