"""What is said of a component that a user gives."""

from abc import abstractmethod

import reference.sampler
from shared import interfaces
from shared.engine.component_check import problem_with


class NoSampler:
    pass


class Unfinished(interfaces.Sampler):
    pass


class StillAbstract(reference.sampler.Sampler):
    @abstractmethod
    def sample(self, *args: object) -> None: ...


def test_what_a_class_lacks_is_named() -> None:
    names = ", ".join(sorted(interfaces.Sampler.__abstractmethods__))
    assert problem_with("sampler", reference.sampler.Sampler) is None
    assert problem_with("sampler", Unfinished) == f"Unfinished lacks {names}"
    expected = f"NoSampler is no subclass of shared.interfaces.Sampler and lacks {names}"
    assert problem_with("sampler", NoSampler) == expected
    assert problem_with("sampler", StillAbstract) == "StillAbstract lacks sample"
