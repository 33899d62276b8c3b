"""The files of a comparison: they exist, load, and say what was found."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import torch
from safetensors import safe_open

from diptych.shared.tools.conformance.diff.diff_report import PAGE, TENSORS, summary, write_report
from diptych.shared.tools.conformance.diff.error_chart import Series, error_chart

from .lockstep_harness import compare, divergence_of, plant

SVG = "{http://www.w3.org/2000/svg}"
BAD = """
    from diptych.reference.attention import TorchAttention

    class Bad(TorchAttention):
        def run(self, q, layer, plan, **kv):
            output = super().run(q, layer, plan, **kv)
            if layer.layer_id == 3:
                output[7, 2, 17] += 0.5
            return output
"""


class Text(HTMLParser):
    """The page's text, and whether its tags close in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_divergence_gives_a_page_and_the_two_tensors(tmp_path: Path) -> None:
    outcome = compare(b={"use": {"attention": f"{plant(tmp_path, BAD)}:Bad"}})
    found = divergence_of(outcome)
    out = tmp_path / "some" / "folder"
    files = write_report(outcome, out, {"A": "reference", "B": "<mine> & yours"})
    assert files == [out / PAGE, out / TENSORS]

    page = files[0].read_text()
    text = Text(page).text
    for expected in ("First divergence", "self_attn.attention", "[2, 17] of [4, 64]", "<mine> & yours"):
        assert expected in text
    for _, value in found.rows():
        assert value in text
    svg = ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + len("</svg>")])
    titles = [title.text for title in svg.iter(f"{SVG}title")]
    assert any(title.startswith("layers.3.self_attn.attention: ") for title in titles)
    assert len(svg.findall(f"{SVG}polyline")) == 2  # the largest errors, and this token's

    with safe_open(files[1], "pt") as file:
        a, b, about = file.get_tensor("a"), file.get_tensor("b"), file.metadata()
    row, index = int(about["row"]), tuple(json.loads(about["index"]))
    assert about["op"] == "layers.3.self_attn.attention"
    assert a.shape == b.shape == (len(json.loads(about["tokens"])), 4, 64)
    assert (float(a[row][index]), float(b[row][index])) == (found.found.a, found.found.b)
    assert tuple(json.loads(about["tokens"])[row]) == found.key
    assert torch.equal(a[:row], b[:row])


def test_no_divergence_gives_a_page_and_takes_old_tensors_away(tmp_path: Path) -> None:
    outcome = compare(b={"page_size": 4}, num_new=2)
    (tmp_path / TENSORS).write_text("of an earlier comparison")
    assert write_report(outcome, tmp_path, {}) == [tmp_path / PAGE]
    assert not (tmp_path / TENSORS).exists()
    text = Text((tmp_path / PAGE).read_text()).text
    assert "No divergence" in text
    assert f"{outcome.num_tokens} tokens compared, in 2 steps of A and 2 of B" in text
    for kind in outcome.worst:
        assert kind in text


def test_a_divergence_without_tensors_has_a_page_too(tmp_path: Path) -> None:
    outcome = compare(b={"chunked_prefill_size": 40}, strict_schedule=True)
    assert write_report(outcome, tmp_path, {}) == [tmp_path / PAGE]
    assert "not ['prompt-0'" in Text((tmp_path / PAGE).read_text()).text


def test_the_summary_says_what_was_not_compared(tmp_path: Path) -> None:
    alone = {"max_running_requests": 1}
    outcome = compare(alone, {**alone, "disable_radix_cache": True}, num_new=2)
    outcome.only[1].update({"layers.0.qkv_proj", "layers.1.qkv_proj"})
    lines = summary(outcome)
    count = outcome.num_one_sided[1]
    assert f"{count} tokens were computed by B alone: the other had them cached" in lines
    assert "only B has layers.*.qkv_proj" in lines
    assert summary(compare(max_steps=1))[0].endswith(": the limit of steps ended it")


def test_the_chart_draws_zero_and_what_is_infinite_at_its_edges() -> None:
    errors = {"embed_tokens": 0.0, "layers.0.mlp": 1e-7, "layers.1.mlp": math.inf, "norm": 1e-30}
    svg = ElementTree.fromstring(error_chart([Series("a < b", "#000000", errors)], "layers.1.mlp"))
    heights = [float(circle.get("cy")) for circle in svg.iter(f"{SVG}circle")]
    assert heights[0] == heights[3] == max(heights)
    assert heights[2] == min(heights)
    labels = [text.text for text in svg.iter(f"{SVG}text")]
    assert "layer 0" in labels
    assert "layer 1" in labels
    assert "a < b" in labels
