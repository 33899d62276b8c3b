"""Writes the results of a run as JUnit XML, which CI systems read."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, SubElement, tostring

from diptych.shared.tools.conformance.server.verdict import Report, failure_rows

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(report: Report) -> str:
    """One test case for each check, its group as the class name. Not offered: skipped. A near tie passes."""
    skipped = [result for result in report.results if result.status == "not offered"]
    missing = report.num_chosen - len(report.results)
    suite = Element(
        "testsuite",
        name=f"diptych check server {report.facts.get('server', '')}",
        tests=str(len(report.results) + bool(missing)),
        failures=str(len(report.failing)),
        errors=str(int(missing > 0)),
        skipped=str(len(skipped)),
    )
    for result in report.results:
        case = SubElement(suite, "testcase", classname=result.check.group, name=result.check.name)
        if result.status == "not offered":
            SubElement(case, "skipped", message=_clean(result.findings[0].what))
        for finding in result.findings:
            if finding.status == "fails":
                text = "\n".join(f"{label}: {value}" for label, value in failure_rows(finding))
                SubElement(case, "failure", message=_clean(finding.what)).text = _clean(text)
    if missing:
        case = SubElement(suite, "testcase", classname="api", name="api.alive")
        SubElement(case, "error", message=f"the server is gone; {missing} checks did not run")
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(suite, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    """The text without characters that XML cannot hold; answers of a server may contain any."""
    return _NOT_XML.sub("\ufffd", text)
