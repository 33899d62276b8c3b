"""What is installed: one import name, without tests and training, that works in a project with folders of the
same names as ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.adoption.conftest import FOLDERS, run
from tests.house.tree import ROOT, project_files, python_files

EXAMPLE = ROOT / "docs" / "examples" / "my_radix_cache.py"
NOT_INSTALLED = "shared/tools/training/"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_imported_by_one_name(name: str) -> None:
    """A module under two names would exist twice."""
    command = [sys.executable, "-c", f"import {name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ImportError: this package is diptych.{name}" in done.stderr


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
def test_it_works_in_a_project_with_folders_of_the_same_names(environment: Path, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    for name in FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True")
    shutil.copyfile(EXAMPLE, tmp_path / "my_cache.py")
    assert run(python, "-m", "diptych", "--version", cwd=tmp_path).stdout.startswith("diptych ")
    program = "import diptych, shared; print(diptych.__file__, shared.MINE)"
    found = run(python, "-c", program, cwd=tmp_path).stdout
    (site,) = environment.glob("lib/python*/site-packages")
    assert found.split() == [str(site / "diptych" / "__init__.py"), "True"]
    greedy = ["--panel", "reference", "--temperature", "0", "--no-stream", "What is 12 + 30?"]
    assert "42" in run(environment / "bin" / "diptych", "generate", *greedy, cwd=tmp_path).stdout
    options = ["-p", "no:cacheprovider", "-k", "split", "--diptych", "my_cache.py:MyRadixCache"]
    command = [python, "-m", "pytest", *options, "--component", "radix_cache"]
    assert " passed" in run(*command, cwd=tmp_path).stdout
