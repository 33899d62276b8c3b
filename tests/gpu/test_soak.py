"""A few rounds of random load on the optimized panel. `diptych soak` runs more."""

from __future__ import annotations

import pytest

from diptych.shared.tools.conformance.whole_engine.soak import Soak, Tally


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
def test_rounds_hold(model: str) -> None:
    use = {"scheduler": "optimized", "memory_pool": "optimized"}
    flags = {"model": model, "device": "cuda", "panel": "optimized", "use": use, "skip_warmup": True}
    soak, total = Soak(flags), Tally()
    for seed in range(3):
        total = total.plus(soak.round(seed))
    assert total.num_requests > 60
    assert total.num_retractions > 0
    assert total.num_cut < total.num_requests / 2
