"""The tree of prompts by which the router knows which server has which prefix."""

from __future__ import annotations

from diptych.shared.server.router.policy import PrefixTree, Replica
from tests.properties import given, settings, st

A, B = Replica("http://a"), Replica("http://b")


def longest_common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


@given(
    st.lists(st.tuples(st.text("ab", max_size=12), st.sampled_from([A, B])), max_size=20),
    st.text("ab", max_size=12),
)
@settings(max_examples=150)
def test_match_is_the_longest_common_prefix(inserted: list[tuple[str, Replica]], prompt: str) -> None:
    tree = PrefixTree()
    for text, replica in inserted:
        tree.insert(text, replica)
    lengths = {
        each: max((longest_common(text, prompt) for text, replica in inserted if replica is each), default=0)
        for each in (A, B)
    }
    longest = max(lengths.values())
    holders = {each for each, length in lengths.items() if length == longest > 0}
    assert tree.match(prompt, [A, B]) == (longest, holders)
    assert tree.match(prompt, [B])[0] == lengths[B]
    for each in (A, B):
        prefixes = {
            text[:i] for text, replica in inserted if replica is each for i in range(1, len(text) + 1)
        }
        assert tree.num_chars.get(each, 0) == len(prefixes)


@given(
    st.lists(st.tuples(st.text("ab", max_size=12), st.sampled_from([A, B])), max_size=20), st.integers(0, 20)
)
@settings(max_examples=150)
def test_eviction_bounds_each_replica_and_keeps_whole_prefixes(
    inserted: list[tuple[str, Replica]], max_chars: int
) -> None:
    tree = PrefixTree()
    for text, replica in inserted:
        tree.insert(text, replica)
    tree.evict(max_chars)
    for each in (A, B):
        nodes = [node for node in tree._nodes() if each in node.used]
        assert tree.num_chars.get(each, 0) == sum(len(node.text) for node in nodes) <= max_chars
        for node in nodes:
            assert node.parent is tree.root or each in node.parent.used
    tree.remove(A)
    tree.remove(B)
    assert not tree.root.children


def test_what_was_not_used_for_the_longest_time_is_forgotten_first() -> None:
    tree = PrefixTree()
    for text in ("shared-one", "shared-two", "other"):
        tree.insert(text, A)
    tree.insert("shared-one", A)
    tree.evict(len("shared-one") + len("other"))
    assert tree.match("shared-two", [A])[0] == len("shared-")
    assert tree.match("shared-one", [A])[0] == len("shared-one")
