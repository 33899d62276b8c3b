"""Labs: the symptom of each planted bug appears, its clauses catch it, and the reference panel has none."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diptych.shared import registry
from diptych.shared.tools.cli import app
from diptych.shared.tools.conformance.clauses import suite
from diptych.shared.tools.course.lab_scenes import SCENES, starter
from diptych.shared.tools.course.labs import Lab, judge, lab_of, labs
from tests.labs.lab_bugs import BUGS, LABS
from tests.labs.seal import fields_of
from tests.planted import Bug

ROOT = Path(__file__).parents[2]
SAMPLE = 11
each_lab = pytest.mark.parametrize(
    "lab", [pytest.param(lab, id=lab.choice, marks=pytest.mark.full) for lab in labs()]
)


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["course", "lab", *arguments])
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


def test_the_sealed_file_is_that_of_the_bugs() -> None:
    """`python -m tests.labs.seal` writes it."""
    assert len(labs()) == len(BUGS) == 12
    for lab, bug in zip(labs(), BUGS):
        assert (lab.title, lab.story, lab.scene) == (bug.title, " ".join(bug.story.split()), bug.scene)
        wanted = fields_of(bug, list(lab.clauses))
        assert {name: getattr(lab, name) for name in wanted} == {
            name: tuple(value) if name in ("clauses", "links") else value for name, value in wanted.items()
        }
        assert lab.clauses[0] == bug.best
        assert lab.scene in SCENES


@pytest.mark.parametrize("lab", labs(), ids=lambda lab: lab.choice)
def test_words_of_the_bug_are_in_the_reference(lab: Lab) -> None:
    """A change of these lines is one of the lab: `lab_bugs.py`, then `python -m tests.labs.seal`."""
    module = registry.IMPLEMENTATIONS[lab.component]["reference"].partition(":")[0]
    source = (ROOT / (module.removeprefix("diptych.").replace(".", "/") + ".py")).read_text("utf-8")
    assert all(source.count(before) == 1 for before, _ in lab.changes)


def test_the_engine_of_a_lab_shows_its_symptom() -> None:
    lab = lab_of(SAMPLE)
    assert not scene_is_right(lab, lab.choice)
    text = run(str(SAMPLE))
    assert lab.story in text
    assert "This is wrong." in text
    assert lab.explanation not in text
    assert f"diptych diff --b {lab.choice}" in text


def scene_is_right(lab: Lab, use: str) -> bool:
    return SCENES[lab.scene](starter(use=registry.parse_use(use))).is_right


@each_lab
def test_symptom(lab: Lab) -> None:
    assert not scene_is_right(lab, lab.choice)
    assert scene_is_right(lab, "")


@LABS.found_by(is_fast=lambda *_: False)
def test_clauses(bug: Bug) -> dict[str, str]:
    """All clauses that catch the bug are right answers, and no other one is."""
    (lab,) = (each for each in labs() if each.title == bug.name)
    verdicts = suite.check_component(lab.component, lab.choice, shrink_failures=False)
    caught = {each.clause.name: str(each.failure) for each in verdicts if not each.holds}
    assert set(caught) == set(lab.clauses)
    return caught


def test_answers(tmp_path: Path) -> None:
    lab = lab_of(10)
    right = f"{lab.component}:{lab.clauses[0]}"
    assert judge(lab, right) == "right"
    assert judge(lab, "radix_cache:namespaces") == "component"
    assert judge(lab, "sampler:batch-mates") == "wrong"
    (tmp_path / "course.json").write_text('{"stages": {}, "labs": [3]}')
    text = run("10", "--answer", right, "--folder", str(tmp_path))
    assert lab.explanation in text
    assert all(link in text for link in lab.links)
    text = run("--folder", str(tmp_path))
    assert "2 solved" in text
    assert f"✓ 10 {lab.title}" in text
    assert "is not in sampler" in run("10", "--answer", "sampler:batch-mates", status=1)
    assert "another clause fails" in run("10", "--answer", "radix_cache:namespaces", status=1)
    assert lab.explanation in run("10", "--reveal")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["13"], "there is no lab 13"),
        (["1", "--answer", "sampler"], "an answer is component:clause"),
        (["1", "--answer", "sampler:nothing"], "sampler has no clause 'nothing'"),
        (["1", "--answer", "engine:nothing"], "no contract for 'engine'"),
    ],
)
def test_errors_are_one_line(arguments: list[str], complaint: str) -> None:
    assert complaint in run(*arguments, status=2)


def test_a_lab_is_a_choice_of_every_component_it_has() -> None:
    use = registry.parse_use("lab10")
    assert set(use) == set(registry.IN_LABS)
    assert registry.load("sampler", "lab10") is registry.load("sampler", "reference")
    assert registry.load("radix_cache", "lab10") is not registry.load("radix_cache", "reference")
    assert {lab.component for lab in labs()} <= set(registry.IN_LABS)
    registry.check_choice("sampler", "lab10")
    with pytest.raises(ValueError, match="no lab 99"):
        registry.load("sampler", "lab99")


def test_choices_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.use"
    file.write_text("sampler=my_sampler.py:Sampler\n\nlayers=my_layers.py\n")
    assert registry.parse_use(f"attention=triton,@{file}") == {
        "attention": "triton",
        "sampler": f"{tmp_path}/my_sampler.py:Sampler",
        "layers": f"{tmp_path}/my_layers.py",
    }
