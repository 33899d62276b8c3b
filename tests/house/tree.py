"""The files of the project, as git lists them."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NOT_OURS = {".git", ".venv", "build", "dist", "site"}


def _through_link(name: Path) -> bool:
    """diptych/ links to the three folders: their files count once."""
    return name.parts[0] == "diptych" and len(name.parts) > 2


@cache
def project_files() -> list[Path]:
    """Files tracked, or new and not ignored, relative to the root. An unpacked archive without git: all."""
    if (ROOT / ".git").exists():
        listing = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        names = [Path(name) for name in listing.split("\0") if name]
    else:
        names = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
        names = [
            name
            for name in names
            if name.parts[0] not in _NOT_OURS
            and not any(part == "__pycache__" or part.endswith(".egg-info") for part in name.parts)
        ]
    return sorted(name for name in names if (ROOT / name).is_file() and not _through_link(name))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """The syntax tree of a source, whose module comes first."""
    return list(ast.walk(ast.parse((ROOT / path).read_text("utf-8"))))


def python_files(*folders: str) -> list[Path]:
    return [name for name in project_files() if name.suffix == ".py" and name.parts[0] in folders]
