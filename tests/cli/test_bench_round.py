"""`diptych bench round`: its pieces are what a round does, and the command says what they cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from diptych.shared.config import draft_shape
from diptych.shared.engine.llm import LLM
from diptych.shared.tools.bench.round_cost import engine_flags, measure_round, pieces_of

EAGLE = {
    "speculative": "eagle3",
    "speculative_draft_model": "tiny-dense-eagle3",
    "speculative_num_steps": 2,
    "speculative_topk": 2,
    "speculative_num_draft_tokens": 5,
}


def engine(**flags: object) -> LLM:
    return LLM(**{"device": "cpu", "panel": "reference", "max_total_tokens": 256, **flags})


@pytest.mark.parametrize("drafter", ["reference", "optimized"])
def test_pieces_are_those_of_a_round(drafter: str) -> None:
    llm = engine(**EAGLE, use={"drafter": drafter})
    pool = llm.assembly.parts.req_to_token_pool
    num_rows = pool.available_size()
    with pieces_of(llm.assembly.parts, draft_shape(llm.config), 3, 20) as pieces:
        assert list(pieces) == ["draft", "verify", "accept", "extend"]
        tree, (output, sampled), accepted = (pieces[name]() for name in ("draft", "verify", "accept"))
        assert tree.token_ids.shape == (3, 5)
        assert output.next_token_logits.shape[0] == len(sampled.next_token_ids) == 15
        assert accepted.node_indices.shape == (3, 3)
        pieces["extend"]()
        assert pool.available_size() == num_rows - 3
    assert pool.available_size() == num_rows


def test_an_engine_that_does_not_speculate_is_refused() -> None:
    with pytest.raises(ValueError, match="does not speculate: set speculative=eagle3"):
        measure_round(engine(), 1, 20, 1)


def test_a_round_needs_requests_and_a_context() -> None:
    llm = engine(**EAGLE)
    for batch_size, context_len, message in (
        (0, 20, "batch must be at least 1, got 0"),
        (1, 0, "context must be at least 1, got 0"),
        (1, -5, "context must be at least 1, got -5"),
    ):
        with pytest.raises(ValueError, match=message):
            measure_round(llm, batch_size, context_len, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context", "20,0"), "context must be at least 1, got 0"),
        (("--context", "-5"), "context must be at least 1, got -5"),
        (("--batch", "1,0"), "batch must be at least 1, got 0"),
        (("--output", "."), ". is a folder: name a file in it"),
    ],
)
def test_bench_round_refuses_nonsense_before_it_starts_an_engine(
    diptych: Callable[..., Result], options: tuple[str, str], message: str
) -> None:
    result = diptych("bench", "round", "--model", "no-such-model", *options)
    assert result.exit_code == 2
    assert result.stderr == f"error: {message}\n"


def test_an_engine_gets_graphs_for_the_batches_asked_for() -> None:
    flags = engine_flags([8, 1, 8], {})
    assert flags == {"max_running_requests": 8, "cuda_graph_bs": (1, 8)}
    assert engine_flags([8], {"cuda_graph_max_bs": 4})["cuda_graph_max_bs"] == 4
    assert engine_flags([8], {"max_running_requests": 9})["max_running_requests"] == 9


def test_bench_round_measures_every_case(diptych: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "round.json"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in EAGLE.items()]
    options += ["--device=cpu", "--panel=reference", "--max-total-tokens=256", "--repeats=2"]
    result = diptych("bench", "round", *options, "--batch", "1,2", "--context", "20,30", "-o", str(file))
    assert result.exit_code == 0, result.output
    assert "round / decode" in result.stdout
    data = json.loads(file.read_text())
    assert data["flags"]["speculative"] == "eagle3"
    cases = [(case["batch_size"], case["context_len"]) for case in data["results"]]
    assert cases == [(1, 20), (2, 20), (1, 30), (2, 30)]
    for case in data["results"]:
        assert case["ratio"] == pytest.approx(case["round"] / case["decode"])
        assert min(case["pieces"].values()) > 0
