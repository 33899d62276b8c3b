"""`diptych eval`: the accuracy of number formats against the unquantized model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands import bench_run
from diptych.shared.tools.commands.benchmark import Benchmark, Column, Output, Plot, run
from diptych.shared.tools.commands.options import EngineOptions, spread

if TYPE_CHECKING:
    from diptych.shared.text.tokenizer import Tokenizer
    from diptych.shared.tools.conformance.whole_engine.accuracy import Limit
    from diptych.shared.tools.conformance.whole_engine.formats import (
        AccuracyCase,
        AccuracyResult,
        Inputs,
        Loss,
    )

BASELINE = "unquantized"
BUILT_IN_QUESTIONS = 100
PANEL = "Measuring and results"


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=PANEL, **more)


@spread
def evaluate(
    *,
    engine: EngineOptions,
    formats: Annotated[
        str, _option("Formats, separated by commas; a plus combines two: fp8+fp8-kv.")
    ] = "bf16,fp8,fp8-block,int8,int4,nvfp4,fp8-kv",
    checkpoint: Annotated[
        list[str] | None,
        _option(
            "A quantized checkpoint of the same model: folder or id. May be repeated.", show_default=False
        ),
    ] = None,
    text: Annotated[
        Path | None, _option("Text file for the perplexity. Default: held-out chats, of a built-in model.")
    ] = None,
    chunk: Annotated[
        int | None, _option("Tokens of a chunk of the text. Default: the context, at most 1,024.", min=2)
    ] = None,
    questions: Annotated[
        int | None,
        _option("Held-out questions of the built-in models. Default: 100 for these, none for others.", min=0),
    ] = None,
    max_loss: Annotated[
        float | None, _option("Most points of exact match that a format may lose. Default: by format.", min=0)
    ] = None,
    max_increase: Annotated[
        float | None, _option("Most percent by which perplexity may rise. Default: by format.", min=0)
    ] = None,
    output: Output = None,
    plot: Plot = None,
) -> None:
    """Measure exact match on held-out questions and perplexity of a text, for each format and for the
    unquantized model. Engine flags apply to all of them.

    Exit status 0: every format is within its limits; 1: one loses more; 2: nothing could be measured. Each
    format has limits for the built-in models on their own questions; otherwise give limits here.
    """
    bench_run.check_files(plot, output)
    flags = engine.to_flags()
    if text is not None and not text.is_file():
        raise ValueError(f"--text: no file {text}")

    import torch

    from diptych.shared.config import EngineConfig, read_config
    from diptych.shared.loading.model_path import ASSETS, load_tokenizer, resolve_model_path
    from diptych.shared.tools.conformance.whole_engine.formats import AccuracyCase, flags_of, measure

    named = {name: flags_of(name) for name in filter(None, map(str.strip, formats.split(",")))}
    named |= {Path(path).name: {"model": path} for path in checkpoint or []}
    if not named:
        raise ValueError("there is nothing to compare: give --formats or --checkpoint")
    config = EngineConfig().updated(**flags)
    folder = resolve_model_path(config.model)
    is_built_in = folder.is_relative_to(ASSETS)
    if questions is None:
        questions = BUILT_IN_QUESTIONS if is_built_in else 0
    if is_built_in and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as in diptych.shared.tools.commands.launch
    tokenizer = load_tokenizer(config, folder)
    if tokenizer is None:
        raise ValueError(f"{config.model} has no tokenizer: name one with --tokenizer")
    longest = (config.context_len or read_config(folder).context_len) - 1
    inputs = make_inputs(tokenizer, text, chunk or min(longest, 1024), questions, is_built_in)
    cases = [AccuracyCase(BASELINE, flags)]
    cases += [AccuracyCase(name, {**flags, **its_flags}) for name, its_flags in named.items()]
    limits = limits_of(list(named), is_built_in and text is None, max_loss, max_increase)
    benchmark = Evaluation(
        cases, lambda case, on_progress: measure(case, inputs, on_progress), limits, inputs.num_tokens
    )
    benchmark.title = (
        f"{config.model}: {len(inputs.questions)} questions, perplexity of {inputs.num_tokens:,} tokens"
    )
    benchmark.facts |= {"model": config.model, "text": None if text is None else text.name}
    run(benchmark, output=output, plot=plot)
    if benchmark.failures:
        raise typer.Exit(1)


def make_inputs(
    tokenizer: Tokenizer, text: Path | None, chunk: int, num_questions: int, is_built_in: bool
) -> Inputs:
    """The questions, and the chunks of the text or, for a built-in model without a text, the questions with
    their answers."""
    from diptych.shared.tools.conformance.whole_engine.formats import Inputs, built_in_inputs, chunks_of

    if text is None and is_built_in:
        return built_in_inputs(tokenizer, num_questions)
    if text is None and not num_questions:
        raise ValueError("there is nothing to measure: give --text FILE, or --questions of a model for them")
    asked = built_in_inputs(tokenizer, num_questions).questions if num_questions else []
    if text is None:
        return Inputs(asked, [])
    try:
        ids = tokenizer.encode(text.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"--text: {text} is not UTF-8: {error.reason} at byte {error.start}") from None
    if len(ids) < 2:
        raise ValueError(f"--text: {text} has {len(ids)} tokens; at least 2 are needed")
    return Inputs(asked, chunks_of(ids, chunk))


def limits_of(
    names: Sequence[str], are_known: bool, max_loss: float | None, max_increase: float | None
) -> dict[str, Limit]:
    """The limits by format: those of the built-in models on their questions, if `are_known`, with what was
    given in their place."""
    from diptych.shared.tools.conformance.whole_engine.accuracy import LIMITS, NO_LIMIT

    limits = {name: LIMITS.get(name, NO_LIMIT) if are_known else NO_LIMIT for name in names}
    if max_loss is not None:
        limits = {name: limit._replace(exact=max_loss / 100) for name, limit in limits.items()}
    if max_increase is not None:
        limits = {name: limit._replace(perplexity=max_increase / 100) for name, limit in limits.items()}
    return limits


class Evaluation(Benchmark):
    """The cases of `diptych eval`, of which the first is the unquantized model."""

    name = "eval"

    def __init__(
        self, cases: Sequence[AccuracyCase], measure_with: Callable[[AccuracyCase, Any], AccuracyResult],
        limits: dict[str, Limit], num_tokens: int,
    ) -> None:  # fmt: skip
        super().__init__(cases)
        self.measure_with = measure_with
        self.limits, self.num_tokens = limits, num_tokens
        self.failures: list[str] = []
        self.columns = (
            Column("format", lambda r: r.case.name, is_text=True),
            Column("weights MB", lambda r: f"{r.weight_bytes / 1e6:.2f}"),
            Column("KV bytes/token", lambda r: f"{r.kv_bytes_per_token:,}"),
            Column("exact match", lambda r: _percent(r.exact, 1)),
            Column("same answers", lambda r: _percent(self.loss(r).same_answers, 1)),
            Column("perplexity", lambda r: None if r.perplexity is None else f"{r.perplexity:.4f}"),
            Column("rise", lambda r: _percent(self.loss(r).perplexity, 2)),
            Column("change of logprob", lambda r: _digits(self.loss(r).logprob)),
        )

    def measure(self, progress: bench_run.Progress) -> None:
        for case in self.cases:
            on_progress = progress.on_run(str(case), self.num_tokens)
            self.results.append(self.measure_with(case, on_progress))

    def loss(self, result: AccuracyResult) -> Loss:
        loss: Loss = result.compared_with(self.results[0])
        return loss

    def notes(self, results: list[AccuracyResult]) -> Iterable[str]:
        from diptych.shared.tools.conformance.whole_engine.accuracy import excess

        for result in results[1:]:
            limit = self.limits[result.case.name]
            self.failures += [f"{result.case.name}: {what}" for what in excess(self.loss(result), limit)]
        self.facts["failures"] = self.failures
        return self.failures

    def as_json(self, result: AccuracyResult) -> dict[str, Any]:
        return result.as_json() | {"loss": asdict(self.loss(result))}

    def draw(self, file: Path, results: list[AccuracyResult]) -> None:
        from diptych.shared.tools.bench.plots import plot_losses

        losses = {result.case.name: self.loss(result) for result in results[1:]}
        plot_losses(
            file,
            self.title or "",
            {
                "exact match, points lost": {name: _times(100, each.exact) for name, each in losses.items()},
                "perplexity, rise in %": {
                    name: _times(100, each.perplexity) for name, each in losses.items()
                },
                "mean change of a log-probability": {name: each.logprob for name, each in losses.items()},
            },
        )


def _percent(share: float | None, digits: int) -> str | None:
    return None if share is None else f"{share:.{digits}%}"


def _digits(number: float | None) -> str | None:
    return None if number is None else f"{number:.4f}"


def _times(factor: float, number: float | None) -> float | None:
    return None if number is None else factor * number
