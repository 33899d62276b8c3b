"""The parts of a component's page: contract, types, clauses, implementations, and how to check one."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from collections import Counter
from functools import cache
from itertools import chain
from pathlib import Path

from diptych.shared import registry
from diptych.shared.engine.build.component_check import _CLASSES, _FINDERS, _MODULES
from diptych.shared.tools.conformance.clauses import suite
from diptych.shared.tools.conformance.clauses.contract_versions import FIRST, recorded
from docs.generators.classes import ROOT, fields_of, methods_of, path_of, types_reached
from docs.generators.tables import card, cell, field_table, indented, table

KILLERS = ROOT / "tests" / "conformance" / "killers.json"

INTERFACES = {
    "radix_cache": "prefix_cache",
    "chunk_cache": "prefix_cache",
    "models": "model",
    "draft_models": "draft_model",
}
"""Component -> the module of diptych.shared.interfaces with its contract, where the name differs."""

PAGES = {"prefix_cache": "radix_cache", "model": "models", "draft_model": "draft_models"}
"""Module of diptych.shared.interfaces -> its page, where the name differs."""

ELSEWHERE = {
    "EngineConfig": "../reference/engine-flags.md",
    "SamplingParams": "../reference/python-api.md#samplingparams",
}
"""Types that have a page of their own."""


def component(name: str) -> str:
    """Everything that is generated on the page of a component of the registry."""
    shared_contract = INTERFACES.get(name) and PAGES[INTERFACES[name]] != name
    parts = ["## Implementations", implementations(name)]
    if not shared_contract:
        parts += ["## Contract", contract(INTERFACES.get(name, name))]
        found = types(INTERFACES.get(name, name))
        parts += ["## Types", found] if found else []
    parts += ["## Clauses", clauses(name), "## Check your own", check(name)]
    return "\n\n".join(parts)


def components() -> str:
    """All components of the registry."""
    rows = []
    for name in registry.IMPLEMENTATIONS:
        module = importlib.import_module(f"diptych.shared.interfaces.{INTERFACES.get(name, name)}")
        interfaces = ", ".join(f"`{cls.__name__}`" for cls in _interfaces(module.__name__))
        found = suite.clauses_of(name)
        num_cases = sum(len(clause.cases) for clause in found)
        rows.append(
            [f"[`{name}`]({name}.md)", interfaces, len(found), num_cases, sum(_caught(name).values())]
        )
    return table(["Component", "Interfaces", "Clauses", "Cases", "Planted bugs"], rows, "llrrr")


def contract_versions() -> str:
    """All contracts with their version, and below, what each version changed."""
    rows, changes = [], []
    for name, record in recorded().items():
        *_, version = record["changes"]
        rows.append([f"[`{name}`](components/{name}.md)", version, len(record["clauses"])])
        changes += [f"- `{name}` {v}: {text}" for v, text in record["changes"].items() if text != FIRST]
    head = table(["Contract", "Version", "Clauses"], rows, "llr")
    return "\n\n".join([head, "\n".join(changes) or "Every contract has its first recorded version."])


def contract(module: str) -> str:
    """mkdocstrings of every interface of a module of diptych.shared.interfaces."""
    text = inspect.getdoc(importlib.import_module(f"diptych.shared.interfaces.{module}")) or ""
    rest = text.partition("\n\n")[2]
    blocks = [f"`shared/interfaces/{module}.py`", rest]
    for cls in _interfaces(f"diptych.shared.interfaces.{module}"):
        methods = ", ".join(each.__name__ for each in methods_of(cls) if each.__name__[0] != "_")
        options = f"\n    options:\n      members: [{methods}]" if methods else ""
        blocks.append(f"::: {cls.__module__}.{cls.__name__}{options}")
        attributes = [each for each in fields_of(cls) if each.default != "computed"]
        if attributes:
            blocks += [f"*Attributes of `{cls.__name__}`:*", field_table(attributes)]
    return "\n\n".join(filter(None, blocks))


def types(module: str) -> str:
    """A card for every type of the module that its interfaces take or return, and links to the other ones."""
    name = f"diptych.shared.interfaces.{module}"
    own = [cls for cls in _defined_in(name) if not inspect.isabstract(cls) and cls not in _interfaces(name)]
    reached = types_reached(_interfaces(name))
    own += [cls for cls in reached if cls.__module__ == name and cls not in own and not _has_page(cls)]
    links = [_link(cls) for cls in reached if cls not in own and cls.__module__ != name]
    on_other_pages = [f"On other pages: {', '.join(links)}."] if links else []
    return "\n\n".join([*map(_card, own), *on_other_pages])


def shared_types() -> str:
    """A card for every type that components exchange and that is in no module of an interface."""
    found: list[type] = []
    for path in sorted((ROOT / "shared" / "interfaces").glob("[a-z]*.py")):
        name = f"diptych.shared.interfaces.{path.stem}"
        found += [cls for cls in types_reached(_interfaces(name)) if cls.__module__ != name]
    found = [cls for cls in dict.fromkeys(found) if not _has_page(cls) and not _is_of_an_interface(cls)]
    return "\n\n".join(_card(cls, "##") for cls in sorted(found, key=lambda cls: cls.__name__))


def _card(cls: type, level: str = "###") -> str:
    """Its heading has the name to which signatures link."""
    name = f"{cls.__module__}.{cls.__name__}"
    path = "" if _is_of_an_interface(cls) else f"`{path_of(cls)}`\n\n"
    return f"{level} {cls.__name__} {{#{name}}}\n\n{path}{card(name)}"


def clauses(name: str) -> str:
    """The clauses by module of the contract, with the number of planted bugs that each catches."""
    found = suite.clauses_of(name)
    caught = _caught(name)
    num_cases = sum(len(clause.cases) for clause in found)
    blocks = [
        f"{len(found)} clauses with {num_cases} cases; {sum(caught.values())} planted bugs "
        f"(`tests/conformance/mutants/`). *Bugs* counts those for which the clause is recorded as the one "
        f"that catches them, in `tests/conformance/killers.json`."
    ]
    by_module: dict[str, list[list[object]]] = {}
    for clause in found:
        row = [f"`{clause.name}`", cell(clause.statement), clause.kind, len(clause.cases)]
        by_module.setdefault(clause.check.__module__, []).append([*row, caught[clause.name] or ""])
    for module, rows in by_module.items():
        path = module.removeprefix("diptych.").replace(".", "/") + ".py"
        about = (inspect.getdoc(importlib.import_module(module)) or "").partition("\n\n")[0]
        rules = table(["Clause", "What must hold", "Kind", "Cases", "Bugs"], rows, "lllrr")
        topic = cell(about).rstrip(".").replace('"', "'")
        topic = topic.partition(": ")[2] or topic.removeprefix("Clauses of ")
        count = "1 clause" if len(rows) == 1 else f"{len(rows)} clauses"
        body = indented(f"`{path}`\n\n{rules}")
        blocks.append(f'??? abstract "{topic[0].upper()}{topic[1:]} ({count})"\n{body}')
    return "\n\n".join(blocks)


def implementations(name: str) -> str:
    """The choices of the registry, each with its file and what its docstring says."""
    items = []
    for choice, target in registry.IMPLEMENTATIONS[name].items():
        module, _, attribute = target.partition(":")
        stem = ROOT / module.removeprefix("diptych.").replace(".", "/")
        path = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
        where = f"`{path.relative_to(ROOT).as_posix()}`"
        needs = ""
        if registry.needs_cuda(name, choice):
            needs = " Needs a CUDA GPU."
        elif choice in registry.NEEDS_TRITON.get(name, ()):
            needs = " Needs a CUDA GPU, or Triton's interpreter."
        owner = f"`{attribute}` in {where}" if attribute else where
        items.append(f"**`{choice}`**: {owner}.{needs}\n\n{indented(_about(path))}")
    return "\n\n".join(f"- {item}" for item in items)


def check(name: str) -> str:
    """Commands, for a class or a module."""
    is_module = name in _MODULES and name != "drafter"
    target = "my_file.py" if is_module else "my_file.py:MyClass"
    if name in _FINDERS:
        form = f"a module with the function `{_FINDERS[name]}`"
        form += ", or a class" if name == "drafter" else ""
    elif is_module:
        names = ", ".join(f"`{cls.__name__}`" for cls in _MODULES[name])
        form = f"a module that has {names}"
    else:
        form = f"a subclass of `{_CLASSES[name].__name__}`"
    return (
        f"An implementation is {form}.\n\n```bash\n"
        f"diptych check {name} --list                # the clauses, without running them\n"
        f"diptych check {name} reference\n"
        f"diptych check {name} {target}\n"
        f'diptych generate --use {name}={target} "What is 12 + 30?"\n'
        f"diptych diff --b {name}={target}\n```\n\n"
        "[Reading a failure](../own-component.md#reading-a-failure) explains their output."
    )


@cache
def _caught(name: str) -> Counter[str]:
    """Clause -> planted bugs of the component that it is recorded to catch."""
    clauses = json.loads(KILLERS.read_text(encoding="utf-8")).get(name, {})
    return Counter({clause: len(bugs) for clause, bugs in clauses.items()})


def _about(path: Path) -> str:
    """The first paragraph of a module's docstring, and the one that begins "Differs from reference"."""
    paragraphs = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")
    return "\n\n".join(part for i, part in enumerate(paragraphs) if i == 0 or part.startswith("Differs"))


def _defined_in(module: str) -> list[type]:
    found = vars(importlib.import_module(module)).values()
    return [cls for cls in found if inspect.isclass(cls) and cls.__module__ == module]


def _interfaces(module: str) -> list[type]:
    """Abstract classes of a module, first those that a component implements. A Protocol is a type, not an
    interface."""
    implemented = {*_CLASSES.values(), *chain.from_iterable(_MODULES.values())}
    found = [cls for cls in _defined_in(module) if inspect.isabstract(cls)]
    return sorted(found, key=lambda cls: cls not in implemented)


def _is_of_an_interface(cls: type) -> bool:
    return cls.__module__.startswith("diptych.shared.interfaces.")


def _has_page(cls: type) -> bool:
    return inspect.isabstract(cls) or cls.__name__ in ELSEWHERE


def _link(cls: type) -> str:
    if cls.__name__ in ELSEWHERE:
        return f"[`{cls.__name__}`]({ELSEWHERE[cls.__name__]})"
    module = cls.__module__.rpartition(".")[2]
    page = PAGES.get(module, module) if _is_of_an_interface(cls) else "types"
    return f"[`{cls.__name__}`]({page}.md#{cls.__module__}.{cls.__name__})"
