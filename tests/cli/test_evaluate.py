"""`diptych eval`: table, file, plot, exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Diptych = Callable[..., Result]
TEXT = """<|im_start|>user
Mara lives in Bergen. Mara is a baker. Otto has a red notebook. In which city does Mara live?<|im_end|>
<|im_start|>assistant
Mara lives in Bergen.<|im_end|>
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "text.txt"


def test_perplexity_of_a_text(diptych: Diptych, text: Path, tmp_path: Path) -> None:
    arguments = ("eval", "--text", str(text), "--questions", "0", "--chunk", "32", "--formats", "int4")
    files = (tmp_path / "r.json", tmp_path / "plot.svg")
    good = diptych(*arguments, "--output", str(files[0]), "--plot", str(files[1]))
    assert good.exit_code == 0, good.output
    data = json.loads(files[0].read_text())
    baseline, int4 = data["results"]
    assert baseline["case"]["name"] == "unquantized"
    assert int4["weight_bytes"] < baseline["weight_bytes"] / 3
    assert int4["num_tokens"] == baseline["num_tokens"] > 32
    assert int4["loss"]["logprob"] > baseline["loss"]["logprob"] == 0
    assert int4["loss"]["exact"] is None
    assert "<svg" in files[1].read_text()

    bad = diptych(*arguments, "--max-increase", "0", "--max-loss", "0")
    assert int4["loss"]["perplexity"] > 0
    assert bad.exit_code == 1
    assert "int4: perplexity rises by" in bad.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "int5"], "no format 'int5'"),
        (["--formats", ","], "nothing to compare"),
        (["--text", "/no/such.txt"], "no file /no/such.txt"),
        (["--questions", "0"], "nothing to measure"),
        (["--output", "/no/such/r.json"], "no folder /no/such"),
        (["--model", "nowhere"], "no model 'nowhere'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_arguments_are_one_line(diptych: Diptych, arguments: list[str], message: str) -> None:
    result = diptych("eval", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_other_models_need_a_text(diptych: Diptych, tmp_path: Path) -> None:
    from diptych.shared.loading.model_path import ASSETS

    for file in (ASSETS / "tiny-dense").iterdir():
        (tmp_path / file.name).symlink_to(file)
    result = diptych("eval", "--model", str(tmp_path))
    assert (result.exit_code, "give --text FILE" in result.stderr) == (2, True)
