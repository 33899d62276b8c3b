"""Files of the same name in both panels have the same public classes, methods and order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.twins import public_surface, twin_differences, twin_files

ROOT = Path(__file__).parents[2]

REFERENCE = '''
"""A cache."""
class Cache:
    def __init__(self, size): ...
    def match(self, key, *, limit=None): ...
    def evict(self, num_tokens): ...
    def _walk(self, key): ...
def helper(a, b): ...
'''
OPTIMIZED = REFERENCE.replace('"""A cache."""', '"""A cache. Differs from reference: hashes pages."""')


def test_twins_have_the_same_surface() -> None:
    for reference, optimized in twin_files(ROOT):
        assert twin_differences(reference.read_text(), optimized.read_text()) == [], optimized


def test_pairs_are_found_by_their_path(tmp_path: Path) -> None:
    for name in (
        "reference/a.py",
        "reference/models/b.py",
        "reference/c.py",
        "optimized/models/b.py",
        "optimized/a.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [reference.name for reference, _ in twin_files(tmp_path)] == ["a.py", "b.py"]


def test_every_optimized_component_has_a_twin() -> None:
    """Files without a twin are kernels or mechanisms that only the optimized panel has."""
    own = {"kernels", "graphs", "overlap", "attention", "moe_runners", "tune"}
    own |= {
        "parallel/stage_messages.py",
        "parallel/stage_model.py",
        "parallel/symmetric_memory.py",
        "mla/mla_triton.py",
        "waiting_matches.py",
        "waiting_forest.py",
        "page_ring.py",
        "eviction_heap.py",
        "mixed_batch.py",
        "array_tree.py",
        "speculative/ngram_lookup.py",
        "speculative/ngram_table.py",
        "speculative/node_sampler.py",
        "speculative/round.py",
        "speculative/round_batch.py",
    }
    for path in (ROOT / "optimized").rglob("*.py"):
        name = path.relative_to(ROOT / "optimized")
        if path.name != "__init__.py" and not own & {name.parts[0], name.as_posix()}:
            assert (ROOT / "reference" / name).is_file(), f"optimized/{name} has no twin"


def test_equal_surfaces_pass() -> None:
    assert twin_differences(REFERENCE, OPTIMIZED) == []
    more = OPTIMIZED + "\ndef launch(grid): ...\n"
    assert twin_differences(REFERENCE, more) == []


def test_a_class_may_come_from_another_file_of_the_panel() -> None:
    node = "class Node: ...\n"
    assert twin_differences(REFERENCE + node, OPTIMIZED) == ["Node is missing"]
    assert twin_differences(REFERENCE + node, OPTIMIZED + "from diptych.optimized.tree import Node\n") == []
    assert twin_differences(REFERENCE + node, OPTIMIZED + "from diptych.shared.tree import Node\n") != []


def test_a_method_may_come_from_a_base_in_another_file_of_the_panel() -> None:
    heir = OPTIMIZED.replace("    def evict(self, num_tokens): ...\n", "").replace(
        "Cache:", "Cache(Fast, Base):"
    )
    assert twin_differences(REFERENCE, heir) == ["Cache.evict is missing"]
    assert twin_differences(REFERENCE, heir + "from diptych.optimized.fast import Fast\n") == []
    assert twin_differences(REFERENCE, heir + "from diptych.shared.fast import Fast\n") != []


def test_functions_are_a_panels_own() -> None:
    """A module-level function may be missing; one of the same name has the same parameters."""
    assert twin_differences(REFERENCE, OPTIMIZED.replace("def helper(a, b): ...\n", "")) == []
    first = "def before(): ...\n"
    two = REFERENCE.replace("def helper", f"{first}def helper")
    swapped = OPTIMIZED + first
    assert twin_differences(two, swapped) == ["before is out of order"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("def evict(self, num_tokens)", "def evict(self, n)"),
            "Cache.evict takes (self, n), not (self, num_tokens)",
        ),
        (("limit=None", "max_len=None"), "Cache.match takes (self, key, max_len=), not (self, key, limit=)"),
        (("    def match(self, key, *, limit=None): ...\n", ""), "Cache.match is missing"),
        (("def helper(a, b)", "def helper(b, a)"), "helper takes (b, a), not (a, b)"),
        (("class Cache", "class FastCache"), "Cache is missing"),
        (("Differs from reference: ", ""), 'its docstring does not say "Differs from reference"'),
    ],
)
def test_a_difference_is_named(change: tuple[str, str], message: str) -> None:
    assert message in twin_differences(REFERENCE, OPTIMIZED.replace(*change))


def test_another_order_is_named() -> None:
    lines = OPTIMIZED.splitlines(keepends=True)
    lines[4], lines[5] = lines[5], lines[4]
    assert twin_differences(REFERENCE, "".join(lines)) == ["Cache.match is out of order"]


def test_private_names_do_not_count() -> None:
    assert list(public_surface(REFERENCE)) == [
        "Cache",
        "Cache.__init__",
        "Cache.match",
        "Cache.evict",
        "helper",
    ]
