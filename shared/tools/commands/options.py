"""Command-line options that several subcommands share: the flags of the engine and of the sampler.

None means "not given": defaults live in `EngineConfig` and `SamplingParams`, which also check the values.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import typer

from diptych.shared import registry
from diptych.shared.flags.engine_flags import EngineFlags
from diptych.shared.flags.flag import Flag, flags_of
from diptych.shared.tools.commands.option_values import chunk_size, integers, named_folders


def _option(panel: str, kind: Any, text: str, *names: str, **more: Any) -> Any:
    return Annotated[kind, typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)]


def option_of(flag: Flag) -> Any:
    """The option of an engine flag, as an annotation for typer."""
    name = "--" + flag.name.replace("_", "-")
    kind = {Mapping: list[str], tuple: str}.get(flag.kind, flag.kind)
    names = [name, flag.short] if flag.short else [name]
    return _option(flag.group, kind | None, help_of(flag), *names, metavar=flag.metavar or None)


def help_of(flag: Flag, has_default: bool = True) -> str:
    """The help of a flag with its choices and its default, if that is a value."""
    parts = [flag.help, f"One of {', '.join(flag.choices)}." if flag.choices else ""]
    is_value = flag.default is not None and flag.default is not False and flag.default != {}
    return " ".join(filter(None, [*parts, f"Default: {flag.default}." if has_default and is_value else ""]))


class Options:
    """The options of one kind that a command line gives. `annotations`: name -> type and option, for
    typer."""

    annotations: ClassVar[Mapping[str, Any]]

    def __init__(self, **values: Any) -> None:
        assert values.keys() <= self.annotations.keys()
        # Of a repeatable option that was not given, typer gives an empty list.
        self.given = {name: value for name, value in values.items() if value is not None and value != []}


class EngineOptions(Options):
    """One option for every field of `EngineConfig`, under the same name."""

    annotations: ClassVar[Mapping[str, Any]] = {
        name: option_of(flag) for name, flag in flags_of(EngineFlags).items()
    }

    def to_flags(self) -> dict[str, Any]:
        """The given options as keyword arguments of `LLM`."""
        flags = dict(self.given)
        if "use" in flags:
            flags["use"] = registry.parse_use(",".join(flags["use"]))
        if "lora_paths" in flags:
            flags["lora_paths"] = named_folders(",".join(flags["lora_paths"]))
        if "chunked_prefill_size" in flags:
            flags["chunked_prefill_size"] = chunk_size(flags["chunked_prefill_size"])
        if "cuda_graph_bs" in flags:
            flags["cuda_graph_bs"] = integers("--cuda-graph-bs", flags["cuda_graph_bs"])
        return flags

    def to_arguments(self) -> list[str]:
        """The given options as arguments of another `diptych` command."""
        arguments = []
        for name, value in self.given.items():
            option = "--" + name.replace("_", "-")
            for each in value if isinstance(value, list) else [value]:
                arguments += [option] if each is True else [option, str(each)]
        return arguments


_SAMPLING: dict[str, tuple[Any, str, str]] = {
    "max_new_tokens": (int, "-n", "Longest answer. Default: 128."),
    "min_new_tokens": (int, "", "Shortest answer."),
    "temperature": (float, "-t", "0: always the likeliest token. Default: the model's, else 0."),
    "top_k": (int, "", "Keep so many tokens; -1: all."),
    "top_p": (float, "", "Keep the likeliest up to this probability."),
    "min_p": (float, "", "Keep what is at least so likely as the best."),
    "filter_order": (str, "", "joint or sequential: top_p is a share of all tokens, or of top_k's."),
    "frequency_penalty": (float, "", "Per repetition in the answer."),
    "presence_penalty": (float, "", "Once per token in the answer."),
    "repetition_penalty": (float, "", "Divides what is in prompt or answer."),
    "seed": (int, "", "The same seed gives the same answer."),
    "stop": (list[str], "", "End before this text. May be repeated."),
    "stop_regex": (list[str], "", "End where this matches."),
    "ignore_eos": (bool, "", "Go on to the longest answer."),
}


class SamplingOptions(Options):
    """Options for the fields of `SamplingParams` that make sense on a command line."""

    annotations: ClassVar[Mapping[str, Any]] = {
        name: _option("Sampling", kind | None, text, "--" + name.replace("_", "-"), *filter(None, [short]))
        for name, (kind, short, text) in _SAMPLING.items()
    }

    def to_params(self, of_model: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of `SamplingParams`: the given options, then the model's, then temperature 0."""
        given = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.given.items()
        }
        return {"temperature": 0.0, **of_model, **given}


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Expand a command's parameters for typer: a parameter of one of the classes above becomes one option per
    annotation of the class."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Options]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        group = parameter.annotation
        if isinstance(group, type) and issubclass(group, Options):
            groups[name] = group
            parameters += [
                inspect.Parameter(each, parameter.KEYWORD_ONLY, default=None, annotation=annotation)
                for each, annotation in group.annotations.items()
            ]
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    def call(**values: Any) -> None:
        arguments = {
            name: group(**{each: values.pop(each) for each in group.annotations})
            for name, group in groups.items()
        }
        command(**values, **arguments)

    call.__name__ = command.__name__
    call.__doc__ = command.__doc__
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
