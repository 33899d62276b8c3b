"""Options that the subcommands of `diptych course` share."""

import typer

FOLDER = typer.Option("--folder", help="The folder of your files.", show_default="this folder")
