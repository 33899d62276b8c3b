"""Dependencies point one way (reference -> shared <- optimized), and heavy packages are imported late."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from tree import ROOT, nodes, python_files

FORBIDDEN = {
    # `shared` imports components by name (importlib), so no import statement names a panel.
    "shared": {"diptych.reference", "diptych.optimized"},
    "reference": {"diptych.optimized", "triton", "flashinfer", "tests"},
    "optimized": {"diptych.reference", "tests"},
}


def imported_packages(path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides where a name comes from"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_package_imports_only_what_it_may(package: str) -> None:
    files = python_files(package)
    assert files
    wrong = [
        f"{path}:{line}: imports {name}"
        for path in files
        for line, name in imported_packages(path)
        if f"{name}.".startswith(tuple(f"{forbidden}." for forbidden in FORBIDDEN[package]))
    ]
    assert wrong == []


# Modules of shared/ that are no part of the engine: they measure it, test it, train its models, or start it.
AROUND_THE_ENGINE = ("diptych.shared.tools",)


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(("diptych", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def import_graph(sources: Mapping[str, list[ast.AST]]) -> dict[str, set[str]]:
    """Module -> modules among `sources` that it imports, in functions and for types alone too. `from package
    import module` imports the module. `from package import name` counts as an import of the package."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        imported = graph[module] = set()
        for node in source:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in sources else str(node.module) for name in full]
            else:
                continue
            imported |= {name for name in names if name in sources and name != module}
    return graph


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import one another, directly or through others."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, stack = set(), list(graph[start])
        while stack:
            if (module := stack.pop()) not in seen:
                seen.add(module)
                stack += graph[module]
        reached[start] = seen
    in_cycle = sorted(module for module in graph if module in reached[module])
    groups = {frozenset(b for b in in_cycle if b in reached[a] and a in reached[b]) for a in in_cycle}
    return sorted(sorted(group) for group in groups)


@cache
def project_graph() -> dict[str, set[str]]:
    files = python_files("shared", "reference", "optimized")
    return import_graph({module_name(path): nodes(path) for path in files})


def test_modules_import_one_another_without_a_cycle() -> None:
    assert cycles(project_graph()) == []


@pytest.mark.parametrize("parent", ["diptych.shared", "diptych.shared.server"])
def test_folders_import_one_another_without_a_cycle(parent: str) -> None:
    """Such as diptych.shared.types and diptych.shared.config. Modules beside the folders count as folders."""
    depth = parent.count(".") + 2
    folders: dict[str, set[str]] = {}
    for module, imported in project_graph().items():
        if module.startswith(f"{parent}."):
            folder = ".".join(module.split(".")[:depth])
            targets = {".".join(name.split(".")[:depth]) for name in imported}
            folders[folder] = folders.get(folder, set()) | (targets - {folder})
    assert cycles({folder: targets & set(folders) for folder, targets in folders.items()}) == []


def test_engine_imports_nothing_that_is_around_it() -> None:
    """Imports in functions count too."""
    wrong = []
    for path in python_files("shared", "reference", "optimized"):
        if f"{module_name(path)}.".startswith(tuple(f"{name}." for name in AROUND_THE_ENGINE)):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            outside = tuple(f"{name}." for name in (*AROUND_THE_ENGINE, "tests"))
            wrong += [f"{path}:{node.lineno}: {name}" for name in names if f"{name}.".startswith(outside)]
    assert wrong == []


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({"a": "import b", "b": "import c", "c": ""}, []),
        ({"a": "import b", "b": "from a import x"}, [["a", "b"]]),
        ({"a": "if TYPE_CHECKING:\n    import b", "b": "import c", "c": "import a"}, [["a", "b", "c"]]),
        ({"p": "", "p.a": "from p import b", "p.b": "from p import a"}, [["p.a", "p.b"]]),
        ({"a": "import b", "b": "def f():\n    import a"}, [["a", "b"]]),
    ],
    ids=["chain", "two modules", "for types alone", "modules of a package", "in a function"],
)
def test_cycles_are_found(sources: dict[str, str], found: list[list[str]]) -> None:
    assert cycles(import_graph({a: list(ast.walk(ast.parse(b))) for a, b in sources.items()})) == found


def test_only_the_registry_names_modules_of_a_panel() -> None:
    """As text: an import statement names none in shared/ anyway."""
    wrong = [
        f"{path}:{node.lineno}: {node.value}"
        for path in python_files("shared")
        if path.as_posix() != "shared/registry.py"
        for node in nodes(path)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(("diptych.reference.", "diptych.optimized."))
    ]
    assert wrong == []


def run_python(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_reference_and_engine_run_where_triton_and_flashinfer_are_missing() -> None:
    modules = [module_name(path) for path in python_files("reference")] + ["diptych.shared.engine.llm"]
    program = f"""
import importlib, sys
for blocked in ("triton", "flashinfer"):
    sys.modules[blocked] = None  # from now on, importing it is an ImportError
for name in {modules!r}:
    importlib.import_module(name)
print("done")
"""
    assert run_python(program) == "done"


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (
            ["diptych", "diptych.reference", "diptych.optimized", "diptych.shared.tools.cli"],
            ["torch", "numpy", "transformers"],
        ),
        (
            ["torch", "diptych.shared.types", "diptych.shared.interfaces", "diptych.shared.engine.llm"],
            ["transformers", "triton", "flashinfer", "matplotlib"],
        ),
    ],
    ids=["packages", "engine"],
)
def test_import_stays_light(modules: list[str], heavy: list[str]) -> None:
    """Nor does it start CUDA."""
    # `import torch` imports triton where it is installed; only further imports count.
    program = f"""
import importlib, sys
importlib.import_module({modules[0]!r})
before = set() if {modules[0]!r} != "torch" else set(sys.modules)
for name in {modules!r}:
    importlib.import_module(name)
print(*sorted(set({heavy!r}) & (set(sys.modules) - before)))
assert "torch" not in sys.modules or not sys.modules["torch"].cuda.is_initialized()
"""
    assert run_python(program) == ""


def test_an_answer_needs_no_option() -> None:
    """`make run` installs none: the packages of the extras cannot be imported."""
    options = [
        "msgspec",
        "zmq",
        "fastapi",
        "uvicorn",
        "httpx",
        "prometheus_client",
        "xgrammar",
        "opentelemetry",
    ]
    program = f"""
import sys
for name in {options!r}:
    sys.modules[name] = None
from diptych import LLM
llm = LLM("tiny-dense", panel="reference", device="cpu", max_total_tokens=256)
print(llm.chat([{{"role": "user", "content": "What is 12 + 30?"}}], temperature=0, max_tokens=16).text)
"""
    assert "42" in run_python(program)


def test_property_tests_share_one_profile() -> None:
    """Hypothesis's own deadline and its check of speed fail on a busy computer."""
    users = [
        path.as_posix()
        for path in python_files("tests")
        if "\nfrom hypothesis import" in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert users == ["tests/properties.py"]
