"""`diptych bench speculation`: the gain of speculation for a model, a draft model and some prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands import bench_run, launch
from diptych.shared.tools.commands.benchmark import Benchmark, Column, Output, Repeats, WarmUps, run
from diptych.shared.tools.commands.option_values import integers
from diptych.shared.tools.commands.options import EngineOptions, spread

if TYPE_CHECKING:
    from rich.console import RenderableType

    from diptych.shared.tools.bench.prompt_texts import Asked
    from diptych.shared.tools.bench.speculation_gain import Comparison

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
            help="Concurrent requests; several numbers separated by commas. Default: those of 1,8,32 that "
            "there are prompts for.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Longest answer.")
    ] = 256,
    repeats: Repeats = 3,
    warm_ups: WarmUps = 1,
    output: Output = None,
) -> None:
    """Greedy answers to the same prompts with and without speculation, one engine after the other: speed,
    tokens per verification, and whether the texts are the same.

    For example: --speculative eagle3 --speculative-draft-model tiny-dense-eagle3
    """
    flags = engine.to_flags()
    if flags.get("speculative") is None:
        raise ValueError("choose what is measured: --speculative eagle3 or another algorithm")
    asked = choose_prompts(prompts, num_prompts)
    batches = choose_batches(batch, len(asked))

    benchmark = SpeculationBenchmark(
        {"max_running_requests": max(batches), **flags},
        asked,
        raw,
        batches,
        max_new_tokens,
        repeats,
        warm_ups,
    )
    benchmark.facts["prompts"] = "held-out questions" if prompts is None else str(prompts)
    run(benchmark, output=output)


class SpeculationBenchmark(Benchmark):
    """Two engines, one after the other."""

    name = "speculation"
    columns = (
        Column("concurrency", lambda case: str(case["batch_size"])),
        Column("plain, tok/s", lambda case: f"{case['plain_tokens_per_s']:,.1f}"),
        Column("speculative", lambda case: f"{case['speculative_tokens_per_s']:,.1f}"),
        Column("speed-up", lambda case: f"{case['speedup']:.2f}"),
        Column("tokens a verification", lambda case: f"{case['tokens_per_verification']:.2f}"),
        Column("bonus apart", lambda case: f"{case['accepted_per_verification']:.2f}"),
        Column("verifications", lambda case: f"{case['num_verifications']:,}"),
        Column(
            "texts alike",
            lambda case: f"{case['num_requests'] - len(case['departures'])} of {case['num_requests']}",
        ),
    )

    def __init__(
        self, flags: dict[str, Any], asked: list[Asked], is_raw: bool, batches: tuple[int, ...],
        max_new_tokens: int, num_repeats: int, num_warm_ups: int,
    ) -> None:  # fmt: skip
        from diptych.shared.tools.bench.speculation_gain import Comparison

        super().__init__()
        self.flags = flags
        self.asked = asked
        self.is_raw = is_raw
        self.options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "num_repeats": num_repeats,
            "num_warm_ups": num_warm_ups,
        }
        self.facts = {"num_prompts": len(asked), **self.options}
        self.results = [Comparison(batch_size) for batch_size in batches]

    def measure(self, progress: bench_run.Progress) -> None:
        """Measure the engine with speculation first, which finds errors in its flags early."""
        plain = {name: flag for name, flag in self.flags.items() if not name.startswith("speculative")}
        self.measure_engine(self.flags, progress)
        self.measure_engine(plain, progress)

    def measure_engine(self, flags: dict[str, Any], progress: bench_run.Progress) -> None:
        """Measure one engine. It is freed at the end of this call, because the next one needs the memory."""
        from diptych.shared.config import draft_shape
        from diptych.shared.tools.bench import speculation_gain as bench
        from diptych.shared.tools.bench.drive import check_fits
        from diptych.shared.tools.bench.prompt_texts import encode
        from diptych.shared.tools.bench.result_header import engine_facts
        from diptych.shared.tools.bench.step import free_memory
        from diptych.shared.tools.bench.workloads import Request

        llm = launch.start_llm(flags)
        device = llm.assembly.parts.allocator.device
        is_plain = llm.config.speculative is None
        try:
            prompts = encode(llm, self.asked, self.is_raw)
            check_fits(llm, [Request(prompt, self.options["max_new_tokens"]) for prompt in prompts])
            if not is_plain:
                shape = draft_shape(llm.config)
                self.title = f"{shape.num_steps} steps, top {shape.top_k}, {shape.num_draft_tokens} nodes"
                self.facts |= engine_facts(llm)
            for case in self.results:
                runs = case.plain if is_plain else case.speculative
                bench.measure(llm, prompts, case.batch_size, runs, on_run=progress.on_run, **self.options)
                if is_plain:
                    case.departures = bench.departures(llm, prompts, case.plain[0], case.speculative[0])
        finally:
            del llm
            free_memory(device)

    def complete(self) -> list[Comparison]:
        return [case for case in self.results if case.is_complete]

    def table(self, results: list[Comparison]) -> RenderableType:
        return super().table([case.as_json() for case in results])

    def notes(self, results: list[Comparison]) -> Iterator[str]:
        for case in results:
            if case.departures:
                yield f"concurrency {case.batch_size}: {departures_text(case)}"


def choose_prompts(file: Path | None, num: int | None) -> list[Asked]:
    from diptych.shared.tools.bench.prompt_texts import held_out, read_prompts

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


def departures_text(case: Comparison) -> str:
    """A sentence on texts that differ: at a near tie of two tokens, rounding decides."""
    distances = [departure.distance for departure in case.departures]
    near = [distance for distance in distances if distance is not None]
    text = f"{len(distances)} texts part"
    if near:
        text += f", where log-probabilities are at most {max(near):.2g} apart"
    if len(near) < len(distances):
        text += f"; {len(distances) - len(near)} of them where one of the tokens is not likely at all"
    return text
