"""The recording as one HTML file without outside assets."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any


def html_of(run: dict[str, Any]) -> str:
    """run: what `Recorder.run` gives."""
    data = json.dumps(run, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    page = _asset("viewer.html")
    for place, text in (("STYLE", _asset("viewer.css")), ("SCRIPT", _asset("viewer.js")), ("DATA", data)):
        page = page.replace(f"/*{place}*/", text.strip())
    return page


def write_page(file: Path, run: dict[str, Any]) -> None:
    file.write_text(html_of(run), encoding="utf-8")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
