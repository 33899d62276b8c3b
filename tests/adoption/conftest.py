"""The wheel of the tree, and an environment in which it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from tests.house.tree import ROOT, project_files

FOLDERS = ("reference", "optimized", "shared")


def run(
    *command: str | Path, cwd: Path, status: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The command without the tree, and its output. Any other exit status than `status` is an error."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "PYTEST"))
    }
    done = subprocess.run(command, cwd=cwd, env=kept | variables, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def build(source: Path, output: Path) -> Path:
    """The wheel of a tree, without the network."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", output]
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=output.parent)
    (wheel,) = output.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def environment(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; what it needs comes from ours, without our editable install."""
    folder = tmp_path_factory.mktemp("installed") / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheels[0], cwd=folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder
