"""`diptych soak`: a whole engine under random load, for a given time."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from diptych.shared.tools.commands.options import EngineOptions, spread

SECONDS_PER_LINE = 5.0


@spread
def soak(
    *,
    engine: EngineOptions,
    seconds: Annotated[
        float,
        typer.Option(
            help="Time for all rounds; the last is cut short. 0: one round.", rich_help_panel="Load"
        ),
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the first round.", rich_help_panel="Load")] = 0,
    acts: Annotated[
        int, typer.Option(min=1, help="What happens in a round, aside from its end.", rich_help_panel="Load")
    ] = 120,
    server: Annotated[
        bool,
        typer.Option("--server", help="Servers, whose processes are killed.", rich_help_panel="Load"),
    ] = False,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="Of --server, may be repeated. Default: all modes in turn.",
            rich_help_panel="Load",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run rounds with random flags and random requests, streamed, aborted, dropped and retracted. All
    invariants are checked after every step, and each answer is compared with that of the request alone.
    Computes in float32; flags given here apply in every round.

    With --server a round starts `diptych serve` in one of its modes on a CPU, and kills its processes at
    random moments: answers are right or errors, and no process, file or slot of a pool is left.

    Exit status 0: no failure; 1: a round failed; 2: nothing could be compared.
    `--seed N --seconds 0` repeats round N.
    """
    if not 0 <= seconds < math.inf:  # 0: one round
        raise ValueError(f"--seconds must be finite and at least 0, got {seconds}")

    if server:
        if engine.to_flags():
            raise ValueError(
                f"--server has the flags of its modes; --{next(iter(engine.to_flags()))} has no effect"
            )
        _soak_servers(mode, seconds, seed)
        return

    from diptych.shared.tools.conformance.whole_engine.soak import Soak, Tally

    soak = Soak(engine.to_flags(), acts)
    progress = Progress()
    number, total = seed, Tally()
    deadline = time.monotonic() + seconds if seconds else math.inf
    try:
        while number == seed or (seconds and time.monotonic() < deadline):
            with progress.round(f"round {number}: {sentence(total)}"):
                total = total.plus(soak.round(number, deadline, progress.update))
            number += 1
    except KeyboardInterrupt:
        print(f"interrupted after {number - seed} rounds: {sentence(total)}")
        raise typer.Exit(130) from None
    except AssertionError as error:  # from a comparison, an invariant, or the engine
        print(f"round {number} failed after {number - seed} good ones", file=sys.stderr)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        print(f"repeat it with --seed {number} --seconds 0", file=sys.stderr)
        raise typer.Exit(1) from None
    if total.num_requests == 0:  # no failure, because there were no requests
        raise ValueError(
            f"nothing was compared: no round of {acts} acts had an answer; raise --acts or --seconds"
        )
    print(f"rounds: {number - seed}; {sentence(total)}")


def _soak_servers(modes: list[str] | None, seconds: float, seed: int) -> None:
    try:
        from diptych.shared.tools.conformance.whole_engine.chaos import MODES, Chaos, Tally
    except ImportError as error:
        raise ImportError(f"servers need {error.name}: pip install 'diptych[server]'") from None

    chaos, tally, number = Chaos(modes or [*MODES]), Tally(), seed
    deadline = time.monotonic() + seconds
    progress = Progress()
    try:
        while number == seed or (seconds and time.monotonic() < deadline):
            with progress.round(f"round {number}"):
                chaos.round(number, tally, progress.update)
            number += 1
    except KeyboardInterrupt:
        print(f"interrupted; rounds: {tally.num_rounds}; {tally}")
        raise typer.Exit(130) from None
    except AssertionError as error:
        print(f"round {number} failed after {tally.num_rounds} good ones: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"rounds: {tally.num_rounds}; {tally}")


def sentence(tally: Any) -> str:
    return (
        f"{tally.num_requests} answers, {tally.num_cut} of them cut short, in {tally.num_steps} steps, "
        f"{tally.num_retractions} retractions, {tally.num_near_ties} near ties"
        + f", {tally.num_uncompared} more answers not compared"
        * bool(tally.num_uncompared)
    )


class Progress:
    """Shows what the current round does: a status line on a terminal, otherwise lines on standard error."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)
        self.last_print = time.monotonic()

    @contextmanager
    def round(self, title: str) -> Iterator[None]:
        self.title = title
        with self.console.status(title) as self.status:
            yield

    def update(self, what: str) -> None:
        text = f"{self.title}; {what}"
        if self.console.is_terminal:
            self.status.update(text)
        elif time.monotonic() - self.last_print > SECONDS_PER_LINE:
            self.last_print = time.monotonic()
            print(text, file=sys.stderr)
