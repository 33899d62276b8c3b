"""Deterministic mode: the bits of an answer depend on its request alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diptych.shared.config import EngineConfig
from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.types import GenerateOutput
from tests.engine.deterministic_answers import (
    DETERMINISTIC_SWITCHES,
    all_at_once,
    engine,
    expect_same_bits,
    one_by_one,
)

REFERENCE: dict[str, Any] = {"device": "cpu", "panel": "reference"}
NUM_NEW_TOKENS = 8


@pytest.fixture(scope="module", params=["tiny-moe", pytest.param("tiny-dense", marks=pytest.mark.full)])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(model: str) -> list[GenerateOutput]:
    return one_by_one(engine(model, **REFERENCE), NUM_NEW_TOKENS)


def test_without_the_mode_bits_differ(model: str, alone: list[GenerateOutput]) -> None:
    """What the other tests compare can tell."""
    with pytest.raises(Mismatch, match="logprobs"):
        expect_same_bits(
            "off", all_at_once(engine(model, **REFERENCE, deterministic=False), NUM_NEW_TOKENS), alone
        )


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, id=",".join(f"{k}={v}" for k, v in flags.items()), marks=marks)
        for flags, marks in zip(DETERMINISTIC_SWITCHES, [[], *[[pytest.mark.full]] * 9])
    ],
)
def test_the_reference(model: str, alone: list[GenerateOutput], flags: dict[str, Any]) -> None:
    llm = engine(model, **REFERENCE, **flags)
    crowded = all_at_once(llm, NUM_NEW_TOKENS)
    expect_same_bits("crowded", crowded, alone)
    if "schedule_conservativeness" in flags:
        assert any(output.num_retractions for output in crowded)
    expect_same_bits("warm", all_at_once(llm, NUM_NEW_TOKENS), alone)


OPTIMIZED: dict[str, Any] = {"panel": "optimized", "dtype": "bfloat16"}
SETTINGS = [
    pytest.param(flags, id=",".join(f"{k}={v}" for k, v in flags.items())) for flags in DETERMINISTIC_SWITCHES
]


@pytest.fixture(scope="module")
def optimized_alone(model: str) -> list[GenerateOutput]:
    return one_by_one(engine(model, **OPTIMIZED), NUM_NEW_TOKENS)


def expect_optimized(model: str, alone: list[GenerateOutput], flags: dict[str, Any]) -> None:
    llm = engine(model, **OPTIMIZED, **flags)
    expect_same_bits("crowded", all_at_once(llm, NUM_NEW_TOKENS), alone)
    expect_same_bits("warm", all_at_once(llm, NUM_NEW_TOKENS), alone)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", SETTINGS)
def test_the_optimized_panel(
    model: str, optimized_alone: list[GenerateOutput], flags: dict[str, Any]
) -> None:
    expect_optimized(model, optimized_alone, flags)


@pytest.mark.full
@pytest.mark.parametrize("flags", SETTINGS)
def test_the_optimized_panel_interpreted(
    model: str, optimized_alone: list[GenerateOutput], flags: dict[str, Any]
) -> None:
    expect_optimized(model, optimized_alone, flags)


@pytest.mark.full
def test_the_optimized_panel_on_two_short_prompts() -> None:
    """One by one, and mixed in one batch."""
    alone = one_by_one(engine("tiny-dense", **OPTIMIZED), 2, num_prompts=2)
    llm = engine("tiny-dense", **OPTIMIZED, chunked_prefill_size=8, enable_mixed_chunk=True)
    expect_same_bits("together", all_at_once(llm, 2, num_prompts=2), alone)


@pytest.mark.full
def test_half_types_too(model: str) -> None:
    flags = {**REFERENCE, "dtype": "bfloat16"}
    alone = one_by_one(engine(model, **flags), NUM_NEW_TOKENS)
    crowded = all_at_once(engine(model, **flags, chunked_prefill_size=7), NUM_NEW_TOKENS)
    expect_same_bits("crowded", crowded, alone)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tp": 2}, "deterministic=True does not work with tp=2"),
        ({"dp_attention": True}, "dp_attention=True: experts"),
        ({"use": {"attention": "triton"}}, "does not work with use attention=triton"),
        ({"speculative": "ngram"}, "speculative_topk=4.*set speculative_topk=1"),
    ],
)
def test_what_cannot_be_deterministic_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(deterministic=True, **flags)


def test_latent_attention_needs_the_reference(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["deepseek-v2-lite"]))
    with pytest.raises(ValueError, match="latent attention in panel=reference only"):
        engine(str(tmp_path), **OPTIMIZED, load_format="dummy")


@pytest.mark.full
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_quantized_layers_too(model: str, quantization: str) -> None:
    flags: dict[str, Any] = {**OPTIMIZED, "quantization": quantization}
    alone = one_by_one(engine(model, **flags), 2, num_prompts=2)
    llm = engine(model, **flags, chunked_prefill_size=8, enable_mixed_chunk=True)
    expect_same_bits("together", all_at_once(llm, 2, num_prompts=2), alone)
