"""`diptych check engine`: whether other kernels or another number format cost accuracy or invariance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared import registry
from diptych.shared.tools.commands import bench_run
from diptych.shared.tools.commands.announced import Announced
from diptych.shared.tools.commands.report_options import BadgeFile, JsonFile, JunitFile, SarifFile
from diptych.shared.tools.conformance.ci_reports import Checked, CiReport

if TYPE_CHECKING:
    from diptych.shared.tools.conformance.whole_engine.engine_gate import GateReport

MAX_TOTAL_TOKENS = 32768


def check_engine(
    arm: Annotated[
        str | None,
        typer.Argument(
            metavar="A",
            help="What is checked, separated by commas: a panel, component=implementation, flag=value, "
            "model=FOLDER. attention=file.py:Class; optimized,dtype=bfloat16; quantization=int8.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        str,
        typer.Option(metavar="B", help="The native engine, in the same form."),
    ] = "reference,dtype=bfloat16",
    model: Annotated[
        str, typer.Option("--model", "-m", help="Built-in model, local folder or Hugging Face id.")
    ] = "tiny-dense",
    device: Annotated[str | None, typer.Option(help="cpu, mps, cuda or cuda:1.")] = None,
    margin: Annotated[
        float, typer.Option(min=0.0, help="Share of B's error that A's may exceed it by.")
    ] = 0.25,
    num_prompts: Annotated[int, typer.Option(min=2, help="Prompts, which the interval resamples.")] = 64,
    num_tokens: Annotated[int, typer.Option(min=1, help="Tokens that follow each prompt.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the prompts and of the bootstrap.")] = 0,
    within: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="The check ends after this time.")
    ] = 3600.0,
    json_file: JsonFile = None,
    junit: JunitFile = None,
    sarif: SarifFile = None,
    badge: BadgeFile = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List gates and what A can be; run nothing.")
    ] = False,
) -> None:
    """Compare an engine's logits with float32, as B's are: A's error may not be larger by more than a share.

    All engines decode the same tokens. Gates: KL divergence and error of log-probabilities with a bootstrap
    interval over prompts; the same logits alone and in a batch, and with a cold and a warm prefix cache.
    Exit status 0: every gate holds; 1: one fails; 2: the time was over.
    """
    if list_all:
        print_list()
        return
    if arm is None:
        raise ValueError("name A, the engine that is checked: optimized,dtype=bfloat16; --list shows more")
    bench_run.check_files(None, json_file, junit, sarif, badge)
    from diptych.shared.tools.conformance.whole_engine.engine_gate import GATES
    from diptych.shared.tools.conformance.whole_engine.engine_gate import check_engine as run_gates

    for name, spec in (("A", arm), ("--against", against)):
        if not spec.strip(", "):
            raise ValueError(
                f"{name} names no engine, got {spec!r}: optimized,dtype=bfloat16; --list shows more"
            )
    common = {"model": model, "device": device, "max_total_tokens": MAX_TOTAL_TOKENS}
    flags = [common | parse_spec(spec) for spec in (arm, against)]
    oracle = {**common, "panel": "reference", "dtype": "float32", "model": flags[1]["model"]}
    for each in flags:
        check_flags(each)
    prompts = prompts_of(flags[1]["model"], num_prompts, seed)
    check_room(flags[1]["model"], prompts, num_tokens)
    end = Announced(f"{len(GATES)} gates of {arm}", within, seed)
    report = run_gates(flags[0], flags[1], oracle, prompts, num_tokens, margin, seed, end.ends_at)
    print_gates(report, arm, against)
    print(*end.late, sep="\n", end="\n" * len(end.late))
    for_ci(report, arm, against, seed).write(junit, sarif, badge)
    if json_file is not None:
        found: dict[str, Any] = {
            "verdict": report.sentence,
            "gates": [vars(gate) | {"verdict": gate.verdict} for gate in report.gates],
        }
        found |= {"A": arm, "B": against, "model": model, "margin": margin, "seed": seed}
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if report.failing or report.undecided:
        raise typer.Exit(1)
    if report.num_not_run:
        raise typer.Exit(2)


def print_list() -> None:
    from rich.console import Console
    from rich.text import Text

    from diptych.shared.tools.conformance.whole_engine.engine_gate import GATES

    console = Console()
    for name, sentence in GATES.items():
        console.print(Text(f"{name:24} {sentence}"))
    console.print(Text("A and B are one or several of these, separated by commas:", "bold"))
    forms = {
        " or ".join(registry.PANELS): "a panel",
        "dtype=float16": "a flag of diptych serve",
        "model=FOLDER": "another checkpoint",
        "COMPONENT=file.py:Class": ", ".join(registry.IMPLEMENTATIONS),
    }
    for form, what in forms.items():
        console.print(Text(f"{form:24} {what}"))


def parse_spec(text: str) -> dict[str, Any]:
    """ "optimized,attention=triton,page_size=16" -> flags of an engine. Raises `ValueError` for a name that
    is no panel, component or flag."""
    from diptych.shared.tools.commands.diff import parse_flags, parse_side

    side, flags, found = [], [], {}
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = piece.partition("=")
        if name == "model":
            found["model"] = value
        elif not equals or (name in registry.IMPLEMENTATIONS and not is_method(name, value)):
            side.append(piece)
        else:
            flags.append(piece)
    return parse_side(",".join(side)) | parse_flags(",".join(flags)) | found


def check_flags(flags: dict[str, Any]) -> None:
    """Raises `ValueError` for what an engine with these flags refuses before it loads weights: a missing file
    of a component, a flag's value, a model that cannot be read."""
    from diptych.shared.config import EngineConfig
    from diptych.shared.engine.build.plan import make_plan

    config = EngineConfig().updated(**flags)
    if config.num_ranks == 1 and not config.disaggregation:  # others plan in their processes
        make_plan(config)


def is_method(name: str, value: str) -> bool:
    """Whether `quantization=int8` names a method, which is a flag, and no implementation of the component."""
    return name == "quantization" and value not in registry.PANELS and ":" not in value


def prompts_of(model: str, num: int, seed: int) -> list[list[int]]:
    """Beginnings of conversations of the built-in corpus, by the model's chat template or as text. They end
    inside a message, where several continuations are likely."""
    import random

    from diptych.shared.loading.model_path import resolve_model_path
    from diptych.shared.text.tokenizer import Tokenizer
    from diptych.shared.tools.corpus.corpus import held_out_questions

    tokenizer = Tokenizer.from_pretrained(resolve_model_path(model))
    rng, found = random.Random(seed), []
    for question in held_out_questions(num, seed):
        has_template = bool(tokenizer.chat_template)
        text = question.messages[-1]["content"]
        ids = tokenizer.chat(question.messages) if has_template else tokenizer.encode(text)
        found.append(ids[: max(2, round(len(ids) * rng.uniform(0.3, 0.8)))])
    return found


def check_room(model: str, prompts: list[list[int]], num_tokens: int) -> None:
    """Raises `ValueError` if the longest prompt leaves no room for so many tokens."""
    from diptych.shared.config import read_config
    from diptych.shared.loading.model_path import resolve_model_path

    longest = max(map(len, prompts))
    room = read_config(resolve_model_path(model)).context_len - longest
    if num_tokens > room:
        raise ValueError(
            f"--num-tokens {num_tokens}: {model} has room for {room} behind a prompt of {longest} tokens"
        )


def print_gates(report: GateReport, arm: str, against: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    colours = {"holds": "green", "undecided": "yellow", "fails": "bold red"}
    is_open = report.undecided or report.num_not_run
    worst = "fails" if report.failing else "undecided" if is_open else "holds"
    console.print(Text(report.sentence, colours[worst]))
    console.print(Text(f"A {arm}, B {against}, errors against float32, in nats", "dim"))
    table = Table("gate", "A", "B", "upper end", "allowed", "verdict")
    for gate in report.gates:
        numbers = [f"{value:.2e}" for value in (gate.arm, gate.native, gate.upper, gate.allowed)]
        table.add_row(gate.name, *numbers, Text(gate.verdict, colours[gate.verdict]))
    console.print(table)
    for gate in report.gates:
        if gate.note:
            console.print(Text(f"{gate.name}: {gate.note}"))
    console.print(Text(f"same best token as float32: {report.same_best:.2%} of positions"))


def for_ci(report: GateReport, arm: str, against: str, seed: int) -> CiReport:
    checks = [
        Checked(
            gate.name,
            f"The {gate.name} of {arm} is within the limit that {against} gives.",
            []
            if gate.holds
            else [f"upper end {gate.upper:.2e}, allowed {gate.allowed:.2e} {gate.note}".strip()],
            "engine",
            "engine",
        )
        for gate in report.gates
    ]
    if report.num_not_run:
        late = f"the time is over; {report.num_not_run} gates are not run"
        checks.append(Checked("all gates", "All gates are run.", [], "engine", "engine", not_run=late))
    return CiReport(f"diptych check engine {arm} --against {against}", {"seed": str(seed)}, checks)
