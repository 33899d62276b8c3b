"""Recordings of measurements run beside each other, each on GPUs of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs.generators import record_measurements
from docs.generators.recordings import RECORDINGS, Recording

SCRIPT = """
import json, os, sys, time
start = time.time()
time.sleep({sleep})
result = dict(gpus=os.environ["CUDA_VISIBLE_DEVICES"], start=start, end=time.time())
json.dump(result, open(sys.argv[1], "w"))
"""


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recording]:
    """What is recorded; without entries of its own it is nothing."""
    found: dict[str, Recording] = {}
    monkeypatch.setattr(record_measurements, "RECORDINGS", found)
    return found


def sleeps(sleep: float, **fields: Any) -> Recording:
    return Recording(f"python -c '{SCRIPT.format(sleep=sleep)}'", **fields)


def recorded(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}


def are_apart(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first["end"] <= second["start"] or second["end"] <= first["start"]


def test_each_gpu_has_one_recording_at_a_time(commands: dict[str, Recording], tmp_path: Path) -> None:
    commands.update(
        a=sleeps(0.6), b=sleeps(0.6), both=sleeps(0.1, num_gpus=2), c=sleeps(0.1), cpu=sleeps(0.1, num_gpus=0)
    )
    assert record_measurements.record(list(commands), tmp_path, ["3", "5"], 60) == []
    results = recorded(tmp_path)
    assert {name: sorted(each["gpus"].split(",")) for name, each in results.items()} | {"c": []} == {
        "a": ["3"], "b": ["5"], "both": ["3", "5"], "c": [], "cpu": [""],
    }  # fmt: skip
    assert not are_apart(results["a"], results["b"])
    alone = [("both", name) for name in "abc"] + [("cpu", name) for name in ("a", "b", "both", "c")]
    assert all(are_apart(results[one], results[other]) for one, other in alone)
    assert not list(tmp_path.glob("*.log"))


def test_what_would_end_too_late_is_left(commands: dict[str, Recording], tmp_path: Path) -> None:
    commands.update(long=sleeps(0, seconds=100), short=sleeps(0, seconds=1))
    assert record_measurements.record(list(commands), tmp_path, ["0"], 50) == ["long"]
    assert list(recorded(tmp_path)) == ["short"]


def test_what_fails_is_shown_and_named(
    commands: dict[str, Recording], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.update(wrong=Recording("python -c 'raise SystemExit(\"no such shape\")'"), good=sleeps(0))
    assert record_measurements.record(list(commands), tmp_path, ["0"], 60) == ["wrong"]
    assert "exit status 1\nno such shape" in capsys.readouterr().out
    assert list(recorded(tmp_path)) == ["good"]


def test_what_is_there_is_not_recorded_again(
    commands: dict[str, Recording], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.update(old=sleeps(0, num_gpus=0), new=sleeps(0, num_gpus=0), many=sleeps(0, num_gpus=99))
    (tmp_path / "old.json").write_text("{}")
    record_measurements.main([str(tmp_path)])
    assert recorded(tmp_path)["old"] == {}
    assert set(recorded(tmp_path)) == {"old", "new"}
    assert "GPUs: many" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        record_measurements.main([str(tmp_path), "unknown"])
    assert "no recording unknown; there are old, new, many" in capsys.readouterr().err


def test_ranks_have_a_gpu_each() -> None:
    assert {each.num_gpus for each in RECORDINGS.values() if "--tp 2" in each.command} == {2}
