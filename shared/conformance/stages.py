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
        "02",
        "paged memory",
        "02-paged-memory.md",
        "memory_pool",
        "my_pool.py",
        "",
        (
            _group(
                "rows",
                "rows-are-distinct rows-short rows-first-in-first-out rows-not-handed-out "
                "rows-freed-twice rows-written-and-read rows-written-at-once rows-read-a-copy "
                "rows-cleared",
                "Rows are taken from the front of `_free_rows` and go back to its end. Count before you "
                "take: None must leave the pool as it was.",
            ),
            _group(
                "store",
                "buffers-are-views store-writes-its-slots store-casts store-takes-views "
                "padding-goes-to-the-dummy-page move-reads-before-it-writes bytes-per-token",
                "`store` writes row i of k and v to slot out_cache_loc[i] of one layer, in the pool's "
                "dtype. `move` reads all sources before it writes, in all layers.",
            ),
            _group(
                "alloc",
                "bad-sizes every-slot-once alloc-short alloc-whole-pages",
                "Take pages from the front of `_free_pages`, remember them in `_used_pages`, and return "
                "the slots of each page in order.",
            ),
            _group(
                "extend",
                "extend-at-page-borders extend-several extend-short extend-checks-the-last-slot "
                "decode-one-slot-each decode-short",
                "Per request: slots last_loc + 1, ... up to the end of its last page, then new pages. "
                "Count the new pages of all requests before you take one. Assert that last_loc fits "
                "prefix_len.",
            ),
            _group(
                "free",
                "extend-fills-the-last-page free-whole-pages freed-twice free-what-is-not-out "
                "grouped-frees-wait groups-do-not-nest restore-undoes free-slots-are-sorted "
                "clear-frees-all",
                "A page of `slots` goes back once, however many of its slots are named. Assert that it is "
                "in `_used_pages`. While a group is open, pages wait in it.",
            ),
            _group(
                "any calls",
                "any-calls same-calls",
                "Single calls are right, and a sequence is not. Replay the smallest sequence by hand: "
                "each page is free, used or in the group.",
            ),
        ),
    ),
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
    Stage(
        "06",
        "sampling",
        "06-sampling.md",
        "sampler",
        "my_sampler.py",
        "Sampler",
        (
            _group(
                "greedy",
                "greedy-ties empty-batch processors",
                "Follow the order of the docstring. Greedy rows take the argmax of unscaled logits, the "
                "lowest id on ties. `scale` subtracts the maximum before it divides.",
            ),
            _group(
                "draw",
                "greedy-is-no-softmax near-zero-temperature near-zero-temperature-shares "
                "same-tokens-unfiltered seed-and-position all-bits-of-a-seed ties independence",
                "scaled + gumbel_noise(seeds[:, None], positions[:, None], token_ids), then argmax. Use "
                "the noise as it comes, in float64.",
            ),
            _group(
                "masks",
                "order-of-steps vocab-mask everything-banned banned-tokens",
                "Token t has bit t % 32 of word t // 32. Masks come after penalties and before the bias; "
                "masked tokens are -inf.",
            ),
            _group(
                "filters",
                "filters-keep exact-tokens same-tokens greedy-in-a-mixed-batch noise-belongs-to-the-token "
                "batch-mates stateless infinite-logits impossible-tokens near-ties",
                "Sort once, in a stable way. Keep while the sum of p before a token is below top_p, while "
                "its rank is below top_k, and where p is at least min_p times the largest p. Sum in "
                "float64; top_p = 1 keeps everything.",
            ),
            _group(
                "bad rows",
                "bad-rows hidden-nan nan-of-the-bias",
                "A row with a NaN, before or after the bias, or with no logit above -inf, gets -1. Look "
                "for NaN before a mask can hide it.",
            ),
            _group(
                "log-probabilities",
                "values asking-changes-nothing bad-rows-have-no-logprob",
                "`logprobs_of` takes the scaled logits before any filter. Greedy rows have temperature 1.",
            ),
            _group(
                "distribution",
                "draws mixed-batch",
                "The tokens that are kept are right, and their frequencies are not. Is the noise added to "
                "log p, and does each row use its own seed?",
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
