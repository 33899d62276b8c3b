"""Results of a check for CI: JUnit XML, SARIF, which code scanners show, and the JSON of a badge."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement, tostring

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
GREEN, RED, GREY = "brightgreen", "red", "lightgrey"
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Checked:
    """One check. `problems`: what was found, each in one text, a summary in its first line; empty: it holds.
    `path`, `line`: what a code scanner shows. `skipped`: why it does not apply. `not_run`: why there is no
    verdict, which is an error."""

    name: str
    sentence: str
    problems: Sequence[str] = ()
    path: str = ""
    group: str = ""
    skipped: str = ""
    not_run: str = ""
    line: int = 1


@dataclass(frozen=True)
class CiReport:
    """`command`: what ran. `facts`: with which settings, such as the seed."""

    command: str
    facts: Mapping[str, str]
    checks: Sequence[Checked]

    def junit(self) -> str:
        """One test case for each check, its group as the class name."""
        counts = {
            "tests": len(self.checks),
            "failures": sum(bool(each.problems) for each in self.checks),
            "errors": sum(bool(each.not_run) for each in self.checks),
            "skipped": sum(bool(each.skipped) for each in self.checks),
        }
        suite = Element("testsuite", {"name": _xml(self.command)} | {k: str(n) for k, n in counts.items()})
        properties = SubElement(suite, "properties")
        for name, value in self.facts.items():
            SubElement(properties, "property", name=name, value=_xml(value))
        for each in self.checks:
            case = SubElement(suite, "testcase", classname=_xml(each.group), name=_xml(each.name))
            if each.skipped:
                SubElement(case, "skipped", message=_xml(each.skipped))
            if each.not_run:
                SubElement(case, "error", message=_xml(each.not_run))
            for problem in each.problems:
                failure = SubElement(case, "failure", message=_xml(problem.partition("\n")[0]))
                failure.text = _xml(f"{problem}\nmust hold: {each.sentence}")
        return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(suite, encoding="unicode") + "\n"

    def sarif(self) -> dict[str, Any]:
        """SARIF 2.1.0 with a rule for each check that applies and a result for each problem."""
        checks = [each for each in self.checks if not each.skipped]
        rules = [{"id": each.name, "shortDescription": {"text": each.sentence}} for each in checks]
        results = [
            {
                "ruleId": each.name,
                "ruleIndex": index,
                "level": "error",
                "message": {"text": f"{problem}\nmust hold: {each.sentence}"},
                "locations": [
                    {
                        "physicalLocation": {
                            "artifactLocation": {"uri": _in_folder(each.path)},
                            "region": {"startLine": each.line},
                        }
                    }
                ],
            }
            for index, each in enumerate(checks)
            for problem in (*each.problems, *filter(None, [each.not_run]))
        ]
        driver = {"name": self.command, "version": diptych_version(), "rules": rules}
        run = {"tool": {"driver": driver}, "results": results, "properties": dict(self.facts)}
        return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}

    def badge(self) -> dict[str, Any]:
        """JSON for an endpoint badge of shields.io. The label has the version, on which the checks depend."""
        checks = [each for each in self.checks if not each.skipped]
        num_failing = sum(bool(each.problems) for each in checks)
        num_missing = sum(bool(each.not_run) for each in checks)
        holding = "1 check holds" if len(checks) == 1 else f"{len(checks)} checks hold"
        message = holding if checks else "nothing checked"
        if num_failing or num_missing:
            parts = [f"{num_failing} of {len(checks)} fail"] * bool(num_failing)
            message = ", ".join(parts + [f"{num_missing} did not run"] * bool(num_missing))
        return {
            "schemaVersion": 1,
            "label": f"diptych {diptych_version()}",
            "message": message,
            "color": RED if num_failing or num_missing else GREEN if checks else GREY,
        }

    def write(self, junit: Path | None, sarif: Path | None, badge: Path | None) -> None:
        """Write the files that are named."""
        if junit is not None:
            junit.write_text(self.junit(), encoding="utf-8")
        if sarif is not None:
            sarif.write_text(json.dumps(self.sarif(), indent=1) + "\n", encoding="utf-8")
        if badge is not None:
            badge.write_text(json.dumps(self.badge()) + "\n", encoding="utf-8")


def _in_folder(path: str) -> str:
    """The path in the current folder: a code scanner knows files by their paths in a repository."""
    full, here = Path(path), Path.cwd()
    return full.relative_to(here).as_posix() if full.is_relative_to(here) else path


def diptych_version() -> str:
    try:
        return version("diptych")
    except PackageNotFoundError:
        return "0"


def _xml(text: str) -> str:
    """The text without characters that XML cannot hold; answers of a server may contain any."""
    return _NOT_XML.sub("\ufffd", text)
