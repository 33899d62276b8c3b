"""The layout of the repository: top-level entries and file sizes."""

import sys
from fnmatch import fnmatch

import pytest
from tree import ROOT, project_files

TOP_LEVEL = {
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "diptych", "docs",
    "mkdocs.yml", "notebooks", "optimized", "pyproject.toml", "reference", "shared", "tests",
}  # fmt: skip
MAX_LINES, LONG = 400, 250
MIB = 2**20


def test_top_level_entries() -> None:
    entries = {name.parts[0] for name in project_files()}
    assert {entry for entry in entries if not entry.startswith(".")} == TOP_LEVEL


def test_length_of_text_files() -> None:
    suffixes = {".py", ".md", ".toml", ".yml", ".yaml", ".sh"}
    lengths = {
        str(name): sum("# --8<--" not in line for line in (ROOT / name).read_text("utf-8").splitlines())
        for name in project_files()
        if name.suffix in suffixes
    }  # markers of quoted sections do not count
    assert lengths
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}
    code = [length for name, length in lengths.items() if name.endswith(".py")]
    assert sum(length > LONG for length in code) <= len(code) / 8


def test_size_of_files() -> None:
    sizes = {str(name): (ROOT / name).lstat().st_size for name in project_files()}  # of a link: its own
    assert {name: size for name, size in sizes.items() if size >= 8 * MIB} == {}
    assert sum(sizes.values()) < 30 * MIB


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads pyproject.toml with tomllib, of Python 3.11")
def test_package_data_is_in_the_wheel() -> None:
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    missing = [
        str(name)
        for name in project_files()
        if name.parts[0] in ("shared", "reference", "optimized")
        and name.suffix != ".py"
        and not any(
            fnmatch(f"diptych/{name}", f"{package.replace('.', '/')}/{pattern}")
            for package, patterns in settings["package-data"].items()
            for pattern in patterns
        )
    ]
    assert missing == []
