"""Flags of speculative decoding: what goes together, and what follows from what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diptych.shared import registry
from diptych.shared.config import EngineConfig, draft_shape, parse_config
from diptych.shared.config.speculation_flags import check_windows
from diptych.shared.engine.build.assembly import assemble
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.types import DraftShape


def shape(**flags: Any) -> DraftShape:
    return draft_shape(EngineConfig(**{"speculative": "ngram", **flags}))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (8, 4, 12)),
        ({"speculative": "eagle3", "speculative_draft_model": "x"}, (5, 4, 16)),
        ({"speculative": "standalone", "speculative_draft_model": "x"}, (3, 1, 4)),
        ({"speculative": "nextn", "speculative_draft_model": "x", "speculative_num_steps": 1}, (1, 1, 2)),
        ({"speculative_topk": 1}, (8, 1, 9)),
        ({"speculative_topk": 1, "speculative_num_draft_tokens": 6}, (5, 1, 6)),
        ({"speculative_topk": 1, "speculative_num_steps": 5}, (5, 1, 6)),
        ({"speculative_topk": 2, "speculative_num_steps": 1}, (1, 2, 3)),
        ({"speculative_num_draft_tokens": 16}, (8, 4, 16)),
    ],
)
def test_what_is_not_given_follows(flags: dict[str, Any], expected: tuple[int, int, int]) -> None:
    assert shape(**flags) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"speculative": None, "speculative_topk": 2}, "speculative_topk needs speculative="),
        ({"speculative": "eagle"}, "speculative=eagle needs speculative_draft_model"),
        ({"speculative_draft_model": "x"}, "drafts without a model"),
        ({"enable_mixed_chunk": True}, "enable_mixed_chunk does not work with speculative=ngram"),
        (
            {"num_continuous_decode_steps": 2},
            "num_continuous_decode_steps=2 does not work with speculative=n",
        ),
        ({"speculative_num_draft_tokens": 1}, "there must be at least 2"),
        (
            {"speculative_topk": 1, "speculative_num_steps": 3, "speculative_num_draft_tokens": 8},
            "exactly 4 nodes",
        ),
        (
            {"speculative_topk": 2, "speculative_num_steps": 1, "speculative_num_draft_tokens": 8},
            "at most 3 nodes",
        ),
        ({"speculative_num_steps": 0}, "speculative_num_steps must be an integer >= 1"),
        ({"speculative": "medusa"}, "speculative must be one of eagle, eagle3, nextn, dflash, "),
    ],
)
def test_what_contradicts_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape(**flags)


def test_a_draft_model_must_fit() -> None:
    flags = {"model": "tiny-dense", "panel": "reference", "device": "cpu", "speculative": "standalone"}
    with pytest.raises(ValueError, match="no-such-model"):
        assemble(EngineConfig(**flags, speculative_draft_model="no-such-model"))


def test_the_pool_counts_the_drafters_kv_and_rows_are_longer() -> None:
    flags = {"model": "tiny-dense", "panel": "reference", "device": "cpu", "context_len": 256}
    flags |= {"max_total_tokens": 512, "speculative_num_steps": 5, "speculative_topk": 4}
    flags |= {"speculative_num_draft_tokens": 8, "speculative": "standalone"}
    plain = assemble(EngineConfig(model="tiny-dense", panel="reference", device="cpu", max_total_tokens=512))
    drafting = assemble(EngineConfig(**flags, speculative_draft_model="tiny-dense"))
    assert drafting.memory.bytes_per_token == 2 * plain.memory.bytes_per_token
    # Drafting takes the newest token and four steps of four beams, verification eight nodes.
    assert drafting.parts.req_to_token_pool.max_len == 256 + 17


@pytest.mark.parametrize("panel", ["reference", "optimized"])
@pytest.mark.parametrize(
    ("num_token_ids", "context_len", "message"),
    [(10**6, 128, "token ids, and the target writes 1000000"), (64, 10**6, "set context_len=")],
)
def test_a_draft_model_that_does_not_fit_is_refused(
    panel: str, num_token_ids: int, context_len: int, message: str
) -> None:
    drafter = registry.load("drafter", f"diptych.{panel}.speculative.standalone:StandaloneDrafter")
    config = EngineConfig(
        speculative="standalone", speculative_draft_model="tiny-dense", context_len=context_len
    )
    with pytest.raises(ValueError, match=message):
        drafter(config, SimpleNamespace(num_token_ids=num_token_ids))


@pytest.mark.parametrize(
    ("attention", "model", "top_k", "is_refused"),
    [
        ("triton+flashinfer", "gemma2", 2, True),
        ("fa3", "mistral-window", 2, True),
        ("fa3", "mistral-window", 1, False),
        ("fa3", "qwen3-yarn", 2, False),
        ("fa3+triton", "gemma2", 2, False),
        ("optimized", "gpt-oss", 2, False),
    ],
)
def test_trees_with_windows_need_attention_that_counts_along_the_branch(
    attention: str, model: str, top_k: int, is_refused: bool
) -> None:
    config = EngineConfig(speculative="ngram", speculative_topk=top_k, use={"attention": attention})
    if not is_refused:
        check_windows(config, parse_config(CONFIGS[model]))
        return
    with pytest.raises(ValueError, match=f"speculative_topk={top_k} with attention=.*use attention=triton"):
        check_windows(config, parse_config(CONFIGS[model]))
