"""Meaningful prompts, for measurements that depend on the text: from a file, or held-out questions of the
built-in models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM

Asked = str | list[Mapping[str, Any]]
"""A text, or a chat."""


def held_out(num: int) -> list[Asked]:
    """The held-out questions on which the acceptance of the built-in head is measured."""
    from diptych.shared.tools.corpus.corpus import held_out_questions

    return [[dict(message) for message in question.messages] for question in held_out_questions(num)]


def read_prompts(file: Path) -> list[Asked]:
    """Read prompts, one per line: a chat in JSON, [{"role": ..., "content": ...}, ...], or a text. In JSON,
    "..." is a text that may have several lines. Empty lines are left out."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read prompts from {file}: {error}") from None
    prompts = [_parse(line, f"{file}, line {i}") for i, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise ValueError(f"{file} has no prompts; write one per line")
    return prompts


def _parse(line: str, where: str) -> Asked:
    if not line.lstrip().startswith(("[{", '"')):
        return line
    try:
        asked = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: {error}") from None
    if not isinstance(asked, (str, list)):
        raise ValueError(f"{where}: a prompt is a text or a list of messages, got {type(asked).__name__}")
    return asked


def encode(llm: LLM, prompts: Sequence[Asked], is_raw: bool = False) -> list[list[int]]:
    """Token ids by the model's chat template, with a text as a user's message; `is_raw`: texts without the
    template."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ValueError(f"{llm.config.model} has no tokenizer: name one with --tokenizer")
    encoded = []
    for i, asked in enumerate(prompts, start=1):
        try:
            if isinstance(asked, str) and is_raw:
                encoded.append(tokenizer.encode(asked))
            else:
                messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
                encoded.append(tokenizer.chat(messages))
        except ValueError as error:
            raise ValueError(f"prompt {i}: {error}") from None
    return encoded
