"""The `diptych` command: puts the subcommands together and turns expected errors into one line."""

import atexit
import gc
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from diptych.shared.tools.commands import (
    bench,
    chat,
    check,
    convert,
    course,
    diff,
    doctor,
    evaluate,
    export,
    generate,
    quantize,
    route,
    serve,
    size,
    soak,
    tune,
    warm,
)

UsageError: Any = typer.BadParameter.__base__  # of the click that typer uses


class _OneLineErrors(TyperGroup):
    """A wrong option, and what the engine says about a bad request (`ValueError`), a missing file or a
    missing package, is for the user: one line on stderr and exit status 2. Anything else is a defect of ours
    and keeps its trace."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            raise _wrong_use(error) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            raise _wrong_use(error) from None
        except (ValueError, OSError, ImportError) as error:
            if ctx.params["debug"] or isinstance(error, BrokenPipeError):
                raise
            print("error:", " ".join(str(error).split()), file=sys.stderr)
            raise typer.Exit(2) from None


def _wrong_use(error: Any) -> Exception:
    """What ends the command: without any argument its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return error
    command = error.ctx.command_path if error.ctx else "diptych"
    print(f"error: {' '.join(error.format_message().split())} ({command} --help)", file=sys.stderr)
    return typer.Exit(2)


app = typer.Typer(
    cls=_OneLineErrors,
    help="Diptych: one LLM serving engine, implemented twice.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("route")(route.route)
app.command("doctor")(doctor.doctor)
app.command("diff")(diff.diff)
app.command("eval")(evaluate.evaluate)
app.command("quantize")(quantize.quantize)
app.command("convert")(convert.convert)
app.command("size")(size.size)
app.command("soak")(soak.soak)
app.command("tune")(tune.tune)
app.command("warm")(warm.warm)
app.add_typer(bench.app, name="bench")
app.add_typer(check.app, name="check")
app.add_typer(course.app, name="course")
app.add_typer(export.app, name="export")


def _print_version(value: bool) -> None:
    if value:
        from diptych import __version__

        print(f"diptych {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """The options before the subcommand's name."""


def main() -> None:
    atexit.register(_end_quickly)
    asked = [each for each in app.registered_commands if sys.argv[1:2] == [each.name]]
    if asked:  # making the options of all commands takes a tenth of a second
        app.registered_commands, app.registered_groups = asked, []
    app(prog_name="diptych")


def _end_quickly() -> None:
    """Python looks for garbage when it ends, among all that torch has made: a third of a second for nothing.
    Without that, Triton's bindings print what they take for leaks."""
    if "triton._C.libtriton" not in sys.modules:
        gc.freeze()
