"""Stages of the course: a component, the file to complete, and its clauses in teaching order, with hints.

`diptych check --stage 05 my_cache.py` checks the groups in this order and stops at the first that fails.
Every clause of a staged component is in exactly one group (`tests/docs/test_stages.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Clauses that hold once one part of the exercise is complete."""

    name: str
    clauses: tuple[str, ...]
    hint: str


@dataclass(frozen=True)
class Stage:
    number: str  # "05"
    title: str
    page: str  # of docs/course
    component: str  # of shared.registry
    skeleton: str  # file of docs/exercises
    class_name: str  # in the learner's file; "": the file is a module of classes
    groups: tuple[Group, ...]

    @property
    def skeleton_path(self) -> str:
        return f"docs/exercises/{self.skeleton}"

    def target(self, file: str) -> str:
        """The learner's file, as `shared.registry` loads it."""
        return f"{file}:{self.class_name}" if self.class_name else file


def _group(name: str, clauses: str, hint: str) -> Group:
    return Group(name, tuple(clauses.split()), hint)


STAGES = (
    Stage(
        "05",
        "the radix cache",
        "05-radix-cache.md",
        "radix_cache",
        "my_cache.py",
        "MyRadixCache",
        (
            _group(
                "match",
                "is-not-disabled bad-arguments empty-key",
                "Walk from the root: look up the next page in `children` and stop where it is missing. An "
                "empty match is the root and an empty int64 tensor.",
            ),
            _group(
                "insert",
                "key-shorter-than-a-page surplus-slots namespaces",
                "Match first. Only the pages behind the match become a new leaf, with a copy of their "
                "slots; `prefix_len` counts the tokens that were there before.",
            ),
            _group(
                "split",
                "whole-pages parting-within-a-page insert-keeps-slots insert-twice copies bigrams "
                "long-keys nodes-parents-first",
                "A walk that leaves an edge in the middle cuts it at a page. The new node is the upper "
                "half; the old object stays the lower half. Both have the same locks, hits, age and "
                "priority.",
            ),
            _group(
                "evict",
                "evict-nothing whole-leaves-go evicted-slots-come-back parents-go-last "
                "evict-without-pools eviction-order",
                "Remove whole leaves in the order of `self.order`, free their slots, and count tokens. A "
                "parent becomes a candidate when its last child is gone.",
            ),
            _group(
                "lock",
                "locks-count-along-the-path root-lock lock-below-zero locked-nodes-stay node-of-insert "
                "split-keeps-the-holder split-of-an-unlocked-node match-locks-what-it-matched "
                "sizes-after-a-split reset-forgets",
                "A lock counts on every node from the given one up to the root, without the root. `evict` "
                "skips nodes with locks. A lock below zero is an AssertionError.",
            ),
            _group(
                "discard",
                "discards-the-rest discards-what-is-below discards-whole-nodes discards-nothing-in-use "
                "evicts-what-is-left discards-without-pools",
                "Remove the first unlocked node of the path that begins at `start` or later, with "
                "everything below it, and free all of their slots.",
            ),
            _group(
                "any calls",
                "any-calls same-calls",
                "Single calls are right, and a sequence is not. Replay the smallest sequence by hand and "
                "draw the tree after each call.",
            ),
            _group(
                "requests",
                "prefill-is-cached chunk-after-chunk remapped-before-freed duplicates-freed-alone "
                "full-hit finish-caches-committed finish-of-a-duplicate finish-without-insert "
                "retracted-and-readmitted ends-between-chunks live-prefix-survives requests-in-namespaces "
                "priority-of-a-request bigram-requests over-allocated-slots any-lives same-lives",
                "The order matters: insert, write the tree's slots to the row, free the duplicates, lock "
                "the new path, unlock the old one. Each slot of the request is freed once, or is taken by "
                "the tree.",
            ),
        ),
    ),
)


def stage_of(number: str) -> Stage:
    """The stage of a number, such as "05" or "5"; an unknown one raises `ValueError` listing the known."""
    for stage in STAGES:
        if stage.number == number.zfill(2):
            return stage
    known = ", ".join(f"{stage.number} ({stage.title})" for stage in STAGES)
    raise ValueError(f"no exercise for stage {number!r}; there are exercises for {known}")
