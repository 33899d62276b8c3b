"""The measurement of block diffusion counts the passes at both ends of the threshold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diptych.shared.tools.bench.diffusion_gain import main


def test_passes_of_both_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--panel",
        "reference",
        "--device",
        "cpu",
        "--batch",
        "1,2",
        "--prompt",
        "6",
        "--new",
        "6",
        "--json",
    ]
    main([*flags, str(tmp_path / "bd.json")])
    rows = json.loads((tmp_path / "bd.json").read_text())["results"]
    assert rows == [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["batch_size"], row["threshold"]) for row in rows] == [
        (size, threshold) for size in (1, 2) for threshold in (None, 1.0, 0.0)
    ]
    # Two blocks, of which the first has two known tokens: 2 and 4 passes, and one more each.
    assert [row.get("passes_per_block") for row in rows] == [None, 4.0, 2.0] * 2
    assert all(row["tokens_per_s"] > 0 for row in rows)
