"""The measurement of decode attention by backend."""

from __future__ import annotations

import pytest
import torch

from diptych.shared.tools.bench.attention_cost import DecodeCase, decode_batch, main, measure
from diptych.shared.types import ForwardMode


def test_a_batch_and_its_bytes() -> None:
    case = DecodeCase(3, 100)
    assert case.num_bytes == 3 * 100 * 2 * 8 * 128 * 2  # K and V, bfloat16
    batch = decode_batch(case, ForwardMode.EXTEND, torch.device("cpu"))
    assert batch.seq_lens.tolist() == [100] * 3
    assert batch.positions.tolist() == [99] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_needs_a_gpu() -> None:
    with pytest.raises(SystemExit, match="on a CUDA GPU"):
        main([])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "deterministic"])
def test_it_measures(name: str) -> None:
    assert measure(DecodeCase(2, 600), name, ForwardMode.DECODE) > 0
