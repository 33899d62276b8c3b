"""What is captured of a draft model, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diptych.optimized.graphs.draft_graphs import DraftGraphs, capture_drafts


def of_shape(**attention: Any) -> Any:
    supports = {"supports_cuda_graph": True, "accepts_seq_len_upper_bounds": True} | attention
    return SimpleNamespace(attention=SimpleNamespace(**supports), batch_sizes=(), _calls={})


def test_all_sizes_of_a_shape_are_captured_or_it_says_why_not() -> None:
    none: Any = None
    assert DraftGraphs.capture_all(of_shape(), none, none, none)
    for missing in ("supports_cuda_graph", "accepts_seq_len_upper_bounds"):
        with pytest.warns(RuntimeWarning, match="drafting"):
            assert not DraftGraphs.capture_all(of_shape(**{missing: False}), none, none, none)


@pytest.mark.parametrize(("fails_at", "tried"), [(None, [0, 1, 2]), (1, [0, 1])])
def test_every_shape_is_captured_until_one_fails(fails_at: int | None, tried: list[int]) -> None:
    seen: list[int] = []

    def shape(number: int) -> Any:
        def capture_all(*_: Any) -> bool:
            seen.append(number)
            return number != fails_at

        return SimpleNamespace(capture_all=capture_all)

    none: Any = None
    capture_drafts([shape(i) for i in range(3)], none, none, none)
    assert seen == tried
