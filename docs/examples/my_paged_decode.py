"""A paged decode kernel, and the class that makes it an attention backend. Check it:

diptych check attention docs/examples/my_paged_decode.py:MyAttention

A kernel for GPUs is called in the same way: replace `paged_decode`, and run the check where the GPU is.
"""

from __future__ import annotations

import torch

from diptych.shared.modeling.paged_decode import PagedDecodeAttention


# --8<-- [start:paged-decode]
def paged_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_table: torch.Tensor, lens: torch.Tensor
) -> torch.Tensor:
    output = torch.empty_like(q)
    for row in range(len(q)):
        # All tokens of the row's pages, cut after the last one that the row sees.
        keys, values = (x[page_table[row]].flatten(0, 1)[: lens[row]].float() for x in (k, v))
        group_size = q.shape[1] // k.shape[2]
        keys, values = (x.repeat_interleave(group_size, dim=1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", q[row].float(), keys) * q.shape[2] ** -0.5
        output[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
    return output


class MyAttention(PagedDecodeAttention):
    paged_decode = staticmethod(paged_decode)


# --8<-- [end:paged-decode]
