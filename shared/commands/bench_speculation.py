"""`diptych bench speculation`: whether speculation pays for a model, a draft model and some prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared.commands import bench_run, launch
from shared.commands.options import EngineOptions, integers, spread

if TYPE_CHECKING:
    from shared.bench.prompts import Asked
    from shared.bench.speculation import Comparison
    from shared.types import DraftShape

BATCHES = (1, 8, 32)


@spread
def speculation(
    *,
    engine: EngineOptions,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="One prompt a line: a text, or a chat in JSON. Default: questions to the built-in models.",
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Ask so many. Default: all of the file's, or 64.", show_default=False),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue texts as they are.")] = False,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Requests at once; several numbers separated by commas. Default: those of 1,8,32 that there "
            "are prompts for.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest answer.")
    ] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements; the table shows medians.")] = 3,
    warm_ups: Annotated[int, typer.Option(min=0, help="Runs before, which do not count.")] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write everything to this JSON file.")
    ] = None,
) -> None:
    """Greedy answers to the same prompts with speculation and without, one engine after the other: speed,
    tokens a verification, and whether the texts are the same.

    For example: --speculative eagle3 --speculative-draft-model tiny-dense-eagle3
    """
    bench_run.check_files(None, output)
    flags = engine.to_flags()
    if flags.get("speculative") is None:
        raise ValueError("choose what is measured: --speculative eagle3 or another algorithm")
    asked = choose_prompts(prompts, num_prompts)
    batches = choose_batches(batch, len(asked))

    from shared.bench import report

    flags = {"max_running_requests": max(batches), **flags}
    comparison = Measurement(flags, asked, raw, batches, max_new_tokens, repeats, warm_ups)
    data: dict[str, Any] = report.header("speculation") | {
        "prompts": "held-out questions" if prompts is None else str(prompts),
        "num_prompts": len(asked),
        "max_new_tokens": max_new_tokens,
        "num_repeats": repeats,
        "num_warm_ups": warm_ups,
    }
    with comparison.progress:
        comparison.run()
    complete = [case for case in comparison.cases if case.is_complete]
    if complete:
        print_results(complete, comparison.shape)
    else:
        print("interrupted before anything was complete")
    if output is not None:
        data |= comparison.facts | {"is_interrupted": comparison.progress.is_interrupted}
        report.write_json(output, data | {"cases": [case.as_json() for case in complete]})
        print(f"written to {output}")
    if comparison.progress.is_interrupted:
        raise typer.Exit(130)  # as a shell reports an interrupted program


class Measurement:
    """Two engines, one after the other. Keeps what was complete when it is interrupted."""

    def __init__(
        self, flags: dict[str, Any], asked: list[Asked], is_raw: bool, batches: tuple[int, ...],
        max_new_tokens: int, num_repeats: int, num_warm_ups: int,
    ) -> None:  # fmt: skip
        from shared.bench.speculation import Comparison

        self.flags = flags
        self.asked = asked
        self.is_raw = is_raw
        self.max_new_tokens = max_new_tokens
        self.num_repeats = num_repeats
        self.num_warm_ups = num_warm_ups
        self.cases = [Comparison(batch_size) for batch_size in batches]
        self.shape: DraftShape | None = None
        self.facts: dict[str, Any] = {}
        self.progress = bench_run.Progress()

    def run(self) -> None:
        """The one that speculates first: what is wrong with its flags shows at once."""
        plain = {name: flag for name, flag in self.flags.items() if not name.startswith("speculative")}
        self._run_engine(self.flags)
        self._run_engine(plain)

    def _run_engine(self, flags: dict[str, Any]) -> None:
        """The engine lives no longer than this call: the next one needs the memory."""
        from shared.bench import speculation as bench
        from shared.bench.prompts import encode
        from shared.bench.report import engine_facts
        from shared.bench.step import free_memory
        from shared.config import draft_shape

        llm = launch.start_engine(flags)
        device = llm.assembly.parts.allocator.device
        is_plain = llm.config.speculative is None
        try:
            prompts = encode(llm, self.asked, self.is_raw)
            bench.check_fits(llm, prompts, self.max_new_tokens)
            if not is_plain:
                self.shape, self.facts = draft_shape(llm.config), engine_facts(llm)
            for case in self.cases:
                runs = case.plain if is_plain else case.speculative
                bench.measure(
                    llm, prompts, case.batch_size, runs, max_new_tokens=self.max_new_tokens,
                    num_repeats=self.num_repeats, num_warm_ups=self.num_warm_ups, on_run=self.progress.on_run,
                )  # fmt: skip
                if is_plain:
                    case.departures = bench.departures(llm, prompts, case.plain[0], case.speculative[0])
        finally:
            del llm
            free_memory(device)


def choose_prompts(file: Path | None, num: int | None) -> list[Asked]:
    from shared.bench.prompts import held_out, read_prompts

    if file is None:
        return held_out(64 if num is None else num)
    asked = read_prompts(file)
    if num is not None and num > len(asked):
        raise ValueError(f"{file} has {len(asked)} prompts, fewer than --num-prompts {num}")
    return asked[:num]


def choose_batches(text: str | None, num_prompts: int) -> tuple[int, ...]:
    if text is None:
        return tuple(size for size in BATCHES if size <= num_prompts)
    batches = integers("--batch", text)
    for size in batches:
        if not 1 <= size <= num_prompts:
            raise ValueError(f"--batch must be 1 to {num_prompts}, as there are so many prompts, got {size}")
    return batches


def print_results(cases: list[Comparison], shape: DraftShape | None) -> None:
    from rich.table import Table

    from shared.bench.speculation import speed_of

    assert shape is not None
    console = bench_run.console()
    title = f"{shape.num_steps} steps, top {shape.top_k}, {shape.num_draft_tokens} nodes"
    table = Table(title=title)
    headings = ["at once", "plain, tok/s", "speculative", "speed-up", "tokens a verification"]
    for heading in [*headings, "bonus apart", "verifications", "texts alike"]:
        table.add_column(heading, justify="right")
    for case in cases:
        stats, num_requests = case.speculative[0].speculation, len(case.plain[0].output_ids)
        table.add_row(
            str(case.batch_size),
            f"{speed_of(case.plain):,.1f}",
            f"{speed_of(case.speculative):,.1f}",
            f"{case.speedup:.2f}",
            f"{stats.acceptance_length_with_bonus:.2f}",
            f"{stats.acceptance_length:.2f}",
            f"{stats.num_verifications:,}",
            f"{num_requests - len(case.departures)} of {num_requests}",
        )
    console.print(table)
    for case in cases:
        if case.departures:
            console.print(f"{case.batch_size} at once: {departures_text(case)}")


def departures_text(case: Comparison) -> str:
    """Whether the texts that differ may: where two tokens are nearly tied, rounding decides."""
    gaps = [departure.gap for departure in case.departures]
    near = [gap for gap in gaps if gap is not None]
    text = f"{len(gaps)} texts part"
    if near:
        text += f", where log-probabilities are at most {max(near):.2g} apart"
    if len(near) < len(gaps):
        text += f"; {len(gaps) - len(near)} of them where one of the tokens is not likely at all"
    return text
