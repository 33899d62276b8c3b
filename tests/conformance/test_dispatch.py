"""The record names the implementation of each call, and leaves no trace."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.types import SamplingParams
from tests.dispatch_recorder import DispatchRecord

GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)

MY_ATTENTION = """
from diptych.reference.attention import TorchAttention
class MyAttention(TorchAttention):
    pass
"""


def test_components_of_an_engine() -> None:
    llm = LLM(model="tiny-dense", device="cpu", panel="reference")
    before = {
        name: vars(owner).copy() for name, owner in (("llm", llm), ("sampler", llm.assembly.parts.sampler))
    }
    with DispatchRecord() as record:
        record.watch_engine(llm)
        llm.generate("one two", GREEDY, progress=False)
    assert record.calls["model_runner.forward", "diptych.reference.model_runner.ModelRunner"] == 4
    assert record.calls["sampler.sample", "diptych.reference.sampler.Sampler"] == 4
    num_layers = llm.model_config.num_hidden_layers
    assert record.calls["attention.run", "diptych.reference.attention.TorchAttention"] == 4 * num_layers
    assert record.calls["attention.plan", "diptych.reference.attention.TorchAttention"] == 4

    llm.generate("one two", GREEDY, progress=False)
    assert record.calls["sampler.sample", "diptych.reference.sampler.Sampler"] == 4, "it still watches"
    assert set(vars(llm.assembly.parts.sampler)) == set(before["sampler"])


def test_a_chosen_implementation_is_the_one_that_ran(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MY_ATTENTION)
    use = {"attention": f"{tmp_path / 'mine.py'}:MyAttention"}
    llm = LLM(model="tiny-dense", device="cpu", panel="reference", use=use)
    with DispatchRecord() as record:
        record.watch_engine(llm)
        llm.generate("one two", GREEDY, progress=False)
    record.expect_ran("attention.run", "diptych_user_mine.MyAttention")
    with pytest.raises(Mismatch, match=r"who did attention\.run"):
        record.expect_ran("attention.run", "diptych.reference.attention.TorchAttention")


def test_a_path_that_did_not_run_is_an_error() -> None:
    with DispatchRecord() as record:
        record.watch(math, "floor")
        math.floor(1.5)
    record.expect_ran("floor", "math")
    with pytest.raises(Mismatch, match="none"):
        record.expect_ran("ceil", "math")
    assert math.floor(2.5) == 2
    assert record.calls["floor", "math"] == 1
