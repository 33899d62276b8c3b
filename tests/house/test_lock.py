"""docs/deploy/server-lock.txt: every package of the server, in versions that are tested, with hashes."""

from __future__ import annotations

import re
import sys

import pytest
from packaging.requirements import Requirement
from tree import ROOT

LOCK = ROOT / "docs" / "deploy" / "server-lock.txt"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="reads pyproject.toml with tomllib, of Python 3.11")
def test_the_lock_has_the_servers_packages_with_hashes() -> None:
    import tomllib

    text = re.sub(r"^#.*\n", "", LOCK.read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", "")
    locked = {}
    for line in text.splitlines():
        requirement, *hashes = line.split()
        name, version = requirement.split("==")
        assert hashes, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), name
        locked[name] = version
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for wanted in map(Requirement, extras["server"] + extras["grammar"]):
        assert wanted.name == "diptych" or wanted.specifier.contains(locked[wanted.name]), wanted


def test_actions_of_others_are_pinned_by_commit() -> None:
    used = [
        line.split("uses:")[1].split("#")[0].strip()
        for path in (ROOT / ".github").rglob("*.yml")
        for line in path.read_text("utf-8").splitlines()
        if "uses:" in line
    ]
    assert len(used) > 3
    assert [name for name in used if not re.fullmatch(r"\./.*|[\w/.-]+@[0-9a-f]{40}", name)] == []
