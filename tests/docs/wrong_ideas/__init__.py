"""Wrong ideas of learners: small changes of the solution of an exercise, and where they must be caught."""

from tests.planted import Bugs

IDEAS = Bugs("wrong idea")
"""The finder is a group of the exercise and a clause that fails first; it says words of the hint."""


def wrong_idea(
    stage: str, what: str, group: str, clause: str, says: str, changes: tuple[tuple[str, str], ...]
) -> None:
    """`what` the learner believes. `changes`: words of the solution, each once in it -> others."""
    IDEAS.add(f"{stage}: {what}", changes, what, where=stage, finder=f"{group}: {clause}", says=says)
