"""What is installed: one import name, without tests and training, that works in a project with folders of the
same names as ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from tree import ROOT, project_files, python_files

FOLDERS = ("reference", "optimized", "shared")
EXAMPLE = ROOT / "docs" / "examples" / "my_radix_cache.py"
NOT_INSTALLED = "shared/tools/training/"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_imported_by_one_name(name: str) -> None:
    """A module under two names would exist twice."""
    command = [sys.executable, "-c", f"import {name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ImportError: this package is diptych.{name}" in done.stderr


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, output: Path) -> Path:
    """The wheel of a tree, without the network."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", output]
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=output.parent)
    (wheel,) = output.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheel of the tree, and that of its source distribution, whose links are folders."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheels")
    tree = folder / "tree"
    for name in project_files():
        if name.parts[0] in ("README.md", "LICENSE", "pyproject.toml", "diptych", *FOLDERS):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name)
    for name in FOLDERS:
        (tree / "diptych" / name).symlink_to(Path("..") / name)
    program = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", program, folder, cwd=tree)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return [build(tree, folder / "a"), build(folder / archive.name.removesuffix(".tar.gz"), folder / "b")]


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


@pytest.mark.full
def test_a_wheel_has_one_import_name_and_the_whole_engine(wheels: list[Path]) -> None:
    of_tree, of_archive = map(names_in, wheels)
    assert of_tree == of_archive
    assert {name.partition("/")[0] for name in of_tree} == {"diptych"}
    modules = {
        f"diptych/{path}" for path in python_files(*FOLDERS) if not str(path).startswith(NOT_INSTALLED)
    }
    own = {"diptych/__init__.py", "diptych/__main__.py"}
    assert {name for name in of_tree if name.endswith(".py")} == modules | own
    assets = {f"diptych/{path}" for path in project_files() if str(path).startswith("shared/assets/")}
    assert of_tree >= {"diptych/py.typed", *assets}


@pytest.mark.full
def test_it_works_in_a_project_with_folders_of_the_same_names(wheels: list[Path], tmp_path: Path) -> None:
    environment, project = tmp_path / "environment", tmp_path / "project"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, wheels[0], cwd=tmp_path)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])  # without our editable install
    for name in FOLDERS:
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text("MINE = True")
    shutil.copyfile(EXAMPLE, project / "my_cache.py")
    assert run(python, "-m", "diptych", "--version", cwd=project).startswith("diptych ")
    found = run(python, "-c", "import diptych, shared; print(diptych.__file__, shared.MINE)", cwd=project)
    assert found.split() == [str(site / "diptych" / "__init__.py"), "True"]
    greedy = ["--panel", "reference", "--temperature", "0", "--no-stream"]
    assert "42" in run(environment / "bin" / "diptych", "generate", *greedy, "What is 12 + 30?", cwd=project)
    options = ["-p", "no:cacheprovider", "-k", "split", "--diptych", "my_cache.py:MyRadixCache"]
    assert " passed" in run(python, "-m", "pytest", *options, "--component", "radix_cache", cwd=project)
