"""Masks of draft trees under a window or chunks, against what each token sees, counted one by one."""

from __future__ import annotations

import pytest
import torch

from diptych.optimized.kernels.attention.tree_window import tree_window
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.oracles.attention_batches import tree_mask

PARENTS = ([-1, 0, 0, 1, 2, 4, 5], [-1, 0, 1, 2, 3, 4, 5], [-1, 0, 0, 0, 0, 0, 0])
SEQ_LENS = (7, 30, 9)


@pytest.mark.parametrize("extra", [0, 4], ids=["the tree", "and what is before it"])
@pytest.mark.parametrize("window", [0, 2, 5, 100, -4, -5, -64])
def test_every_token_sees_its_last_ancestors(window: int, extra: int) -> None:
    masks = torch.stack([tree_mask(parents, extra) for parents in PARENTS])
    seq_lens = torch.tensor(SEQ_LENS)
    found = tree_window(masks.to(check_device()), seq_lens.to(check_device()), window)
    firsts, narrowed = (x.cpu() for x in found)
    for i, seq_len in enumerate(SEQ_LENS):
        tail_start = seq_len - masks.shape[2]
        for row, (first, sees) in enumerate(zip(firsts[i].tolist(), narrowed[i].tolist())):
            in_tail = [tail_start + j for j, seen in enumerate(masks[i, row]) if seen and tail_start + j >= 0]
            branch = [*range(max(tail_start, 0)), *in_tail]
            own = len(branch) - 1
            assert first == max(own - window if window >= 0 else own // -window * -window, 0)
            assert [tail_start + j for j, seen in enumerate(sees) if seen] == [
                slot for position, slot in enumerate(branch) if position >= first and slot in in_tail
            ]
