"""`diptych doctor` describes the machine, never fails, and says what to install."""

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import Result

from diptych.shared import hardware, registry
from diptych.shared.tools.commands import doctor_checks as doctor
from diptych.shared.tools.commands.doctor_checks import Check, examine

Diptych = Callable[..., Result]


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_every_component_of_the_registry_is_there_and_usable() -> None:
    checks = [check for check in examine() if check.area == "components"]
    assert [check.name for check in checks] == list(registry.IMPLEMENTATIONS)
    assert [check for check in checks if check.state != "ok"] == []


def test_reference_runs_here() -> None:
    checks = by_name(examine())
    assert checks["reference"].state == "ok"
    assert "cpu" in checks["reference"].found
    assert checks["torch"].state == "ok"
    assert checks["built-in"].state == "ok"


def test_what_ships_with_the_project_is_listed_as_what_it_is() -> None:
    found = by_name(examine())["built-in"].found
    assert found == "tiny-dense, tiny-hybrid, tiny-moe, tiny-dense-eagle3 (a speculation head)"


def test_missing_package_comes_with_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "installed_version", lambda name: None)
    checks = by_name(examine())
    assert checks["triton"].state == "absent"
    assert "pip install" in checks["triton"].remedy
    assert (checks["transformers"].state, checks["transformers"].remedy) == (
        "problem",
        "pip install transformers",
    )


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("3.5.1", False), ("3.6.0", True), ("3.9.1+git1", True), ("3.10.0", False), ("4.0", False)],
)
def test_a_package_outside_its_tested_versions_is_a_problem(
    version: str, is_tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires = ["torch>=2.11", "triton<3.10,>=3.6; extra == 'gpu'"]
    monkeypatch.setattr(hardware.metadata, "requires", lambda package: requires)
    monkeypatch.setattr(hardware, "installed_version", lambda name: version)
    checks = by_name(examine())
    assert checks["transformers"].state == "ok"
    triton = checks["triton"]
    assert triton.state == ("ok" if is_tested else "problem")
    assert triton.found == (
        version if is_tested else f"{version} is untested; the tested versions are <3.10,>=3.6"
    )
    assert triton.remedy == ("" if is_tested else "pip install 'triton<3.10,>=3.6'")


@pytest.mark.parametrize(
    ("version", "is_tested"), [("0.6.11", False), ("0.6.12", True), ("0.7.2", True), ("0.8.0", False)]
)
def test_the_versions_of_flashinfer(version: str, is_tested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    monkeypatch.setattr(
        hardware.metadata, "requires", lambda package: re.findall(r'"(flashinfer-[^"]*)"', text)
    )
    assert hardware.is_supported("flashinfer-python", version) == is_tested


def test_bounds_of_pyproject_include_what_is_installed() -> None:
    """The metadata may be older than pyproject.toml, so the file itself is read."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    requirements = [Requirement(each) for each in re.findall(r'"((?:triton|flashinfer-python)[^"]*)"', text)]
    assert [each.name for each in requirements].count("triton") == 2  # gpu and test
    for each in requirements:
        assert "<" in str(each.specifier)
        version = hardware.installed_version(each.name)
        assert version is None or each.specifier.contains(version)


def test_without_metadata_every_version_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(package: str) -> list[str]:
        raise hardware.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(hardware.metadata, "requires", requires)
    assert hardware.supported_versions("triton") is None
    assert hardware.is_supported("triton", "99.0")


def test_broken_probe_is_a_row_not_a_crash(monkeypatch: pytest.MonkeyPatch, diptych: Diptych) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("driver mismatch")

    monkeypatch.setattr(hardware, "run_tool", broken)
    checks = examine()
    assert any(check.state == "problem" and "driver mismatch" in check.found for check in checks)
    assert by_name(checks)["reference"].state == "ok"
    assert diptych("doctor").exit_code == 0


def test_component_that_cannot_be_imported_says_why() -> None:
    def load(component: str, choice: str) -> object:
        raise ValueError("needs triton: pip install ...")

    check = doctor._component("attention", "reference", load)
    assert check.state == "problem"
    assert "needs triton" in check.found


def test_attention_backends_say_what_they_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {check.name: check for check in examine() if check.area == "attention"}
    assert set(checks) >= {"attention=triton", "attention=flashinfer", "attention=fa3"}
    if not torch.cuda.is_available():
        found = {
            (check.state, check.found) for name, check in checks.items() if name.startswith("attention=")
        }
        assert found == {("absent", "needs a CUDA GPU")}
    assert checks["mla_attention=flashmla"].state == "absent"

    class OldGPU:
        @staticmethod
        def check_device(device: torch.device) -> None:
            raise ValueError("supports Hopper GPUs")

    def load(component: str, choice: str) -> object:
        return OldGPU if choice == "fa3" else object

    found = [doctor._attention_backend(name, torch.device("cuda"), load) for name in ("fa3", "triton")]
    assert [(check.state, check.found) for check in found] == [
        ("absent", "supports Hopper GPUs"),
        ("ok", "usable"),
    ]


@pytest.mark.gpu
def test_the_default_backend_comes_with_its_reason() -> None:
    (default,) = (check for check in examine() if (check.area, check.name) == ("attention", "the default"))
    assert default.state == "ok"
    assert "triton" in default.found
    assert ": " in default.found


def test_the_table_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.is_available() or [check.found for check in doctor._gpu_table()] == ["needs a CUDA GPU"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for is_used in (True, False):
        found = {"moe_tiles": (is_used, "8 experts"), "linear_choice": "of the H200"}
        monkeypatch.setattr(
            importlib,
            "import_module",
            lambda name, found=found: SimpleNamespace(describe=lambda _: found[name.rpartition(".")[2]]),
        )
        experts, linear = doctor._gpu_table()
        assert (experts.state, experts.found) == ("ok" if is_used else "absent", "8 experts")
        assert ("diptych tune" in experts.remedy) != is_used
        assert (linear.state, linear.found, linear.remedy) == ("ok", "of the H200", "")


def test_a_narrow_terminal_loses_nothing(diptych: Diptych, monkeypatch: pytest.MonkeyPatch) -> None:
    check = Check("components", "x" * 24, "problem", "needs 24 words " * 8, "pip install it")
    monkeypatch.setattr(doctor, "examine", lambda: [check])
    monkeypatch.setenv("COLUMNS", "40")
    table = diptych("doctor").stdout
    cells = [line.split("│")[4] for line in table.splitlines() if "│" in line]
    assert " ".join(" ".join(cells).split()) == f"{check.found}{check.remedy}"
    assert check.name in table


def test_table_and_json_say_the_same(diptych: Diptych, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    table = diptych("doctor")
    data = diptych("doctor", "--json")
    assert (table.exit_code, data.exit_code) == (0, 0)
    checks = json.loads(data.stdout)["checks"]
    assert {check["name"] for check in checks} >= {"python", "torch", "cuda", "reference", "scheduler"}
    for check in checks:
        assert check["name"] in table.stdout


@pytest.mark.parametrize("tool", [("no-such-program",), ("false",)])
def test_tool_that_is_missing_or_fails_gives_none(tool: tuple[str, ...]) -> None:
    assert hardware.run_tool(*tool) is None
