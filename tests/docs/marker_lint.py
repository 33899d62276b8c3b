"""Lint of section markers, the comments by which pages quote code. Run it: python tests/docs/marker_lint.py

In a source: "--8<-- [start:kebab-label]" and "--8<-- [end:kebab-label]" after a comment sign. In a page:
--8<-- "path/of/source.py:kebab-label". The snippets extension reads an unterminated section to the end of
the file and takes the first of two equal labels, without a warning. This lint reports both.

Two files of the same name in both panels have the same labels. ONE_PANEL lists the labels whose mechanism
exists in one panel only.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_LINES = 25
MAX_SECTIONS = 4
SOURCES = ("shared", "reference", "optimized", "docs/examples", "docs/course/toys")

ONE_PANEL = {  # (file, label): why its twin does not have it
    (
        "reference/speculative/draft_tree.py",
        "next-beams",
    ): "one kernel, optimized/kernels/draft/draft_beam_step.py",
    ("reference/speculative/draft_tree.py", "choose-nodes"): "one kernel, find-the-bound of draft_select.py",
    ("reference/speculative/draft_tree.py", "link-tree"): "one kernel, climb-to-the-root of draft_link.py",
    ("reference/speculative/draft_tree.py", "accept-walk"): "one kernel, ask-all-nodes of draft_accept.py",
    ("reference/models/qwen_next.py", "gated-delta-net"): "the same steps, in kernels",
    ("reference/models/qwen_next.py", "gated-attention"): "the same steps over one GEMM",
    ("reference/linear_attention.py", "convolve"): "a kernel, optimized/kernels/recurrence/convolve.py",
    ("reference/linear_attention.py", "delta-rule"): "a kernel, optimized/kernels/recurrence/delta_rule.py",
}

_MARKER = re.compile(r"#\s*--8<--\s*\[(start|end):([^\]]*)\]")
_QUOTE = re.compile(r'^\s*--8<--\s+"([^":]+)(?::([^"]*))?"')
_LABEL = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Section:
    path: str  # relative to the root
    label: str
    num_lines: int  # of code, markers within it not counted


def sections_of(path: str, text: str) -> tuple[list[Section], list[str]]:
    """The sections of one source, and the errors of its markers."""
    sections: list[Section] = []
    errors: list[str] = []
    open_at: dict[str, int] = {}  # label -> lines of code before it
    num_lines = 0
    for number, line in enumerate(text.splitlines(), start=1):
        marker = _MARKER.search(line)
        if marker is None:
            if "--8<--" in line:
                errors.append(f"{path}:{number}: no section marker: {line.strip()}")
            num_lines += 1
            continue
        kind, label = marker.groups()
        where = f"{path}:{number}: section {label!r}"
        if not _LABEL.fullmatch(label):
            errors.append(f"{where} is no kebab-case label")
        if kind == "start":
            if label in open_at or any(section.label == label for section in sections):
                errors.append(f"{where} is started twice")
            open_at[label] = num_lines
        elif label not in open_at:
            errors.append(f"{where} ends without a start")
        else:
            sections.append(Section(path, label, num_lines - open_at.pop(label)))
    errors += [f"{path}: section {label!r} is never ended" for label in open_at]
    for section in sections:
        if not 1 <= section.num_lines <= MAX_LINES:
            errors.append(
                f"{path}: section {section.label!r} has {section.num_lines} lines, not 1 to {MAX_LINES}"
            )
    if len(sections) > MAX_SECTIONS:
        errors.append(f"{path}: {len(sections)} sections; at most {MAX_SECTIONS} are allowed")
    return sections, errors


def quotes_of(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, path, label) of every quote in a page; label "" for a whole file."""
    for number, line in enumerate(text.splitlines(), start=1):
        match = _QUOTE.match(line)
        if match:
            yield number, match.group(1), match.group(2) or ""


def labels_of_one_twin(
    root: Path, sections: Iterable[tuple[str, str]], allowed: Mapping[tuple[str, str], str]
) -> list[str]:
    """Errors of sections that stand in one of two twins only, and of entries of `allowed` that do not."""
    found = set(sections)
    errors = []
    for path, label in found:
        panel, _, name = path.partition("/")
        other = {"reference": "optimized", "optimized": "reference"}.get(panel)
        is_alone = other is not None and (f"{other}/{name}", label) not in found
        if is_alone and (root / other / name).is_file() and (path, label) not in allowed:
            errors.append(f"{path}: section {label!r} is missing in {other}/{name}")
    for path, label in allowed:
        twin = path.replace("reference/", "optimized/", 1)
        if (path, label) not in found or (twin, label) in found:
            errors.append(f"ONE_PANEL: {path} has no section {label!r}, or its twin has it too")
    return sorted(errors)


def lint(root: Path = ROOT, one_panel: Mapping[tuple[str, str], str] = ONE_PANEL) -> list[str]:
    """All errors, over all sources and pages."""
    errors: list[str] = []
    sections: dict[tuple[str, str], Section] = {}
    for folder in SOURCES:
        for source in sorted((root / folder).rglob("*.py")):
            path = source.relative_to(root).as_posix()
            found, wrong = sections_of(path, source.read_text(encoding="utf-8"))
            errors += wrong
            sections |= {(path, section.label): section for section in found}
    errors += labels_of_one_twin(root, sections, one_panel)
    quoted: set[tuple[str, str]] = set()
    for page in sorted((root / "docs").rglob("*.md")):
        for number, path, label in quotes_of(page.read_text(encoding="utf-8")):
            where = f"{page.relative_to(root)}:{number}"
            if not label and not path.endswith(".py"):
                continue  # a picture or a sample output
            if not label:
                errors.append(f"{where}: quotes all of {path}: name a section of it")
            elif (path, label) not in sections:
                errors.append(f"{where}: {path} has no section {label!r}")
            quoted.add((path, label))
    errors += [
        f"{path}: no page quotes section {label!r}" for path, label in sections if (path, label) not in quoted
    ]
    return errors


if __name__ == "__main__":
    problems = lint()
    print("\n".join(problems) or "all section markers are correct")
    sys.exit(bool(problems))
