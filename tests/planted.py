"""Planted bugs of every kind: what is wrong, where it is planted, and which check must find it.

    python -m tests.planted --list [--kind KIND]

A kind is a `Bugs`, which makes its test: `Bugs.found_by`. There are three ways to plant a bug. Words of a
source become others (`Words`), and `Bug.planted` is the changed copy. A value takes the place of the
attribute that `Bug.where` names (`Bug.plant_in`). Or the check takes what is planted: a component, a
function, a change of an answer.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.changed_modules import Change, changed

ROOT = Path(__file__).parents[1]
KINDS: dict[str, Bugs] = {}
Check = Callable[..., Mapping[str, str] | bool | None]


class Words(NamedTuple):
    """Changed words in what `entry` (module, or module:class) is made of."""

    entry: str
    changes: tuple[Change, ...]

    def load(self) -> Any:
        module, _, attribute = self.entry.partition(":")
        copy = changed(module, *self.changes)
        return getattr(copy, attribute) if attribute else copy


@dataclass(frozen=True, eq=False)
class Bug:
    """`finder`: the check that must find it; `says`: words or a pattern of what it says. `plant` None: no
    bug, and nothing may be found."""

    kind: str
    name: str
    what: str
    plant: Any
    where: str = ""
    finder: str = ""
    says: str | re.Pattern[str] = ""

    @cached_property
    def planted(self) -> Any:
        return self.plant.load() if isinstance(self.plant, Words) else self.plant

    def plant_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if self.plant is not None:
            monkeypatch.setattr(self.where, self.planted)

    def expect(self, found: Mapping[str, str]) -> None:
        """`found`: the checks that fail, with what they say."""
        if self.plant is None:
            assert not found, "what is right is accused"
            return
        assert self.finder in found, f"{self.name}: not found by {self.finder!r}, but by {found}"
        said = found[self.finder]
        is_said = self.says.search(said) if isinstance(self.says, re.Pattern) else self.says in said
        assert is_said, f"{self.name}: {self.says!r} is not in {said!r}"


class Bugs(dict[str, Bug]):
    """The bugs of a kind, by name. `where` and `finder`: those of bugs that do not say their own."""

    def __init__(self, kind: str, where: str = "", finder: str = "") -> None:
        super().__init__()
        self.kind, self.where, self.finder = kind, where, finder
        self.tests: list[str] = []
        self.file = sys._getframe(1).f_code.co_filename
        assert KINDS.get(kind, self).file == self.file, f"two kinds are called {kind}"
        KINDS[kind] = self

    def add(
        self, name: str, plant: Any, what: str = "", *, where: Any = "", finder: str = "", says: Any = ""
    ) -> Bug:
        """`what`: else the docstring of what is planted, or what the check says, or the name. `where` may be
        the function itself."""
        where = f"{where.__module__}.{where.__qualname__}" if callable(where) else where
        assert name not in self, f"two bugs of {self.kind} are called {name}"
        doc = (plant.__doc__ if callable(plant) else "") or ""
        what = what or " ".join(doc.partition("\n\n")[0].split()) or getattr(says, "pattern", says) or name
        bug = Bug(
            self.kind, name, what, plant, where or self.where, finder or self.finder or "its test", says
        )
        self[name] = bug
        return bug

    def add_all(self, *plants: Any, **more: Any) -> None:
        """Classes or functions, which are named and described themselves."""
        for plant in plants:
            self.add(plant.__name__.strip("_"), plant, **more)

    def words(self, name: str, entry: str, *changes: tuple[str, str, str], **more: Any) -> Bug:
        """A bug of changed words: (module, before, after)."""
        return self.add(name, Words(entry, tuple(Change(*each) for each in changes)), **more)

    def found_by(
        self,
        *errors: type[BaseException],
        is_fast: Callable[[int, Bug], bool] = lambda number, bug: True,
        honest: bool = False,
        without: Collection[str] = (),
    ) -> Callable[[Check], Callable[..., None]]:
        """Makes the test of the kind from a check, which takes `bug` and fixtures. It returns whether
        something is wrong, or what fails: names of checks, with what they say. If it raises one of
        `errors`, it is itself the finder. `honest`: a case without a bug, too. Bugs that are not `is_fast`
        are left to the whole grids; `without`: names of bugs that this check need not find."""
        rows = [
            pytest.param(bug, id=bug.name, marks=[] if is_fast(i, bug) else [pytest.mark.full])
            for i, bug in enumerate(self.values())
            if bug.name not in without
        ]
        if honest:
            rows.insert(0, pytest.param(Bug(self.kind, "none", "Nothing is planted.", None), id="none"))

        def test_of(check: Check) -> Callable[..., None]:
            @pytest.mark.parametrize("bug", rows)
            @wraps(check)
            def test(*, bug: Bug, **fixtures: Any) -> None:
                _ = bug.planted  # that words are not in a source is no find
                try:
                    found = check(bug=bug, **fixtures) or {}
                    found = {bug.finder: ""} if found is True else found
                except errors as error:
                    if bug.plant is None:
                        raise
                    found = {bug.finder: str(error)}
                bug.expect(found)

            self.tests.append(f"{check.__module__}.{check.__name__}")
            return test

        return test_of


def load() -> list[str]:
    """Imports what registers bugs. Returns the modules that need a package which is not installed."""
    known, missing = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}, []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if str(path) not in known and re.search(r"^from tests\..*\bplanted\b", path.read_text("utf-8"), re.M):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            try:
                sys.path.append(str(path.parent))  # as pytest does
                importlib.import_module(name)
            except (ImportError, pytest.skip.Exception) as error:
                missing.append(f"{name}: {error}")
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", action="store_true", required=True, help="each bug, and what finds it")
    parser.add_argument("--kind", help="of this kind alone")
    options = parser.parse_args()
    missing = load()
    if options.kind not in (None, *KINDS):
        parser.error(f"no kind {options.kind!r}; the kinds are {', '.join(sorted(KINDS))}")
    chosen = [KINDS[options.kind]] if options.kind else [KINDS[kind] for kind in sorted(KINDS)]
    for bugs in chosen:
        for bug in bugs.values():
            print(f"{bug.kind} | {bug.name} | {bug.where} | {bug.what} | {bug.finder}")
    for each in missing:
        print(f"left out: {each}", file=sys.stderr)
    print(f"{sum(map(len, chosen))} bugs of {len(chosen)} kinds", file=sys.stderr)


if __name__ == "__main__":
    sys.modules["tests.planted"] = sys.modules["__main__"]
    main()
