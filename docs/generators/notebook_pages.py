"""A page for each notebook, with its recorded outputs.

The text is that of `notebooks/`, the outputs are those of docs/samples/notebooks/ and, for GPU cells, of
docs/samples/gpu-cells.json (`python -m docs.generators.record_notebooks`). A page has no section of GPU cells
if none of them is recorded.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

from docs.generators.record_notebooks import FOLDER, HEADING, NOTEBOOKS, gpu_cells, name_of
from notebooks import gpu

_PAGE = re.compile(r"`docs/(course/[\w-]+\.md)`")
_PREDICT = re.compile(r"\bPredict\b")


def _colab_link(notebook: str, repository: str) -> str:
    """Colab opens notebooks of GitHub alone."""
    place = repository.removeprefix("https://github.com/").rstrip("/")
    if place in ("", repository):
        return ""
    url = f"https://colab.research.google.com/github/{place}/blob/main/notebooks/{notebook}.ipynb"
    return f"\n\n[Open in Colab]({url}), and run `!pip install git+{repository}` in a new first cell."


def page_of(path: Path, repository: str = "") -> str:
    """The Markdown of a notebook: its texts, its cells, and what was recorded for each cell, with a link to
    Colab if the repository has a public address."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    recorded = iter(json.loads((FOLDER / f"{path.stem}.json").read_text(encoding="utf-8")))
    has_gpu = any(name in gpu.record() for name in gpu_cells(path))
    is_question = False  # whether the text above asks for a prediction
    parts = ["---\nsearch: {exclude: true}\n---"]
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if source.startswith(HEADING) and not has_gpu:
            break
        if cell["cell_type"] == "markdown":
            parts.append(_PAGE.sub(r"[`docs/\1`](../\1)", source))
            is_question = bool(_PREDICT.search(source))
            continue
        parts.append(f"~~~python\n{source}\n~~~")
        gpu_cell = name_of(source)
        if gpu_cell is None:
            outputs = list(map(_output, next(recorded)["outputs"]))
        else:
            outputs = [_output({"text": gpu.recorded(gpu_cell)})]
        if is_question and outputs:  # the answer opens on a click
            outputs = ["<details markdown><summary>What it prints</summary>", *outputs, "</details>"]
            is_question = False
        parts += outputs
    others = sorted(each.stem for each in NOTEBOOKS.glob("*.ipynb"))
    here = others.index(path.stem)
    ways = [("Previous", here - 1)] * (here > 0) + [("Next", here + 1)] * (here + 1 < len(others))
    way = ". ".join(f"{word}: [{others[i].replace('_', ' ')}]({others[i]}.md)" for word, i in ways)
    run = f"Run it: `make notebooks`, then open `{path.name}`. The outputs are recorded."
    stage = next(iter((NOTEBOOKS.parent / "docs" / "course").glob(f"{path.stem.replace('_', '-')}.md")), None)
    place = (
        f"Page of the course: [{stage.stem[3:].replace('-', ' ')}](../course/{stage.name}). " if stage else ""
    )
    title, _, rest = "\n\n".join(parts).partition("\n\n# ")[2].partition("\n")
    colab = _colab_link(path.stem, repository)
    return f"{parts[0]}\n\n# {title}{colab}\n\n{place}{run}\n{rest}\n\n{way}.\n"


def _output(output: dict[str, str]) -> str:
    if "text" in output:
        text = output["text"].rstrip("\n")
        return f'<div class="output" markdown>\n\n~~~text\n{text}\n~~~\n\n</div>'
    data = base64.b64encode(output["svg"].encode()).decode()
    source = f"data:image/svg+xml;base64,{data}"
    return f'<img class="output" alt="The picture that the cell above draws" src="{source}">'
