"""Wrong ideas of learners: small changes of the solution of an exercise, and where they must be caught."""

from typing import NamedTuple


class WrongIdea(NamedTuple):
    stage: str
    what: str  # the learner believes
    group: str  # of the exercise, in which it is caught
    clause: str  # that fails first
    says: str  # words of the hint, which name the idea
    changes: tuple[tuple[str, str], ...]  # words of the solution, each once in it, and those in their place
