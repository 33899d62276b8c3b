"""What a number format or a mode changes: distributions of the next token of real texts, and answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from diptych import LLM
from diptych.shared.sampling import logprobs
from diptych.shared.tools.conformance.whole_engine.formats import FORMATS
from tests.real.fetch import FILE

TEXTS = sorted((Path(__file__).parent / "texts").glob("*.txt"))
PROSE, CODE = (path.read_text(encoding="utf-8") for path in TEXTS)
FP32: dict[str, Any] = {"dtype": "float32"}

FORMAT_FLAGS = {name: flags for name, flags in FORMATS.items() if name != "fp32"}
FORMAT_FLAGS["fp8+fp8-kv"] = {**FORMATS["fp8"], **FORMATS["fp8-kv"]}
"""Formats without a dtype are those of a model in bfloat16."""

MODES: dict[str, dict[str, Any]] = {
    "chunks": {"chunked_prefill_size": 64, "enable_mixed_chunk": True},
    "pages": {"page_size": 16},
    "deterministic": {"deterministic": True},
    "n-gram drafts": {"speculative": "ngram"},
}
"""Each in float32, where only the order of sums may differ from the plain engine."""

QUESTIONS = ["Write three sentences about the sea.", "Why is the sky blue?"]


def engine(panel: str, **flags: Any) -> LLM:
    return LLM(str(FILE), **{"panel": panel, "max_total_tokens": 4096, **flags})


@contextmanager
def recorded(rows: list[torch.Tensor]) -> Iterator[None]:
    """Adds the log-probabilities of all tokens at each prompt position that is asked for."""
    original = logprobs.ranked_logprobs_of

    def record(logits: torch.Tensor, *rest: Any) -> Any:
        rows.append(logits.float().log_softmax(-1).cpu())
        return original(logits, *rest)

    with patch.object(logprobs, "ranked_logprobs_of", record):
        yield


def distributions(llm: LLM, ids: list[int], start: int = 0) -> torch.Tensor:
    """Log-probabilities [num_positions, vocab_size] of the tokens from `start` on, but not of the first, each
    after the text's own tokens."""
    rows: list[torch.Tensor] = []
    with recorded(rows):
        llm.generate(ids, max_tokens=0, return_logprob=True, logprob_start_len=start, progress=False)
    found = torch.cat(rows)
    assert len(found) == len(ids) - max(start, 1)
    return found


def compared(expected: torch.Tensor, found: torch.Tensor, ids: Sequence[int]) -> dict[str, float]:
    """KL divergences from `expected` in nats, the change of the text's own log-probabilities, and the share
    of positions with the same best token."""
    next_ids = torch.tensor(ids)[-len(found) :, None]
    ours, theirs = (each.gather(1, next_ids)[:, 0].double() for each in (found, expected))
    kl = (expected.exp().double() * (expected - found).double()).sum(-1).clamp(min=0)
    return {
        "nll": -float(ours.mean()),
        "rise": float((theirs - ours).mean()),
        "rms": float((ours - theirs).square().mean().sqrt()),
        "kl": float(kl.mean()),
        "largest_kl": float(kl.max()),
        "same_best": float((expected.argmax(-1) == found.argmax(-1)).double().mean()),
        "num_tokens": len(found),
    }


def text_ids(llm: LLM, num_prose: int = 100, num_code: int = 60) -> list[int]:
    """Prose, then code."""
    assert llm.tokenizer is not None
    prose, code = llm.tokenizer.encode(PROSE), llm.tokenizer.encode(CODE)
    return [*prose[:num_prose], *code[:num_code]]


def answers(llm: LLM, num_tokens: int = 8) -> list[list[int]]:
    """Greedy answers to several questions at once, of at most `num_tokens` tokens."""
    prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    found: Any = llm.generate(prompts, temperature=0, max_tokens=num_tokens, progress=False)
    return [each.output_ids for each in found]
