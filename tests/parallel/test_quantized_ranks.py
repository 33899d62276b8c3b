"""Tensor parallelism with quantized weights: the answers of one rank, in both panels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.config import EngineConfig
from shared.conformance.ranks import on_ranks
from shared.engine.assembly import assemble
from shared.interfaces import Collectives
from shared.types import Req, SamplingParams
from tests.parallel.tiny_ranks import LLAMA, QWEN3_MOE, answers, make_config, of_ranks

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "head_dim": 32,
}  # parts of o_proj, down_proj: 128 inputs
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | SIZES,
    "qwen3-moe": QWEN3_MOE | SIZES | {"num_experts": 4, "moe_intermediate_size": 256},
    "one layer": LLAMA | SIZES | {"num_hidden_layers": 1},
}
METHODS = ["fp8", "int8", "int4", "fp8-block"]
TOLERANCE = dict.fromkeys(METHODS, 1e-4) | {"int8": 0.1}
"""Log-probabilities in float32: the sums of a GEMM are added in another order. int8: amax / 127.5 scales the
largest value of a token to a tie of -127 and -128, which the last bit of a sum decides."""


def config_of(folder: Path, model: str, **flags: Any) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    return make_config(str(folder), **flags)


def logprobs(reqs: list[Req]) -> list[float]:
    return [entry.logprob for req in reqs for entry in req.input_logprobs + req.output_logprobs]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
def test_ranks_answer_as_one(model: str, method: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, model, quantization=method)
    alone = answers(assemble(config))
    for reqs in of_ranks(config, 2):
        assert [req.output_ids for req in reqs] == [req.output_ids for req in alone]
        assert logprobs(reqs) == pytest.approx(logprobs(alone), abs=TOLERANCE[method])


@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
def test_scales_of_the_ranks_parts_are_another_answer(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: a rank scales its part of a token by the largest value of the part."""
    config = config_of(tmp_path, model, quantization="fp8")
    alone = logprobs(answers(assemble(config)))
    monkeypatch.setattr("shared.loading.quantize._ranks_of_inputs", lambda *args: None)
    assert logprobs(of_ranks(config, 2)[0]) != pytest.approx(alone, abs=100 * TOLERANCE["fp8"])


def ask(config: EngineConfig, tp: Collectives | None = None) -> list[list[int]]:
    """Two greedy requests of a few tokens: Triton's interpreter is slow."""
    scheduler = assemble(config, clock=lambda: 0.0, tp=tp).scheduler
    params = SamplingParams(temperature=0.0, max_new_tokens=4)
    reqs = [Req("a", [5, 9, 31], params, seed=0), Req("b", [7] * 5, params, seed=1)]
    for req in reqs:
        scheduler.add_request(req)
    while scheduler.has_work():
        scheduler.step()
    return [req.output_ids for req in reqs]


@pytest.mark.parametrize("method", ["fp8", *(pytest.param(m, marks=pytest.mark.full) for m in METHODS[1:])])
def test_optimized_ranks_answer_as_one(method: str, tmp_path: Path) -> None:
    """Through Triton's interpreter, a rank at a time."""
    use = {"attention": "reference"}
    config = config_of(tmp_path, "one layer", quantization=method, panel="optimized", use=use)
    expected = ask(config)
    assert expected == ask(config.updated(panel="reference"))
    assert on_ranks(2, lambda tp: ask(config.updated(tp=2), tp), in_turn=True) == [expected] * 2


def test_a_part_of_several_ranks_has_no_token_scales(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3-moe", quantization="fp8")
    with pytest.raises(ValueError, match=r"tp=4, ep=2: .*experts.*2 ranks of its part; use ep=4, or ep=1"):
        on_ranks(4, lambda tp: assemble(config.updated(tp=4, ep=2), tp=tp))
