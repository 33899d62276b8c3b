"""Which part of each weight a rank has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diptych.shared.config import ModelConfig, read_config
from diptych.shared.loading.shards import VOCABULARY, Shards, shard_config
from diptych.shared.loading.weight_names import expected_shapes
from diptych.shared.loading.weights import dummy_weights, iterate_weights
from diptych.shared.modeling.vocabulary import vocabulary_rows

ASSETS = Path(__file__).parents[2] / "shared" / "assets"


def config(name: str = "tiny-dense", **changes: object) -> ModelConfig:
    return replace(read_config(ASSETS / name), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_parts_of_all_ranks_are_the_whole(name: str, size: int) -> None:
    whole = config(name, qkv_bias=True, o_bias=True)
    local_shapes = expected_shapes(shard_config(whole, size))
    shards = [Shards(whole, rank, size) for rank in range(size)]
    for weight, shape in expected_shapes(whole).items():
        tensor = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
        parts = [each.cut(weight, tensor) for each in shards]
        if weight in VOCABULARY:
            assert torch.equal(torch.cat(parts), tensor)
            continue
        assert {tuple(part.shape) for part in parts} == {local_shapes[weight]}
        if weight.endswith("o_proj.bias"):
            assert torch.equal(sum(parts[1:], parts[0]), tensor)
        elif local_shapes[weight] == shape:
            assert all(torch.equal(part, tensor) for part in parts)
        else:
            assert set(torch.cat([part.flatten() for part in parts]).tolist()) == set(
                tensor.flatten().tolist()
            )


def test_neighbours_share_a_kv_head_where_there_are_fewer() -> None:
    whole = config(num_qo_heads=8, num_kv_heads=2, head_dim=4)
    rows = torch.arange(8).view(8, 1).expand(8, whole.hidden_size)
    parts = [
        Shards(whole, rank, 4).cut("model.layers.0.self_attn.k_proj.weight", rows)[:, 0].tolist()
        for rank in range(4)
    ]
    assert parts == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]


@pytest.mark.parametrize(("vocab_size", "size"), [(10, 3), (131, 4), (5, 2), (64, 64)])
def test_rows_of_the_vocabulary(vocab_size: int, size: int) -> None:
    rows = [vocabulary_rows(vocab_size, rank, size) for rank in range(size)]
    assert [i for each in rows for i in range(each.start, each.stop)] == list(range(vocab_size))
    assert {each.stop - each.start for each in rows[:-1]} == {-(-vocab_size // size)}


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"num_qo_heads": 6, "num_kv_heads": 2}, 4, "num_qo_heads \\(6\\)"),
        ({"num_qo_heads": 12, "num_kv_heads": 6}, 4, "num_kv_heads is 6"),
        ({"intermediate_size": 257}, 2, "intermediate_size \\(257\\)"),
        ({"vocab_size": 5}, 4, "a vocabulary of 5"),
    ],
)
def test_sizes_that_cannot_be_divided(changes: dict[str, int], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_config(config(**changes), size)


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe"])
def test_a_checkpoint_is_read_in_parts(name: str) -> None:
    whole = dict(iterate_weights(ASSETS / name))
    shards = Shards(config(name), 1, 2)
    parts = dict(iterate_weights(ASSETS / name, shards=shards))
    assert parts.keys() == whole.keys()
    for weight, part in parts.items():
        assert torch.equal(part, shards.cut(weight, whole[weight])), weight
    assert sum(part.numel() for part in parts.values()) < 0.6 * sum(each.numel() for each in whole.values())


def test_made_up_weights_do_not_depend_on_the_number_of_ranks() -> None:
    whole, shards = config("tiny-moe"), Shards(config("tiny-moe"), 0, 2)
    for (name, tensor), (_, part) in zip(dummy_weights(whole), dummy_weights(whole, shards=shards)):
        assert torch.equal(part, shards.cut(name, tensor))


def test_a_bias_behind_the_sum_over_ranks_is_added_once() -> None:
    """By one of the ranks that have parts of the weight: with ep, experts are whole elsewhere."""
    moe = config("tiny-moe")
    assert moe.moe is not None
    whole = replace(moe, o_bias=True, moe=replace(moe.moe, bias=True))

    def added(name: str, size: int, ep: int) -> list[bool]:
        bias = torch.ones(whole.hidden_size)
        return [bool(Shards(whole, rank, size, ep).cut(name, bias).any()) for rank in range(size)]

    expert, output = "model.layers.0.mlp.experts.0.down_proj.bias", "model.layers.0.self_attn.o_proj.bias"
    assert added(expert, 4, 1) == added(output, 4, 1) == added(output, 4, 2) == [True, False, False, False]
    assert added(expert, 4, 2) == [True, False, True, False]
    assert added(expert, 4, 4) == [True] * 4
