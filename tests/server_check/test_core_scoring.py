"""Scores of a server beside the reference's: what is within tolerance, and the diagnosis of what is not."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from diptych.shared.tools.cli import app
from diptych.shared.tools.conformance.server.checks import QUICK, chosen, run_checks
from diptych.shared.tools.conformance.server.diagnosis import diagnose, is_other_model, wrong_region
from diptych.shared.tools.conformance.server.logprob_tolerance import TABLE
from diptych.shared.tools.conformance.server.oracle import Oracle
from diptych.shared.tools.conformance.server.scored import Scored, judge, score
from diptych.shared.tools.conformance.server.session import connect
from tests.server_check.faults import load
from tests.server_check.local_server import LocalServer

EXACT, BF16 = TABLE["float32"], TABLE["bfloat16"]
TEXT = (
    "Mara is a baker. Mara lives in Bergen. Otto bought 12 eggs. Otto has a red notebook. The streets were "
    "quiet. In which city does Mara live? Mara lives in Bergen. How many eggs did Otto buy?"
)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle("tiny-dense")


@pytest.fixture(scope="module")
def right(oracle: Oracle) -> tuple[Scored, np.ndarray]:
    """A text with the values of a correct server, and the reference's rows."""
    ids = oracle.tokenizer.encode(TEXT)
    rows = oracle.logprobs(ids)
    rng = np.random.default_rng(0)
    entries = [(i, ids[i], rows[i - 1, ids[i]] + rng.normal() * 1e-5) for i in range(1, len(ids))]
    return score(rows, ids, entries), rows


def with_actual(text: Scored, actual: np.ndarray) -> Scored:
    return Scored(text.ids, text.positions, text.token_ids, actual, text.expected)


def test_correct_scores_are_within_tolerance(right: tuple[Scored, np.ndarray]) -> None:
    text, _ = right
    assert judge([text], EXACT).reasons == ()
    noisy = with_actual(text, text.actual + np.random.default_rng(1).normal(size=len(text.actual)) * 0.01)
    assert judge([noisy], BF16).reasons == ()
    assert judge([noisy], EXACT).reasons


def test_a_single_wrong_token_is_found(right: tuple[Scored, np.ndarray]) -> None:
    text, _ = right
    actual = text.actual.copy()
    actual[20] -= 0.05
    found = judge([with_actual(text, actual)], EXACT)
    assert found.reasons[0].startswith("1 of ")
    assert found.evidence["first position beyond tolerance"] == 21
    actual[20] = np.nan
    assert judge([with_actual(text, actual)], EXACT).evidence["largest error"] == 1e9


@pytest.mark.parametrize("tolerance", [EXACT, BF16], ids=["float32", "bfloat16"])
def test_patterns_have_names(right: tuple[Scored, np.ndarray], tolerance: object) -> None:
    text, rows = right
    limits = EXACT if tolerance is EXACT else BF16
    cold = rows / 0.7
    cold -= np.log(np.exp(cold).sum(axis=-1, keepdims=True))
    half = len(text.actual) // 2
    stale = np.where(np.arange(len(text.actual)) < half, text.actual, text.actual - 3.0)
    faults = {
        "1 position earlier": np.roll(text.actual, 1),
        "softmax temperature: the values are those of temperature 0.7": cold[:-1][
            np.arange(len(text.actual)), text.token_ids
        ],
        "base 10": text.actual / np.log(10),
        "probabilities": np.exp(text.actual),
        "off by -0.75": text.actual - 0.75,
        f"right before position {half + 1}": stale,
    }
    for name, actual in faults.items():
        wrong = with_actual(text, actual)
        assert judge([wrong], limits).reasons, name
        assert name in (diagnose(wrong, rows, limits) or wrong_region(wrong, limits))
    other = with_actual(text, -np.abs(np.random.default_rng(2).normal(size=len(text.actual)) * 9))
    assert diagnose(other, rows, limits) == ""
    assert is_other_model([other])
    assert "rounded to 1 digit " in diagnose(with_actual(text, text.actual.round(1)), rows, EXACT)


def test_ids_of_padding_rows_can_be_scored(oracle: Oracle) -> None:
    """vLLM draws them, as its softmax covers them."""
    assert oracle.vocab_size < oracle.config.vocab_size
    assert oracle.logits([5, oracle.vocab_size]).shape == (2, oracle.num_rows)


def test_nothing_to_compare_is_no_success() -> None:
    assert judge([], EXACT).reasons == ("the answers have no log-probability to compare",)


@pytest.mark.parametrize(
    ("fault", "check", "diagnosis"),
    [
        ("stale page", "scoring.prompt", "right before position 17"),
        ("softmax temperature", "scoring.prompt", "temperature 0.7"),
        ("truncated logprobs", "scoring.entries", "entries of generated tokens"),
    ],
)
def test_planted_faults_are_named(
    proxied: LocalServer, oracle: Oracle, fault: str, check: str, diagnosis: str
) -> None:
    context = connect(proxied.url, "tiny-dense", dtype="float32", limits=QUICK, oracle=oracle)
    proxied.proxy.plant(load()[0][fault].plant)
    (result,) = run_checks(context, chosen([check]))
    assert result.status == "fails"
    assert diagnosis in next(each for each in result.findings if each.status == "fails").what


def test_the_command(proxied: LocalServer, tmp_path: Path) -> None:
    files = {name: tmp_path / f"report.{name}" for name in ("html", "junit", "json")}
    flags = [text for name, file in files.items() for text in (f"--{name}", str(file))]
    scored = ["--model", "tiny-dense", "--dtype", "float32", "--quick", "--only", "scoring", *flags]
    result = CliRunner().invoke(app, ["check", "server", proxied.url, *scored])
    assert result.exit_code == 0, result.output
    assert "the server agrees with the reference: 4 checks hold" in result.output
    proxied.proxy.plant(load()[0]["low logprobs"].plant)
    result = CliRunner().invoke(app, ["check", "server", proxied.url, *scored])
    assert result.exit_code == 1
    assert "3 of 4 checks fail: scoring.prompt, scoring.continuation" in result.output
    found = json.loads(files["json"].read_text())
    assert [each["status"] for each in found["checks"]] == ["holds", "fails", "fails", "fails"]
    suite = ElementTree.parse(files["junit"]).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "3", "0")
    page = files["html"].read_text()
    assert page.count("<svg") == 6
    assert "prefers-color-scheme: dark" in page
    assert "off by -0.75" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:9", "--model", "tiny-dense"], "error: no server answers"),
        (["http://127.0.0.1:9", "--model", "no-such-model"], "no model 'no-such-model'"),
        (["http://127.0.0.1:9", "--model", "tiny-dense", "--only", "speed"], "no check or group speed"),
        (["http://127.0.0.1:9", "--model", "tiny-dense", "--quick", "--thorough"], "exclude each other"),
    ],
)
def test_what_cannot_be_checked(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["check", "server", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
