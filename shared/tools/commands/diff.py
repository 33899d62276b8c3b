"""`diptych diff`: runs two configurations in lockstep on the same prompts and finds where they diverge
first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.shared import registry
from diptych.shared.flags.engine_flags import EngineFlags
from diptych.shared.flags.flag import flags_of
from diptych.shared.tools.commands import bench_run, diff_precision, diff_servers
from diptych.shared.tools.commands.diff_prompts import make_prompts
from diptych.shared.tools.commands.option_values import chunk_size

if TYPE_CHECKING:
    from diptych.shared.tools.conformance.diff.outcome import Outcome

MAX_TOTAL_TOKENS = 8192
"""The default KV pool of each side, because two engines share the machine."""

BOTH_SIDES = ("model", "tokenizer", "load_format", "random_seed", "panel", "use")


def diff(
    a: Annotated[
        str,
        typer.Option("--a", metavar="PANEL|COMPONENT=IMPLEMENTATION,...|URL", help="What to compare with."),
    ] = "reference",
    b: Annotated[
        str | None,
        typer.Option(
            "--b",
            metavar="PANEL|COMPONENT=IMPLEMENTATION,...|URL",
            help="What is compared: optimized; attention=triton; sampler=file.py:Class,moe=reference; a URL. "
            "Components that are not named come from the panel, by default the reference. Without --b, and "
            "without flags of a side: every optimized component that runs on the device.",
            show_default=False,
        ),
    ] = None,
    a_flags: Annotated[
        str, typer.Option(metavar="FLAG=VALUE,...", help="Engine flags of A: page_size=16,context_len=512.")
    ] = "",
    b_flags: Annotated[str, typer.Option(metavar="FLAG=VALUE,...", help="Engine flags of B.")] = "",
    model: Annotated[
        str, typer.Option("--model", "-m", help="Built-in model, local folder or Hugging Face id.")
    ] = "tiny-dense",
    a_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Model of A, if not --model: measures what B's changes.", show_default=False
        ),
    ] = None,
    b_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Model of B, if not --model: measures what it changes.", show_default=False
        ),
    ] = None,
    load_format: Annotated[str, typer.Option(help="auto, or dummy: random weights.")] = "auto",
    random_seed: Annotated[int, typer.Option(help="Of dummy weights and random prompts.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16. Servers: also fp8, q8_0 ...")
    ] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, mps, cuda or cuda:1.")] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="A question to ask instead of the built-in ones. May be repeated."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue each prompt as it is, without the chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 32,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many batches of a side.", show_default=False)
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on to --max-new-tokens whatever is sampled.")
    ] = False,
    teacher_forced: Annotated[
        bool,
        typer.Option(
            "--teacher-forced", help="B goes on with A's tokens and experts: look beyond a near tie."
        ),
    ] = False,
    strict_schedule: Annotated[
        bool, typer.Option("--strict-schedule", help="Batches that are not the same are a divergence.")
    ] = False,
    graphs: Annotated[
        bool,
        typer.Option(
            "--graphs",
            help="Leave CUDA graphs on. Of the steps that they replay only logits and ids are compared.",
        ),
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(help="For servers: sent as a bearer token.", show_default=False)
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Two precisions or models: the largest mean KL divergence, in nats, with exit status 0.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Folder for a report, and the tensors that part.", show_default=False
        ),
    ] = None,
) -> None:
    """Run A and B on the same prompts, greedily, and compare every layer and op of every token.

    A side may be the URL of a server with OpenAI's API: then log-probabilities are compared.
    With another model, dtype, quantization or kv_cache_dtype on one side, both compute A's answers, and
    errors are measured instead: of each layer and op, and of the logits.

    Exit status 0: no divergence (near ties are reported, not counted), or none beyond --max-kl; 1: they
    diverge; 2: nothing could be compared.
    """
    if out is not None:
        bench_run.check_folder(out)
    if b is None:
        is_set = bool(a_flags or b_flags or a_model or b_model) or diff_servers.is_url(a)
        b = "reference" if is_set else runnable_components(device)
    has_server = diff_servers.is_url(a) or diff_servers.is_url(b)
    choices = tuple({} if diff_servers.is_url(side) else parse_side(side) for side in (a, b))
    sides = [choices[0] | parse_flags(a_flags), choices[1] | parse_flags(b_flags)]
    common: dict[str, Any] = {"model": model, "load_format": load_format, "random_seed": random_seed}
    common |= {
        "dtype": dtype,
        "device": device,
        "max_total_tokens": MAX_TOTAL_TOKENS,
        "disable_cuda_graph": not graphs,
    }
    for side, its_model in zip(sides, (a_model, b_model)):
        side |= {} if its_model is None else {"model": its_model}
    flags = (common | sides[0], common | sides[1])
    labels = _label(choices[0], a_flags), _label(choices[1], b_flags)
    only_of_panels = {
        "--teacher-forced": teacher_forced,
        "--strict-schedule": strict_schedule,
        "--graphs": graphs,
        "--steps": steps is not None,
    }
    if has_server or diff_precision.is_precision(*flags):
        refuse(only_of_panels, "servers, or to two precisions or models")
    if has_server:
        not_of_servers = {
            "--max-kl": max_kl is not None,
            "--ignore-eos": ignore_eos,
            "--a-model and --b-model": bool(a_model or b_model),
        }
        refuse(not_of_servers, "servers")
        status = diff_servers.diff_servers((a, b), flags, labels, prompt, raw, max_new_tokens, api_key, out)
        raise typer.Exit(status)
    if diff_precision.is_precision(*flags):
        status = diff_precision.diff_precision(
            flags, labels, prompt, raw, max_new_tokens, ignore_eos, max_kl, out
        )
        raise typer.Exit(status)
    if max_kl is not None:
        raise ValueError("--max-kl needs two precisions or models: --b-model, --b-flags quantization=fp8")

    modes: dict[str, Any] = {
        "teacher_forced": teacher_forced,
        "strict_schedule": strict_schedule,
        "graphs": graphs,
    }
    params = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": ignore_eos}
    outcome, facts = _compare(flags, labels, prompt, raw, params, modes, steps)
    print_outcome(outcome, facts)
    if out is not None:
        from diptych.shared.tools.conformance.diff.diff_report import write_report

        print("written:", *write_report(outcome, out, facts))
    if outcome.divergence is not None:
        raise typer.Exit(1)


def _compare(
    flags: tuple[dict[str, Any], dict[str, Any]],
    labels: tuple[str, str],
    texts: list[str] | None,
    raw: bool,
    params: dict[str, Any],
    modes: dict[str, Any],
    steps: int | None,
) -> tuple[Outcome, dict[str, str]]:
    """Run two panels in lockstep, in `modes` of `Lockstep`. Returns the outcome and facts about the run."""
    from diptych.shared.engine.llm import LLM
    from diptych.shared.tools.conformance.diff.lockstep import Lockstep
    from diptych.shared.types import SamplingParams

    engines = [LLM(**side) for side in flags]
    prompts = make_prompts(engines[0], texts, raw, flags[0]["random_seed"])
    outcome = _run(Lockstep(*engines, **modes), prompts, SamplingParams(**params), steps)
    facts = {
        "A": labels[0],
        "B": labels[1],
        "model": flags[0]["model"],
        "dtype, device": f"{str(outcome.dtype).removeprefix('torch.')}, {engines[1].config.device}",
        "prompts": f"{len(prompts)}, at most {params['max_new_tokens']} new tokens each, greedy"
        + ", B with A's tokens" * modes["teacher_forced"],
    }
    return outcome, facts


def refuse(given: dict[str, bool], what: str) -> None:
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"{name} does not apply to {what}")


def parse_side(text: str) -> dict[str, Any]:
    """ "optimized" or "attention=triton" or both, separated by commas -> panel and use."""
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    panels = [piece for piece in pieces if not is_use(piece)]
    unknown = [panel for panel in panels if panel not in registry.PANELS]
    if unknown or len(panels) > 1:
        raise ValueError(
            f"a side is one of {', '.join(registry.PANELS)}, and component=implementation, got {text!r}"
        )
    use = registry.parse_use(",".join(filter(is_use, pieces)))
    for component, choice in use.items():
        registry.check_choice(component, choice)
    return {"panel": panels[0] if panels else "reference", "use": use}


def is_use(piece: str) -> bool:
    """Whether a piece of a side is for `--use`; otherwise it names a panel."""
    return "=" in piece or piece.startswith("@") or registry.is_lab(piece)


def runnable_components(device: str | None) -> str:
    """The optimized components that the device can run: all on a GPU, elsewhere those without Triton
    kernels."""
    from diptych.shared.engine.build.settings import default_device

    if (device or default_device()).startswith("cuda"):
        return "optimized"
    return ",".join(f"{component}={choice}" for component, choice in registry.optimized_without_gpu().items())


def parse_flags(text: str) -> dict[str, Any]:
    """ "page_size=16,enable_mixed_chunk=true" -> engine flags, converted to their types."""
    flags: dict[str, Any] = {}
    known = flags_of(EngineFlags)
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = piece.partition("=")
        if not equals:
            raise ValueError(f"engine flags are given as flag=value, got {piece!r}")
        name = name.strip().replace("-", "_")
        if name in BOTH_SIDES:
            raise ValueError(f"{name} is not a flag of one side: use --a, --b or the option for both")
        if name not in known:
            names = (each for each in known if each not in BOTH_SIDES)
            raise ValueError(f"unknown flag {name}; the flags are {', '.join(names)}")
        flags[name] = known[name].parse(value.strip())
    if "chunked_prefill_size" in flags:
        flags["chunked_prefill_size"] = chunk_size(flags["chunked_prefill_size"])
    return flags


def _label(side: dict[str, Any], flags: str) -> str:
    if not side:
        return "a server"
    use = (f"{component}={choice}" for component, choice in side["use"].items())
    return ", ".join([side["panel"], *use, *filter(None, [flags])])


def _run(lockstep: Any, prompts: list[list[int]], params: Any, steps: int | None) -> Outcome:
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        return lockstep.run(prompts, params, steps)
    with console.status("running A and B ...") as status:
        return lockstep.run(
            prompts, params, steps, lambda outcome: status.update(f"{outcome.num_tokens} tokens compared")
        )


def print_outcome(outcome: Outcome, facts: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from diptych.shared.tools.conformance.diff.diff_report import summary

    console = Console()

    diff_precision.print_rows(console, list(facts.items()))
    console.print()
    if outcome.divergence is not None:
        console.print("first divergence", style="bold red")
        diff_precision.print_rows(console, outcome.divergence.rows())
    else:
        console.print("no divergence", style="bold green")
        table = Table("kind of op", "largest error", "allowed")
        for heading in ("op", "token"):
            table.add_column(heading, overflow="fold")
        for kind, worst in outcome.worst.items():
            token = f"{worst.key[0]}, position {worst.key[1]}"
            table.add_row(kind, f"{worst.ratio:.2e}", f"{worst.limit:.2e}", worst.op, Text(token))
        console.print(table)
    console.print()
    for line in summary(outcome):
        console.print(Text(line))
