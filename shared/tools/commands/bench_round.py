"""`diptych bench round`: the cost of a round of speculation, piece by piece, in plain decode steps."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared.tools.commands import bench_run, launch
from diptych.shared.tools.commands.benchmark import Benchmark, Column, Output, ms, run
from diptych.shared.tools.commands.option_values import integers
from diptych.shared.tools.commands.options import EngineOptions, spread

if TYPE_CHECKING:
    from diptych.shared.tools.bench.round_cost import RoundResult


@spread
def round_(
    *,
    engine: EngineOptions,
    batch: Annotated[str, typer.Option(help="Requests; several numbers separated by commas.")] = "1,8,32",
    context: Annotated[
        str, typer.Option(help="Tokens with KV before the round; several by commas.")
    ] = "1024",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; the table has their median.")] = 30,
    output: Output = None,
) -> None:
    """The time of a round of speculation - draft, verify, accept, extend the drafter - and of a plain decode
    step. Speculation pays if a round accepts more tokens than it costs steps.

    For example: --model Qwen3-8B --speculative eagle3 --speculative-draft-model Qwen3-8B-eagle3
    """
    from diptych.shared.tools.bench.round_cost import check_case

    cases = [  # all of them before an engine is started
        (batch_size, context_len)
        for context_len, batch_size in product(integers("--context", context), integers("--batch", batch))
    ]
    for case in cases:
        check_case(*case)
    run(RoundBenchmark(cases, bench_run.with_dummy_weights(engine.to_flags()), repeats), output=output)


def time_of(piece: str) -> Column:
    return Column(piece, lambda result: ms(result.pieces.get(piece)))


class RoundBenchmark(Benchmark):
    name = "round"
    columns = (
        Column("batch", lambda result: str(result.batch_size)),
        Column("context", lambda result: str(result.context_len)),
        Column("decode", lambda result: ms(result.decode)),
        *(time_of(piece) for piece in ("draft", "verify", "accept", "extend")),
        Column("round", lambda result: ms(result.round)),
        Column("CPU", lambda result: ms(result.host)),
        Column("round / decode", lambda result: f"{result.ratio:.2f}"),
    )

    def __init__(self, cases: list[tuple[int, int]], flags: dict[str, Any], num_repeats: int) -> None:
        super().__init__(cases)
        self.flags = flags
        self.num_repeats = num_repeats

    def measure(self, progress: bench_run.Progress) -> None:
        from diptych.shared.config import draft_shape
        from diptych.shared.tools.bench.result_header import engine_facts
        from diptych.shared.tools.bench.round_cost import engine_flags, measure_round

        llm = launch.start_llm(engine_flags([batch_size for batch_size, _ in self.cases], self.flags))
        self.facts = engine_facts(llm)
        for batch_size, context_len in self.cases:
            progress.on_run(f"batch {batch_size}, context {context_len}")
            self.results.append(measure_round(llm, batch_size, context_len, self.num_repeats))
        shape = draft_shape(llm.config)
        self.title = f"{shape.num_steps} steps, top {shape.top_k}, {shape.num_draft_tokens} nodes; ms"

    def as_json(self, result: RoundResult) -> dict[str, Any]:
        return asdict(result) | {"ratio": result.ratio}
