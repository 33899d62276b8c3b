"""Files, modules and symbols that pages name in backticks exist."""

import importlib
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
FOLDERS = ("shared", "reference", "optimized", "docs", "tests", "notebooks")

_FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})(?:/[\w.*-]+)*/?|[\w.-]+\.(?:toml|yml|md)|Makefile|\.ci/run")
_DOTTED = re.compile(r"(?:diptych\.)?(?:shared|reference|optimized)(?:\.\w+)+(?:\(\))?")
_CONTRACT = re.compile(r"([A-Z]\w+)\.(\w+)(?:\(.*\))?")


def names_in(page: Path) -> list[str]:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [match.group(1).strip() for match in _CODE.finditer(text)]


def resolve(dotted: str) -> object:
    """The object named "package.module.Class.method"; raises AttributeError or ImportError."""
    parts = dotted.removesuffix("()").split(".")
    for cut in range(len(parts), 0, -1):
        name = ".".join(parts[:cut])
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            continue
        if found is None:
            continue
        target: object = importlib.import_module(name)
        for part in parts[cut:]:
            fields = getattr(target, "__dataclass_fields__", {})
            target = fields[part] if part in fields else getattr(target, part)
        return target
    raise ImportError(dotted)


def vocabulary() -> dict[str, type]:
    """Classes that pages name without their module: interfaces, types, the engine."""
    found: dict[str, type] = {}
    for name in ("interfaces", "types", "types.attention", "config", "engine.llm"):
        module = importlib.import_module(f"diptych.shared.{name}")
        found |= {key: value for key, value in vars(module).items() if isinstance(value, type)}
    return found


def exists(name: str, known: dict[str, type]) -> bool:
    """Whether a path, a dotted name, or a member of a known class is there. Other names are."""
    if _PATH.fullmatch(name):
        return any(ROOT.glob(name.rstrip("/")))
    if _DOTTED.fullmatch(name):
        try:
            resolve(name)
        except (ImportError, AttributeError):
            return False
    match = _CONTRACT.fullmatch(name)
    if match is None or match[1] not in known:
        return True
    owner = known[match[1]]
    fields = [vars(cls).get("__annotations__", {}) for cls in owner.__mro__]
    return hasattr(owner, match[2]) or any(match[2] in names for names in fields)


def test_names_exist() -> None:
    known = vocabulary()
    named = {name: page.relative_to(ROOT).as_posix() for page in PAGES for name in names_in(page)}
    assert len(named) > 1000
    assert {name: page for name, page in named.items() if not exists(name, known)} == {}


def test_map_names_every_file_of_the_panels_and_every_entry_of_shared() -> None:
    named = {name.rstrip("/") for name in names_in(ROOT / "docs" / "map.md")}
    entries = [
        path
        for folder in ("shared", "reference", "optimized")
        for path in (ROOT / folder).iterdir()
        if path.name not in ("__init__.py", "__pycache__") and (path.is_dir() or path.suffix == ".py")
    ]
    assert entries
    assert [path for path in entries if path.relative_to(ROOT).as_posix() not in named] == []
