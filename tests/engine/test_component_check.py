"""What is said of a component that a user gives."""

from abc import abstractmethod
from types import ModuleType, SimpleNamespace

import diptych.reference.layers
import diptych.reference.sampler
from diptych.shared import interfaces
from diptych.shared.engine.build.component_check import problem_with


class NoSampler:
    pass


class Unfinished(interfaces.Sampler):
    pass


class StillAbstract(diptych.reference.sampler.Sampler):
    @abstractmethod
    def sample(self, *args: object) -> None: ...


def test_what_a_class_lacks_is_named() -> None:
    names = ", ".join(sorted(interfaces.Sampler.__abstractmethods__))
    assert problem_with("sampler", diptych.reference.sampler.Sampler) is None
    assert problem_with("sampler", Unfinished) == f"Unfinished lacks {names}"
    expected = f"NoSampler is no subclass of diptych.shared.interfaces.Sampler and lacks {names}"
    assert problem_with("sampler", NoSampler) == expected
    assert problem_with("sampler", StillAbstract) == "StillAbstract lacks sample"


def test_what_is_no_class_is_named() -> None:
    module = "diptych.reference.sampler is a module: name the class in it, diptych.reference.sampler:Class"
    assert problem_with("sampler", diptych.reference.sampler) == module
    assert problem_with("sampler", len) == "len is no class"


def test_each_class_of_a_module_is_checked() -> None:
    classes = {
        name: getattr(diptych.reference.layers, name) for name in ("RMSNorm", "RotaryEmbedding", "SiluAndMul")
    }
    assert problem_with("layers", SimpleNamespace(**classes)) is None
    names = ", ".join(classes)
    for name in classes:
        others = {other: found for other, found in classes.items() if other != name}
        expected = f"SimpleNamespace has no {name}; it must hold {names}"
        assert problem_with("layers", SimpleNamespace(**others)) == expected
        problem = problem_with("layers", SimpleNamespace(**classes | {name: NoSampler}))
        assert problem is not None
        assert problem.startswith(f"NoSampler is no subclass of diptych.shared.interfaces.{name} and lacks ")
    assert problem_with("models", SimpleNamespace()) == "SimpleNamespace has no model_class"


def test_a_drafter_is_a_class_or_a_module_of_them() -> None:
    problem = problem_with("drafter", NoSampler)
    assert problem is not None
    assert problem.startswith("NoSampler is no subclass of diptych.shared.interfaces.Drafter and lacks ")
    assert problem_with("drafter", SimpleNamespace()) == "SimpleNamespace has no drafter_class"
    assert problem_with("drafter", SimpleNamespace(drafter_class=len)) is None


def test_a_file_of_the_user_is_named_by_its_path() -> None:
    module = ModuleType("diptych_user_1")
    module.__file__ = "/home/me/mine.py"
    assert str(problem_with("sampler", module)).endswith("name the class in it, /home/me/mine.py:Class")
    module.__file__ = None
    assert str(problem_with("sampler", module)).endswith("name the class in it, diptych_user_1:Class")
