"""Several ranks of the other families: the answers of one rank, with windows, sinks, chunked and latent
attention, and shared experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diptych.optimized.kernels.portable import INTERPRETED
from diptych.reference.models import olmo
from diptych.shared.config import EngineConfig
from diptych.shared.engine.build.assembly import Assembly, assemble
from diptych.shared.interfaces import Collectives
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.tools.conformance.oracles.rank_threads import on_ranks
from diptych.shared.types import Req, SamplingParams
from tests.parallel.tiny_ranks import answers, make_config

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt-oss": CONFIGS["gpt-oss"],
    "gemma3": CONFIGS["gemma3"],
    "llama4": CONFIGS["llama4"] | {"num_local_experts": 6},
    "granite": CONFIGS["granite"],
    "olmo3": CONFIGS["olmo3"],
    "minimax-m2": CONFIGS["minimax-m2"],
    "deepseek-v3": CONFIGS["deepseek-v3"] | {"num_attention_heads": 4, "num_key_value_heads": 4},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "tp, pp": {"tp": 2, "pp": 2},
    "ep": {"tp": 2, "ep": 2},
    "ep, all-to-all": {"tp": 2, "ep": 2, "use": {"expert_dispatch": "all_to_all"}},
}
FAST_PP = ("gemma3", "deepseek-v3")
TOLERANCE = 1e-4
"""Log-probabilities in float32: a sum over ranks is rounded once more for each rank."""


def is_fast(family: str, layout: str) -> bool:
    own = "ep" if "num_experts_per_tok" in FAMILIES[family] else "tp"
    return layout == own or (layout == "pp" and family in FAST_PP)


def grid() -> list[Any]:
    return [
        pytest.param(family, layout, marks=[] if is_fast(family, layout) else pytest.mark.full)
        for family in FAMILIES
        for layout in LAYOUTS
        if "ep" not in LAYOUTS[layout] or "num_experts_per_tok" in FAMILIES[family]
    ]


def logprobs(reqs: list[Req]) -> list[float | None]:
    return [entry.logprob for req in reqs for entry in req.input_logprobs + req.output_logprobs]


@pytest.mark.parametrize(("family", "layout"), grid())
def test_ranks_answer_as_one(family: str, layout: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family]))
    alone = make_config(str(tmp_path), chunked_prefill_size=8, page_size=4)
    expected, config = answers(assemble(alone)), alone.updated(**LAYOUTS[layout])

    def run(group: Collectives) -> tuple[list[Req], Assembly]:
        assembly = assemble(config, clock=lambda: 0.0, tp=group)
        return answers(assembly), assembly  # which holds the messages that the other rank has not received

    for reqs, _ in on_ranks(config.num_ranks, run, config=config):
        assert [req.output_ids for req in reqs] == [req.output_ids for req in expected]
        assert logprobs(reqs) == pytest.approx(logprobs(expected), abs=TOLERANCE)


def test_a_norm_over_the_heads_of_one_rank_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["olmo3"]))
    config = make_config(str(tmp_path))
    expected = logprobs(answers(assemble(config)))
    monkeypatch.setattr(olmo, "norm_over_ranks", lambda norm, x, tp: norm(x))
    both = on_ranks(2, lambda tp: answers(assemble(config.updated(tp=2), clock=lambda: 0.0, tp=tp)))
    assert logprobs(both[0]) != pytest.approx(expected, abs=10 * TOLERANCE)


def ask(config: EngineConfig, tp: Collectives | None = None) -> list[int]:
    """The answer to a request of a few tokens: Triton's interpreter is slow."""
    scheduler = assemble(config, clock=lambda: 0.0, tp=tp).scheduler
    req = Req("a", [5, 9, 31, 7], SamplingParams(temperature=0.0, max_new_tokens=4), seed=0)
    scheduler.add_request(req)
    while scheduler.has_work():
        scheduler.step()
    return req.output_ids


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on CPU tensors")
@pytest.mark.parametrize(
    "family",
    [
        "olmo3",
        *(
            pytest.param(family, marks=pytest.mark.full)
            for family in FAMILIES
            if family not in ("olmo3", "gemma3")
        ),
    ],
)
def test_optimized_ranks_answer_as_one(family: str, tmp_path: Path) -> None:
    """Biases, shared experts and norms over all heads, which are divided, through Triton's interpreter. Ranks
    have whole experts."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family]))
    use = {} if family == "deepseek-v3" else {"attention": "reference"}
    config = make_config(str(tmp_path), panel="optimized", disable_cuda_graph=True, use=use)
    expected = ask(config)
    ep = 2 if "num_experts_per_tok" in FAMILIES[family] else 1
    assert on_ranks(2, lambda tp: ask(config.updated(tp=2, ep=ep), tp), in_turn=True) == [expected] * 2
