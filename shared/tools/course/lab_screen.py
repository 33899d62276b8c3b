"""What a lab shows on a terminal: story, symptom, tools, verdict and explanation."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diptych.shared import registry
from diptych.shared.tools.course.lab_scenes import SCENES, Scene, starter
from diptych.shared.tools.course.labs import Lab, Verdict, labs
from diptych.shared.tools.course.screen import console


def show_list(solved: set[int]) -> None:
    """Print the titles, with a mark at those that are solved."""
    out = console()
    out.print(Text(f"Twelve engines with one bug each; {len(solved)} solved.", "bold"))
    for lab in labs():
        mark, style = ("✓", "green") if lab.number in solved else ("·", "dim")
        out.print(Text.assemble("  ", (mark, style), f" {lab.number:2}  {lab.title}"))
    out.print("Begin: diptych course lab 1")


def show_symptom(lab: Lab) -> None:
    """Run the engine with the bug, and print what its user sees, and the tools to go on with."""
    out = console()
    out.print()
    out.print(Text(f"Lab {lab.number}: {lab.title}", "bold"))
    out.print(Text(lab.story, "italic"))
    out.print()
    with Console(stderr=True).status("running the engine ..."):
        scene = SCENES[lab.scene](starter(use=registry.parse_use(lab.choice)))
    out.print(table_of(scene))
    out.print(Text("This is wrong." if not scene.is_right else "Nothing is wrong here.", "bold red"))
    out.print()
    out.print("Which component has the bug, and which clause of its contract catches it?")
    for what, command in tools_of(lab):
        out.print(Text.assemble(f"  {what:22}", (command, "cyan")), soft_wrap=True)


def tools_of(lab: Lab) -> list[tuple[str, str]]:
    """(what, command): how to go on."""
    return [
        ("compare step by step", f"diptych diff --b {lab.choice}"),
        ("check every pool", f'diptych generate --use {lab.choice} --check-invariants "Hello"'),
        ("ask it yourself", f"diptych chat --use {lab.choice}"),
        ("replace one component", f"diptych diff --b sampler={lab.choice}"),
        ("check one component", f"diptych check sampler {lab.choice}"),
        ("answer", f"diptych course lab {lab.number} --answer COMPONENT:CLAUSE"),
    ]


def table_of(scene: Scene) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    for name in scene.columns:
        table.add_column(name, overflow="fold")
    for row in scene.rows:
        differs = not scene.is_right and len(row) == 3 and row[1] != row[2]
        table.add_row(*(Text(value, "red" if differs and i > 0 else "") for i, value in enumerate(row)))
    return table


def show_verdict(lab: Lab, answer: str, verdict: Verdict) -> None:
    """Print the verdict, and after a right answer the explanation. A wrong one tells nothing but itself."""
    out = console()
    component, _, clause = answer.partition(":")
    if verdict == "right":
        out.print(Text(f"Right: {answer}.", "bold green"))
        show_explanation(lab)
    elif verdict == "component":
        out.print(Text(f"The bug is in {component}. {clause} holds for it: another clause fails.", "yellow"))
    else:
        out.print(Text(f"The bug is not in {component}.", "bold red"))
        out.print(f"{component} of this engine is the reference's: its whole contract holds.")


def show_explanation(lab: Lab) -> None:
    """Print the component, the clauses that catch the bug, what is wrong, and where it happened."""
    out = console()
    out.print()
    out.print(Text(f"Lab {lab.number}, {lab.title}: {lab.component}, {lab.clauses[0]}", "bold"))
    out.print(Text(lab.explanation))
    if others := lab.clauses[1:]:
        out.print(Text(f"Also caught by {', '.join(others[:6])}{' ...' * (len(others) > 6)}.", "dim"))
    out.print("It happened in:")
    for link in lab.links:
        out.print(Text(f"  {link}", "cyan"), soft_wrap=True)
