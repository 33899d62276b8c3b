"""A few rounds of random load on the optimized panel. `diptych soak` runs more."""

from __future__ import annotations

import pytest

from diptych.shared.tools.conformance.whole_engine.soak import Soak


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
def test_rounds_hold(model: str, seed: int) -> None:
    use = {"scheduler": "optimized", "memory_pool": "optimized"}
    flags = {"model": model, "device": "cuda", "panel": "optimized", "use": use, "skip_warmup": True}
    tally = Soak(flags).round(seed)
    assert tally.num_requests > 20
    assert tally.num_retractions > 0
    assert tally.num_cut < tally.num_requests * 2 / 3  # of a single round nearly half may be
