"""Two precisions or checkpoints of one model shape: what loses most is found and named."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.diff.precision import Precision, measure
from diptych.shared.tools.conformance.diff.precision_report import (
    choice_tables,
    token_rows,
    write_precision_report,
)
from diptych.shared.tools.conformance.diff.token_choice import compare_logits
from diptych.shared.types import SamplingParams

from .lockstep_harness import engine, prompts

FLAGS = {"disable_radix_cache": True, "chunked_prefill_size": 16}
PARAMS = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def pair() -> tuple[LLM, LLM]:
    return engine(**FLAGS), engine(**FLAGS)


def compare(pair: tuple[LLM, LLM], num_prompts: int = 1) -> Precision:
    return measure(*pair, prompts(pair[0])[:num_prompts], PARAMS)


def perturb(llm: LLM, name: str, error: float = 0.05) -> torch.Tensor:
    """Every weight gets an error of either sign; returns the weight before."""
    weight = dict(llm.assembly.model.named_parameters())[name]
    before = weight.detach().clone()
    signs = torch.randint(0, 2, weight.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    weight.data.mul_(1 + error * signs)
    return before


def test_equal_checkpoints_lose_nothing(pair: tuple[LLM, LLM]) -> None:
    found = compare(pair, 2)
    means = [*found.accumulated.values(), *found.own_layers.values(), *found.own_ops.values()]
    assert [mean.value for mean in means] == [0.0] * len(means)
    assert found.sentence() == "No layer loses anything: A and B compute the same values."
    assert found.tokens.mean_kl == 0.0
    assert found.tokens.same_best == 1.0
    assert found.tokens.first_other is None
    assert found.tokens.perplexity[0] == found.tokens.perplexity[1]
    assert len(found.tokens.choices) == sum(len(text) - 1 for text in found.texts)
    assert choice_tables(found.tokens, found.texts, pair[0].tokenizer) == []


@pytest.mark.parametrize("op", ["mlp.down_proj", "self_attn.v_proj"])
def test_a_layer_with_other_weights_is_named(pair: tuple[LLM, LLM], op: str, tmp_path: Path) -> None:
    name = f"model.layers.2.{op}.weight"
    before = perturb(pair[1], name)
    try:
        found = compare(pair)
    finally:
        dict(pair[1].assembly.model.named_parameters())[name].data.copy_(before)
    assert found.worst_layer == "layers.2"
    assert found.worst_op("layers.2") == f"layers.2.{op}"
    assert "Layer 2 loses most" in found.sentence()
    assert f"inside it, {op} loses most" in found.sentence()
    # From A's input every other layer and op is exact; on B's own values, later layers inherit the error.
    assert [layer for layer, mean in found.own_layers.items() if mean.value] == ["layers.2"]
    assert [each for each, mean in found.own_ops.items() if mean.value] == [f"layers.2.{op}"]
    assert found.accumulated["layers.1"].value == 0.0
    assert found.accumulated["layers.5"].value > 0.0
    assert found.added["layers.2"].value > 0.0

    choices = choice_tables(found.tokens, found.texts, pair[0].tokenizer)
    page = write_precision_report(found, tmp_path / "out", {"A": "<a> & b"}, choices).read_text()
    assert found.sentence() in Page(page).text
    assert "<a> & b" in Page(page).text
    assert choices[-1].place in Page(page).text
    charts = [part[: part.index("</svg>") + 6] for part in page.split("<svg")[1:]]
    titles = [
        title.text
        for chart in charts
        for title in ElementTree.fromstring(f"<svg{chart}").iter()
        if title.text
    ]
    assert any(title.startswith("layer 2, output, from A's input: ") for title in titles)


def test_other_numbers_of_a_head_are_named(pair: tuple[LLM, LLM]) -> None:
    name = next(
        n
        for n, _ in pair[1].assembly.model.named_parameters()
        if n.endswith("norm.weight") and "layers" not in n
    )
    before = perturb(pair[1], name)
    try:
        found = compare(pair)
    finally:
        dict(pair[1].assembly.model.named_parameters())[name].data.copy_(before)
    assert found.worst_layer is None
    assert found.sentence().startswith("No layer loses anything; norm changes by 5.00%")
    assert found.tokens.mean_kl > 0


def test_two_shapes_are_refused(pair: tuple[LLM, LLM]) -> None:
    other = engine(model="tiny-moe", **FLAGS)
    with pytest.raises(ValueError, match="A and B must have one model shape"):
        measure(pair[0], other, [[1, 2]], PARAMS)


def test_choices_of_the_next_token() -> None:
    a = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [1.0, 1.0, 1.0]]))
    b = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1], [1.0, 1.0, 1.0]]))
    first, second = compare_logits(a, b, [2, 0, 1], text=3, num_prompt_tokens=1)
    assert first.kl == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert (first.best, first.same_best, first.is_answer, first.next_id) == ((0, 1), False, True, 0)
    assert first.logprobs == pytest.approx((math.log(0.5), math.log(0.25)))
    assert first.top[0].token_id == 0
    assert second.kl == 0.0
    assert second.same_best


def test_a_text_without_positions_has_rows() -> None:
    assert dict(token_rows(Precision().tokens))["KL divergence"] == "no position"


class Page(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.text += data
