"""`diptych generate`: answer one prompt, or several one after the other."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands import bench_run, launch
from diptych.shared.tools.commands.options import EngineOptions, SamplingOptions, spread
from diptych.shared.tools.commands.printed_answer import Answer, collect

if TYPE_CHECKING:
    from diptych.shared.engine.llm import LLM
    from diptych.shared.types import SamplingParams


@spread
def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT...", help="What to ask; - reads it from standard input.", show_default=False
        ),
    ] = None,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option(help="System message before each prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue TEXT as it is, without the chat template.")
    ] = False,
    stream: Annotated[bool, typer.Option(help="Print the answer while it is made.")] = True,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Log-probability of every token.")] = False,
    top_logprobs: Annotated[int, typer.Option(help="So many alternatives beside each.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each answer.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a timeline of the engine's and the device's work to this file.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Write one HTML page to this file that plays the run step by step: queue, batch, pages, "
            "radix tree, logits and times. The TEXTs are answered together; one arrives every two steps."
        ),
    ] = None,
) -> None:
    """Answer TEXT: prints the answer, then its speed and what the prefix cache saved.

    Several TEXTs are answered in turn; later ones find shared beginnings in the prefix cache.
    """
    if record is not None and trace is not None:
        raise ValueError("--record has the timeline too: it cannot be combined with --trace")
    if raw and system is not None:
        raise ValueError("--raw gives the text as it is: it cannot be combined with --system")
    texts = read_prompts(prompts)
    for file in filter(None, (trace, record)):
        bench_run.check_files(None, file)
    llm = launch.start_llm(engine.to_flags())
    params = sampling.to_params(llm.sampling_defaults)
    if logprobs or top_logprobs:
        params |= {"return_logprob": True, "top_logprobs_num": top_logprobs}
    if record is not None:
        record_all(llm, texts, params, record, system=system, raw=raw, as_json=as_json)
        return
    with tracing(llm, trace):
        answer_all(llm, texts, params, system=system, raw=raw, stream=stream, as_json=as_json)


@contextmanager
def tracing(llm: LLM, file: Path | None) -> Iterator[None]:
    """Record a trace within the block. The file is always written at the end; a summary goes to standard
    error."""
    if file is None:
        yield
        return
    from diptych.shared.tools.bench.trace import Traced, write_trace

    traced = Traced()
    try:
        with traced.record(llm):
            yield
    finally:
        assert traced.recording is not None
        idle = write_trace(file, traced.recording)
        print(f"{file}: idle between steps {idle.share:.1%} of {idle.num_steps} steps", file=sys.stderr)


def answer_all(
    llm: LLM, texts: list[str], params: dict[str, Any], *, system: str | None, raw: bool, stream: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Answer the texts one after the other. Raises `typer.Exit` if an answer was interrupted or failed."""
    from diptych.shared.types import SamplingParams

    for index, text in enumerate(texts):
        prompt: str | list[int] = text if raw else chat_prompt(llm, text, system)
        if len(texts) > 1 and not as_json:
            print("\n" * (index > 0) + f"> {text}")
        answer = run(llm, prompt, SamplingParams(**params), streamed=stream and not as_json)
        if as_json:
            print(json.dumps({"prompt": text, "model": llm.config.model, **answer.as_dict()}), flush=True)
        else:
            report(llm, answer, streamed=stream)
        if answer.finish_reason == "abort":
            raise typer.Exit(130)  # as a shell reports an interrupted program
        if answer.finish_reason == "error":
            raise typer.Exit(1)


def record_all(
    llm: LLM, texts: list[str], params: dict[str, Any], file: Path, *, system: str | None, raw: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Answer the texts together, and write the page of the run."""
    from diptych.shared.tools.record.page import write_page
    from diptych.shared.tools.record.recorded_run import Arrival, Recorder
    from diptych.shared.types import SamplingParams

    prompts = [text if raw else chat_prompt(llm, text, system) for text in texts]
    arrivals = [
        Arrival(2 * i, text, prompt, SamplingParams(**params))
        for i, (text, prompt) in enumerate(zip(texts, prompts))
    ]
    recorder = Recorder(llm)
    try:
        run = recorder.run(arrivals)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    write_page(file, run)
    for text, collector in zip(texts, recorder.collectors):
        answer = Answer()
        answer.add(collector.whole(), 0.0)
        if as_json:
            print(json.dumps({"prompt": text, "model": llm.config.model, **answer.as_dict()}), flush=True)
        else:
            print(f"> {text}\n{answer.text}", flush=True)
    size = f"{len(run['steps'])} steps, {file.stat().st_size // 1024} KiB"
    print(f"{file}: {size}; open it in a browser", file=sys.stderr)
    if any(request["reason"] == "error" for request in run["requests"]):
        raise typer.Exit(1)


def read_prompts(prompts: list[str] | None) -> list[str]:
    if not prompts:
        if sys.stdin.isatty():
            raise ValueError("no prompt: give TEXT, or - to read it from standard input")
        prompts = ["-"]
    if prompts.count("-") > 1:
        raise ValueError("standard input can be read once, but - is given several times")
    return [sys.stdin.read().rstrip("\n") if prompt == "-" else prompt for prompt in prompts]


def chat_prompt(llm: LLM, text: str, system: str | None) -> list[int]:
    if llm.tokenizer is None:
        raise ValueError(f"{llm.config.model} has no tokenizer: name one with --tokenizer")
    messages = [{"role": "system", "content": system}] if system is not None else []
    prompt_ids: list[int] = llm.tokenizer.chat([*messages, {"role": "user", "content": text}])
    return prompt_ids


def run(llm: LLM, prompt: str | list[int], params: SamplingParams, *, streamed: bool) -> Answer:
    def print_piece(text: str) -> None:
        print(text, end="", flush=True)

    return collect(lambda: llm.stream(prompt, params), print_piece if streamed else lambda text: None)


def report(llm: LLM, answer: Answer, *, streamed: bool) -> None:
    """Print the text, unless it was streamed, and its summary."""
    print("" if streamed else answer.text)
    if answer.output_logprobs:
        print_logprobs(llm, answer)
    print(answer.summary(), flush=True)


def print_logprobs(llm: LLM, answer: Answer) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def shown(token_id: int) -> str:
        return (
            "" if llm.tokenizer is None else repr(llm.tokenizer.decode([token_id], skip_special_tokens=False))
        )

    table = Table("token", "text", "log-probability", "alternatives")
    for token in answer.output_logprobs:
        others = "  ".join(f"{shown(token_id)} {logprob:.3f}" for token_id, logprob in token.top)
        cells: list[Any] = [str(token.token_id), shown(token.token_id), f"{token.logprob:.4f}", others]
        table.add_row(*(Text(cell) for cell in cells))
    Console().print(table)
