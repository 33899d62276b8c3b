"""Every flag of the engine has an option of its name, and only what was given is set."""

import typing
from dataclasses import fields

import pytest
import typer
from typer.testing import CliRunner

from diptych.shared.tools.commands.options import EngineOptions, SamplingOptions, spread
from diptych.shared.types import SamplingParams


def test_sampling_options_are_fields_of_the_params() -> None:
    assert SamplingOptions.annotations.keys() <= {field.name for field in fields(SamplingParams)}


def test_nothing_given_sets_nothing_but_greedy_sampling() -> None:
    assert EngineOptions().to_flags() == {}
    assert SamplingOptions().to_params({}) == {"temperature": 0.0}


def test_what_is_given_comes_before_what_the_model_has() -> None:
    of_model = {"temperature": 0.6, "top_p": 0.9}
    assert SamplingOptions(top_p=0.5).to_params(of_model) == {"temperature": 0.6, "top_p": 0.5}
    assert SamplingOptions(temperature=0.0).to_params(of_model) == {"temperature": 0.0, "top_p": 0.9}


def test_help_lists_choices_and_defaults() -> None:
    option = typing.get_args(EngineOptions.annotations["schedule_policy"])[1]
    assert option.help.endswith("One of fcfs, lpm, dfs-weight, lof, random, routing-key. Default: fcfs.")


def test_use_is_repeated_or_separated_by_commas() -> None:
    options = EngineOptions(use=["attention=reference,sampler=a.b:Sampler", "moe=reference"])
    assert options.to_flags()["use"] == {
        "attention": "reference",
        "sampler": "a.b:Sampler",
        "moe": "reference",
    }


@pytest.mark.parametrize("use", ["attention", "attention=", "no_such_component=reference"])
def test_bad_use_is_refused(use: str) -> None:
    with pytest.raises(ValueError, match=use.partition("=")[0]):
        EngineOptions(use=[use]).to_flags()


def test_chunked_prefill_can_be_switched_off() -> None:
    assert EngineOptions(chunked_prefill_size=-1).to_flags() == {"chunked_prefill_size": None}
    assert EngineOptions(chunked_prefill_size=64).to_flags() == {"chunked_prefill_size": 64}
    for number in (0, -2):
        with pytest.raises(ValueError, match=f"integer >= 1, or -1 to never cut a prompt, got {number}"):
            EngineOptions(chunked_prefill_size=number).to_flags()


def test_captured_sizes_are_separated_by_commas() -> None:
    assert EngineOptions(cuda_graph_bs="1,2,8").to_flags() == {"cuda_graph_bs": (1, 2, 8)}
    with pytest.raises(ValueError, match="--cuda-graph-bs takes numbers separated by ',', got '1;2'"):
        EngineOptions(cuda_graph_bs="1;2").to_flags()


def test_spread_gives_each_group_its_options() -> None:
    seen = []

    @spread
    def command(
        *, name: str = "", engine: EngineOptions, sampling: SamplingOptions, loud: bool = False
    ) -> None:
        seen.append((name, engine.to_flags(), sampling.to_params({}), loud))

    app = typer.Typer()
    app.command()(command)
    arguments = ["--name", "x", "--page-size", "16", "--enable-mixed-chunk", "--stop", "a", "--stop", "b"]
    result = CliRunner().invoke(app, [*arguments, "--top-p", "0.5", "--loud"])
    assert result.exit_code == 0, result.output
    flags = {"page_size": 16, "enable_mixed_chunk": True}
    assert seen == [("x", flags, {"temperature": 0.0, "top_p": 0.5, "stop": ("a", "b")}, True)]
