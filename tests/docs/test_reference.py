"""Reference pages: every component, flag, route and field has its text, and sample outputs are current."""

import ast
import itertools
import re
from pathlib import Path

import pytest

from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.flags.flag import flags_of
from diptych.shared.interfaces import PrefixCache, Scheduler
from diptych.shared.tools.conformance.server.checks import all_checks
from diptych.shared.types import ForwardBatch, ForwardMode, Req, StepOutput
from docs.generators import classes, http
from docs.generators.expand import expand
from docs.generators.record_clients import clients
from docs.generators.record_samples import FOLDER, command_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def expanded(page: str) -> str:
    return expand((DOCS / page).read_text(encoding="utf-8"))


def rows_without_text(markdown: str, name: str) -> list[str]:
    """Rows of the tables headed by `name` whose last cell is empty."""
    found, is_wanted = [], False
    for line in markdown.splitlines():
        if line.startswith(f"| {name} |"):
            is_wanted = True
        elif not line.startswith("|"):
            is_wanted = False
        elif is_wanted and re.search(r"\|\s*\|$", line):
            found.append(line)
    return found


def test_every_component_and_every_interface_has_a_page() -> None:
    for name in registry.IMPLEMENTATIONS:
        text = (DOCS / "components" / f"{name}.md").read_text(encoding="utf-8")
        assert f"<!-- generate: component {name} -->" in text
    texts = [expand(path.read_text("utf-8")) for path in (DOCS / "components").glob("*.md")]
    for interface in (ROOT / "shared" / "interfaces").glob("[a-z]*.py"):
        quote = f"::: diptych.shared.interfaces.{interface.stem}."
        assert sum(quote in text for text in texts) == 1, interface.stem


def test_every_flag_says_what_it_does_and_costs() -> None:
    text = expanded("reference/engine-flags.md")
    assert rows_without_text(text, "Flag") == []
    for name in flags_of(EngineConfig):
        assert text.count(f"| `--{name.replace('_', '-')}` |") == 1, name


def test_every_route_and_field_has_a_meaning() -> None:
    text = expanded("reference/http-api.md")
    assert rows_without_text(text, "Route") == []
    assert rows_without_text(text, "Field") == []
    shown = set(re.findall(r"generate: body [\w.]+\.(\w+)", (DOCS / "reference" / "http-api.md").read_text()))
    in_a_line = {f"{name}Request" for name in ("Tokenize", "Detokenize", "ApplyTemplate", "CountTokens")}
    assert http.bodies() - shown == in_a_line


def test_every_client_has_a_recorded_run_or_says_that_it_has_none() -> None:
    text = expanded("works-with.md")
    for client in clients():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {client.name} |")]
        assert re.search(r"\| (passed|failed|not run)", row), row


def test_every_sampling_parameter_has_a_meaning() -> None:
    text = expanded("reference/python-api.md").partition("## SamplingParams")[2].partition("*Computed:*")[0]
    assert "| `temperature` |" in text
    assert rows_without_text(text, "Field") == []


def test_every_check_of_a_server_is_in_the_table() -> None:
    text = expanded("check-server.md")
    assert rows_without_text(text, "Check") == []
    names = [each.name for each in all_checks()]
    assert re.findall(r"^\| `([a-z]+\.\w+)` \|", text, re.MULTILINE) == names


def test_samples_have_a_command_and_an_output_and_are_shown() -> None:
    quoted = {
        name
        for path in DOCS.rglob("*.md")
        for name in re.findall(r'--8<-- "docs/samples/([\w-]+)\.txt"', path.read_text(encoding="utf-8"))
    }
    samples = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.txt")}
    assert quoted == set(samples)
    for name, text in samples.items():
        command = command_of(text)
        assert 0 < len(command) < len(text) - 1, f"python -m docs.generators.record_samples {name}"


def test_fields_are_read_from_the_source() -> None:
    fields = {field.name: field for field in classes.fields_of(ForwardBatch)}
    assert fields["seq_lens"].type == "torch.Tensor"
    assert fields["seq_lens"].comment.startswith("[bs] int64")
    assert fields["custom_mask"].comment.startswith("TARGET_VERIFY")  # the lines above it
    assert fields["batch_size"].default == "computed"
    groups = [field.group for field in classes.fields_of(Req) if field.group]
    assert "Memory." in groups
    assert [field.name for field in classes.fields_of(ForwardMode)][:2] == ["EXTEND", "DECODE"]


_ITEM = re.compile(r" *(?:- |\d+\. )")


def list_without_blank_line(text: str) -> list[str]:
    """Lines that Markdown joins: a list behind text, and text behind a list."""
    found, indent = [], None
    for above, line in itertools.pairwise(["", *text.splitlines()]):
        depth = len(line) - len(line.lstrip())
        is_item = _ITEM.match(line) is not None
        if is_item and indent is None and above.strip():
            found.append(line)
        if line.strip() and not is_item and indent is not None and depth <= indent:
            found.append(line)
        indent = depth if is_item else indent if line.strip() else None
    return found


@pytest.mark.parametrize("folder", ["interfaces", "types", "config"])
def test_lists_in_docstrings_are_lists_on_the_page(folder: str) -> None:
    for path in (ROOT / "shared" / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                assert list_without_blank_line(ast.get_docstring(node) or "") == [], path.name
    assert list_without_blank_line("First:\n- one\nand more") == ["- one", "and more"]


def test_types_are_followed_from_signatures() -> None:
    reached = classes.types_reached([Scheduler])
    assert {Req, StepOutput, PrefixCache} <= set(reached)
    assert Scheduler not in reached
