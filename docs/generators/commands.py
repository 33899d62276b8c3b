"""Options of the commands, from the typer application; and the labs of the course."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import typer

from diptych.shared.tools.cli import app
from diptych.shared.tools.commands.options import EngineOptions, Options, SamplingOptions
from diptych.shared.tools.course import labs as course
from docs.generators.tables import cell, code, table


@cache
def _group() -> Any:
    """All commands, which typer reads from the signatures of functions: 0.1 s."""
    return typer.main.get_command(app)


def command(*words: str) -> str:
    """Help text, arguments and options of "bench offline". The options that several commands share are
    named in one line."""
    found: Any = _group()
    for word in words:
        found = found.commands[word]
    shared_help = {options: _helps(options) for options in (EngineOptions, SamplingOptions)}
    rows, has = [], set()
    for parameter in found.params:
        owner = next(
            (o for o, helps in shared_help.items() if helps.get(parameter.name) == _help(parameter)), None
        )
        if owner is not None:
            has.add(owner)
        elif parameter.name not in ("help", "install_completion", "show_completion"):
            rows.append([_names(parameter), _default(parameter), cell(_help(parameter))])
    above = "../" if words[0] == "bench" else ""  # those have a page in a folder
    blocks = [_text(found.help or "")]
    if rows:
        blocks.append(table(["Option", "Default", "Meaning"], rows))
    links = {
        EngineOptions: f"the [engine flags]({above}reference/engine-flags.md)",
        SamplingOptions: f"the [sampling options]({above}command-line.md#sampling-options)",
    }
    also = [text for owner, text in links.items() if owner in has]
    if also:
        blocks.append(f"It also takes {' and '.join(also)}.")
    return "\n\n".join(filter(None, blocks))


def sampling_options() -> str:
    found: Any = _group()
    helps = _helps(SamplingOptions)
    parameters = [each for each in found.commands["generate"].params if each.name in helps]
    rows = [[_names(each), cell(_help(each))] for each in parameters]
    return table(["Option", "Meaning"], rows)


def labs() -> str:
    rows = [[str(lab.number), f"**{lab.title}**", cell(lab.story)] for lab in course.labs()]
    return table(["Lab", "Title", "Story"], rows)


def _helps(options: type[Options]) -> dict[str, str]:
    return {name: _help(get_args(each)[1]) for name, each in options.annotations.items()}


def _help(parameter: Any) -> str:
    return " ".join((getattr(parameter, "help", None) or "").split())


def _names(parameter: Any) -> str:
    """Names of an option with the kind of its value: `--port N`."""
    if parameter.param_type_name == "argument":
        return code(parameter.name.upper())
    kind = "" if parameter.is_flag else f" {parameter.metavar or _kind(parameter)}"
    return ", ".join(code(name + kind) for name in [*parameter.opts, *parameter.secondary_opts])


def _kind(parameter: Any) -> str:
    """typer has its own parameters since 0.27, and click's before."""
    descriptor = getattr(parameter, "type_descriptor", None)
    name = descriptor.annotation.__name__ if descriptor is not None else parameter.type.name
    kinds = {"int": "N", "integer": "N", "float": "X", "float range": "X", "Path": "FILE", "path": "FILE"}
    return kinds.get(name, "TEXT")


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or callable(value) or value in ([], (), "") or "Sentinel" in type(value).__name__:
        return ""
    if isinstance(value, bool):
        return "on" if value else ""
    return code(", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))


def _text(text: str) -> str:
    """Paragraphs, without those that begin with \\b, which typer prints as they are."""
    paragraphs = [each for each in text.split("\n\n") if not each.startswith("\b")]
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)
