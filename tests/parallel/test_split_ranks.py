"""Split servers of several ranks: the answers of one engine, and the same decisions on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.shared.engine.build.assembly import assemble
from tests.parallel.engine_pair import config_of, output_ids
from tests.parallel.split_ranks import cluster_of
from tests.parallel.tiny_ranks import answers, requests

SIZES = [(2, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ranks_answer_as_one_engine(folders: dict[str, str], sizes: tuple[int, int], tmp_path: Path) -> None:
    config = config_of(folders, "reference")
    expected = output_ids(answers(assemble(config)))
    with cluster_of(config, sizes, tmp_path) as cluster:
        for _ in range(2):  # the second time the decode server has most prompts
            assert cluster.answer(requests()) == expected
        cluster.finish()
