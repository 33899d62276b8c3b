"""Dependencies point one way (reference -> shared <- optimized), and heavy packages are imported late."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tree import ROOT, python_files

FORBIDDEN = {
    # `shared` imports components by name (importlib), so no import statement names a panel.
    "shared": {"reference", "optimized"},
    "reference": {"optimized", "triton", "flashinfer", "tests"},
    "optimized": {"reference", "tests"},
}


def imported_packages(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides where a name comes from"
            yield node.lineno, (node.module or "").partition(".")[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_package_imports_only_what_it_may(package: str) -> None:
    files = python_files(package)
    assert files
    wrong = [
        f"{path}:{line}: imports {name}"
        for path in files
        for line, name in imported_packages(path)
        if name in FORBIDDEN[package]
    ]
    assert wrong == []


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run_python(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_reference_and_engine_run_where_triton_and_flashinfer_are_missing() -> None:
    modules = [module_name(path) for path in python_files("reference")] + ["shared.engine.llm"]
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
        (["reference", "optimized", "shared", "shared.cli"], ["torch", "numpy", "transformers"]),
        (["shared.types", "shared.interfaces"], ["transformers", "triton", "flashinfer"]),
        (["shared.engine.llm"], ["transformers", "triton", "flashinfer", "matplotlib"]),
    ],
    ids=["packages", "contracts", "engine"],
)
def test_import_stays_light(modules: list[str], heavy: list[str]) -> None:
    # `import torch` imports triton where it is installed; only further imports count.
    program = f"""
import importlib, sys
if "torch" not in {heavy!r}:
    import torch
before = set(sys.modules)
for name in {modules!r}:
    importlib.import_module(name)
print(*sorted(set({heavy!r}) & (set(sys.modules) - before)))
"""
    assert run_python(program) == ""


def test_importing_the_engine_does_not_start_cuda() -> None:
    assert run_python("import torch, shared.engine.llm; print(torch.cuda.is_initialized())") == "False"
