"""Tensor parallelism with quantized weights: the answers of one rank, in both panels."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.engine.processes.ranks import collectives_of
from diptych.shared.interfaces import Collectives
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from diptych.shared.types import Req, SamplingParams
from tests.parallel.tiny_ranks import LLAMA, QWEN3_MOE, make_config
from tests.planted import Bug, Bugs

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "head_dim": 32,
}  # parts of o_proj, down_proj: 128 inputs
HEADS = {
    "num_attention_heads": 8,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | SIZES,
    "qwen3-moe": QWEN3_MOE | SIZES | {"num_experts": 4, "moe_intermediate_size": 256},
    "hybrid": HYBRID_CONFIGS["qwen3.5"] | SIZES | HEADS,
    "one layer": LLAMA | SIZES | {"num_hidden_layers": 1},
}
METHODS = ["fp8", "int8", "int4", "fp8-block", "nvfp4"]
MEDIAN = dict.fromkeys(METHODS, 1e-4) | {"int8": 0.01}
"""Of the differences of log-probabilities in float32. Ranks add the sums of a GEMM in another order. The last
bit of a sum may decide how an input is rounded to 8 bits. Then the token and those behind it differ by more:
with int8 many tokens, as amax / 127.5 scales the largest value of each to a tie of -127 and -128."""
LARGEST = dict.fromkeys(METHODS, 0.5) | dict.fromkeys(("int4", "nvfp4"), 1e-4)
"""Of the same differences. 1e-4: inputs are not rounded. 0.5: a token may be given to another expert."""


def config_of(folder: Path, model: str, **flags: Any) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    return make_config(str(folder), **flags)


def answers(assembly: Assembly) -> list[Req]:
    """Greedy requests with the log-probabilities of their prompts; one arrives in each step."""
    asked = {"temperature": 0.0, "max_new_tokens": 8, "return_logprob": True, "logprob_start_len": 0}
    scheduler, reqs = assembly.scheduler, []
    for i in range(5):
        prompt = [(3 * j * (1 + i % 2) + 7 * i * j * j + 1) % 131 for j in range(21 + 4 * i)]
        reqs.append(Req(f"r{i}", prompt, SamplingParams(**asked), seed=i))
        scheduler.add_request(reqs[-1])
        scheduler.step()
    while scheduler.has_work():
        scheduler.step()
    return reqs


def of_ranks(config: EngineConfig) -> list[list[Req]]:
    """The requests of each of two ranks; no clock differs."""

    def run(tp: Collectives) -> list[Req]:
        return answers(assemble(config.updated(tp=2), clock=lambda: 0.0, tp=tp))

    return on_ranks(2, run, impl=collectives_of(config))


def differences(reqs: list[Req], alone: list[Req]) -> list[float]:
    """Differences of log-probabilities: of all prompts, and of answers up to the first token that differs.
    Rounding parts answers at near ties, where the best log-probabilities are close. Behind it the texts are
    not the same."""
    found = []
    for req, other in zip(reqs, alone):
        for ours, theirs in zip(req.input_logprobs[1:], other.input_logprobs[1:], strict=True):
            found.append(abs(ours.logprob - theirs.logprob))
        for ours, theirs in zip(req.output_logprobs, other.output_logprobs, strict=True):
            found.append(abs(ours.logprob - theirs.logprob))
            if ours.token_id != theirs.token_id:
                break
    return found


@pytest.mark.parametrize(
    ("model", "method"),
    [
        pytest.param(model, method, marks=[] if i % 2 == j else pytest.mark.full)
        for i, method in enumerate(METHODS)
        for j, model in enumerate(["llama", "qwen3-moe"])
    ]
    + [("hybrid", "fp8"), pytest.param("hybrid", "fp8-block", marks=pytest.mark.full)],
)
def test_ranks_answer_as_one(model: str, method: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, model, quantization=method)
    alone = answers(assemble(config))
    ranks = of_ranks(config)
    assert [req.output_ids for req in ranks[0]] == [req.output_ids for req in ranks[1]]
    for reqs in ranks:
        found = differences(reqs, alone)
        assert median(found) <= MEDIAN[method]
        assert max(found) <= LARGEST[method]


BUGS = Bugs("scales of ranks", "diptych.shared.loading.quantize._ranks_of_inputs", "differences")
for _name in ("llama-fp8", "llama-int8", "qwen3-moe-fp8", "qwen3-moe-int8"):
    _what = "A rank scales its part of a token by the largest value of the part."
    BUGS.add(_name, lambda *_: None, _what)


@BUGS.found_by()
def test_scales_of_the_ranks_parts_are_another_answer(
    bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    model, _, method = bug.name.rpartition("-")
    config = config_of(tmp_path, model, quantization=method)
    alone = answers(assemble(config))
    bug.plant_in(monkeypatch)
    return median(differences(of_ranks(config)[0], alone)) > MEDIAN["int8"] >= MEDIAN[method]


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
