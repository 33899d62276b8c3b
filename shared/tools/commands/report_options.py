"""Options of the reports that every `diptych check` writes."""

from pathlib import Path
from typing import Annotated

import typer

from diptych.shared.tools.commands.option_values import LARGEST_SEED

JunitFile = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML, for CI.", show_default=False)
]
SarifFile = Annotated[
    Path | None,
    typer.Option("--sarif", metavar="FILE", help="Write SARIF, for code scanners.", show_default=False),
]
BadgeFile = Annotated[
    Path | None,
    typer.Option(
        "--badge", metavar="FILE", help="Write the JSON of a badge of shields.io.", show_default=False
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write everything that was found.")
]
SecretSeed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        max=LARGEST_SEED,
        help="Of all inputs. Default: a secret one, which is printed.",
        show_default=False,
    ),
]
