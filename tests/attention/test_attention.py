"""AttentionBackend against dense attention in float64, one request, token and head at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.types import ForwardMode
from shared.types.attention import BatchAttention

from .harness import TOLERANCE, expected_output, make_case, tree_mask

IMPLS = ["reference"]


@pytest.fixture(params=IMPLS)
def impl(request: pytest.FixtureRequest) -> str:
    return request.param


BATCHES = {
    "one token": ([1], [1]),
    "one decode": ([37], [1]),
    "decode, equal lengths": ([9, 9, 9], [1, 1, 1]),
    "decode, ragged": ([5, 1, 64, 63, 65, 2], [1] * 6),
    "decode, one request far longer": ([3, 2, 260, 4, 3], [1] * 5),
    "prompts without prefix": ([1, 7, 19], [1, 7, 19]),
    "prompts with cached prefixes": ([20, 7, 33, 17], [3, 7, 32, 1]),
    "mixed": ([40, 21, 9, 30, 5], [17, 21, 1, 1, 1]),
    "verify, chains of 3": ([12, 3, 30], [3, 3, 3]),
    "prompt longer than a block of queries": ([300], [260]),
    "a request without new tokens": ([6, 5, 8], [2, 0, 3]),
}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("batch", BATCHES)
def test_matches_dense_attention(impl: str, batch: str, page_size: int) -> None:
    make_case(impl, *BATCHES[batch], page_size=page_size).check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", ["decode, ragged", "prompts with cached prefixes"])
def test_dtypes(impl: str, batch: str, dtype: torch.dtype) -> None:
    make_case(impl, *BATCHES[batch], dtype=dtype).check()


@pytest.mark.parametrize(
    ("num_qo_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 64), (3, 3, 16), (6, 2, 80), (7, 1, 40), (5, 5, 3), (15, 3, 96), (16, 2, 128)],
)
@pytest.mark.parametrize("batch", ["decode, ragged", "prompts with cached prefixes"])
def test_heads(impl: str, batch: str, num_qo_heads: int, num_kv_heads: int, head_dim: int) -> None:
    make_case(
        impl, *BATCHES[batch], num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    ).check()


def test_query_heads_that_kv_heads_do_not_divide_are_refused(impl: str) -> None:
    case = make_case(impl, [4], [1], num_qo_heads=4, num_kv_heads=2)
    case.layer = replace(case.layer, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"4.*3"):
        case.run()


@pytest.mark.parametrize("sliding_window", [0, 1, 5, 31, 100])
@pytest.mark.parametrize(
    "batch",
    ["decode, ragged", "prompts with cached prefixes", "mixed", "prompt longer than a block of queries"],
)
def test_sliding_window_counts_the_previous_tokens(impl: str, batch: str, sliding_window: int) -> None:
    make_case(impl, *BATCHES[batch], sliding_window=sliding_window).check()


def test_slots_that_left_the_window_are_not_read(impl: str) -> None:
    """They may have been freed and hold anything; also for the later queries of a long prompt."""
    for seq_len, extend_len in ((50, 1), (200, 180)):
        case = make_case(impl, [seq_len, 9], [extend_len, 2], sliding_window=7)
        expected = expected_output(case)
        first_row = int(case.forward_batch.req_pool_indices[0])
        dead = case.req_to_token_pool.read(first_row, 0, seq_len - extend_len - 7)
        case.kv_pool.k_buffer(1)[dead] = float("nan")
        case.kv_pool.v_buffer(1)[dead] = float("nan")
        torch.testing.assert_close(case.run().double(), expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("batch", ["decode, ragged", "prompts with cached prefixes"])
@pytest.mark.parametrize("logit_cap", [0.5, 30.0])
def test_soft_cap(impl: str, batch: str, logit_cap: float) -> None:
    make_case(impl, *BATCHES[batch], logit_cap=logit_cap, scale=1.7).check()


@pytest.mark.parametrize("batch", ["decode, ragged", "mixed", "verify, chains of 3"])
def test_sinks_take_weight_and_add_no_value(impl: str, batch: str) -> None:
    make_case(impl, *BATCHES[batch], sinks=torch.tensor([-30.0, 0.3, 2.0, 12.0])).check()


@pytest.mark.parametrize("batch", ["decode, ragged", "prompts with cached prefixes"])
def test_everything_at_once(impl: str, batch: str) -> None:
    make_case(
        impl, *BATCHES[batch], page_size=4, sliding_window=6, logit_cap=2.0, sinks=torch.randn(6),
        num_qo_heads=6, num_kv_heads=2, head_dim=80, scale=0.3,
    ).check()  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 4}, {"sinks": torch.tensor([0.1, 1.0, -2.0, 3.0])}]
)
def test_tree_masks(impl: str, options: dict[str, Any]) -> None:
    """Siblings do not see each other, though both sit below the same prefix."""
    parents = [-1, 0, 0, 1, 1, 2, 5]
    prefix_lens = [11, 0, 26]
    case = make_case(
        impl,
        [n + 7 for n in prefix_lens],
        [7] * 3,
        mode=ForwardMode.TARGET_VERIFY,
        custom_masks=[tree_mask(parents, n) for n in prefix_lens],
        **options,
    )
    case.check()


def test_a_tree_that_is_a_chain_equals_the_causal_mask(impl: str) -> None:
    case = make_case(impl, [12, 20], [4, 4])
    masks = [tree_mask([-1, 0, 1, 2], n) for n in (8, 16)]
    causal = case.run()
    case.forward_batch = replace(
        case.forward_batch,
        forward_mode=ForwardMode.TARGET_VERIFY,
        custom_mask=torch.cat([mask.flatten() for mask in masks]),
    )
    torch.testing.assert_close(case.run(), causal, atol=0, rtol=0)


@pytest.mark.parametrize("extend_seq_lens", [[3, 3, 3], [2, 30, 5], [1, 0, 160]])
@pytest.mark.parametrize("sliding_window", [-1, 0, 9])
def test_arbitrary_masks_of_ragged_requests(
    impl: str, extend_seq_lens: list[int], sliding_window: int
) -> None:
    seq_lens = [14, 31, 161]
    masks = [torch.rand(e, s) < 0.3 for e, s in zip(extend_seq_lens, seq_lens)]
    make_case(impl, seq_lens, extend_seq_lens, custom_masks=masks, sliding_window=sliding_window).check()


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, 1.0, -1.0, 5.0])])
def test_a_masked_token_that_sees_nothing_gets_zeros(impl: str, sinks: torch.Tensor | None) -> None:
    masks = [torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 9, dtype=torch.bool)]
    masks[0][1] = False
    masks[1][0] = False
    case = make_case(impl, [5, 9], [2, 2], custom_masks=masks, sinks=sinks)
    case.check()
    output = case.run()
    assert not output[[1, 2]].any()
    assert output[[0, 3]].abs().amin() > 0


def test_idle_batch_gives_no_rows(impl: str) -> None:
    output = make_case(impl, [], [], mode=ForwardMode.IDLE).run()
    assert output.shape == (0, 4, 16)


@pytest.mark.parametrize("chunks", [[64], [1, 63], [13, 13, 13, 25], [1] * 64])
def test_chunks_of_a_prompt_give_what_the_whole_prompt_gives(impl: str, chunks: list[int]) -> None:
    whole = make_case(impl, [64], [64], page_size=4)
    expected = expected_output(whole)
    end = 0
    for chunk in chunks:
        start, end = end, end + chunk
        batch = whole.forward_batch
        part = replace(
            whole,
            q=whole.q[start:end],
            forward_batch=replace(
                batch,
                input_ids=batch.input_ids[start:end],
                positions=batch.positions[start:end],
                out_cache_loc=batch.out_cache_loc[start:end],
                seq_lens=torch.tensor([end]),
                extend_seq_lens=torch.tensor([chunk]),
                seq_lens_cpu=(end,),
                extend_seq_lens_cpu=(chunk,),
            ),
        )
        torch.testing.assert_close(part.run().double(), expected[start:end], **TOLERANCE[torch.float32])


def test_extreme_logits_do_not_overflow(impl: str) -> None:
    """Scores of +-1e4 are far beyond what exp() takes; the largest one wins."""
    case = make_case(impl, [6, 3], [1, 1], scale=1e4, dtype=torch.float64)
    output = case.run()
    assert torch.isfinite(output).all()
    for i, seq_len in enumerate((6, 3)):
        row = int(case.forward_batch.req_pool_indices[i])
        slots = case.req_to_token_pool.read(row, 0, seq_len)
        for h in range(4):
            best = slots[(case.kv_pool.k_buffer(1)[slots, h // 2] @ case.q[i, h]).argmax()]
            torch.testing.assert_close(output[i, h], case.kv_pool.v_buffer(1)[best, h // 2])


def test_neighbours_in_the_batch_do_not_change_a_result(impl: str) -> None:
    """A NaN in one request's KV stays with that request."""
    case = make_case(impl, [30, 12, 30], [1, 1, 1])
    healthy = case.run()
    row = int(case.forward_batch.req_pool_indices[1])
    case.kv_pool.v_buffer(1)[case.req_to_token_pool.read(row, 3, 4)] = float("nan")
    output = case.run()
    assert output[1].isnan().all()
    torch.testing.assert_close(output[[0, 2]], healthy[[0, 2]], atol=0, rtol=0)


def test_plan_and_run_mutate_nothing(impl: str) -> None:
    case = make_case(impl, [12, 9], [4, 1], sliding_window=3, sinks=torch.randn(4))
    tensors = [case.q, case.req_to_token_pool.req_to_token, case.layer.sinks]
    tensors += [case.kv_pool.k_buffer(1), case.kv_pool.v_buffer(1), case.forward_batch.seq_lens]
    before = [t.clone() for t in tensors]
    first = case.run()
    assert torch.equal(case.run(), first)
    for tensor, copy in zip(tensors, before):
        torch.testing.assert_close(tensor, copy, atol=0, rtol=0, equal_nan=True)


def test_a_long_prompt_never_has_all_its_scores_at_once(impl: str) -> None:
    """[num_qo_heads, 2048, 2048] scores would be 16.8 million; an eighth of that is enough at a time."""

    class LargestTensor(TorchDispatchMode):
        num_elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.num_elements = max(self.num_elements, result.numel())
            return result

    case = make_case(impl, [2048], [2048], head_dim=8)
    with LargestTensor() as largest:
        case.run()
    assert largest.num_elements <= 4 * 2048 * 2048 // 8


def test_one_plan_serves_layers_of_different_kinds(impl: str) -> None:
    case = make_case(impl, [40, 21], [5, 1])
    plan = case.backend.plan(case.forward_batch)
    for options in ({}, {"sliding_window": 3}, {"logit_cap": 1.0}, {"sliding_window": 30}, {}):
        part = replace(case, layer=replace(case.layer, **options))
        output = case.backend.run(case.q, part.layer, plan)
        torch.testing.assert_close(output.double(), expected_output(part), **TOLERANCE[torch.float32])


def test_store_and_run_reads_what_it_just_stored(impl: str) -> None:
    """The handle a model calls: the new tokens' K and V are in the pool before attention runs."""
    case = make_case(impl, [12, 9], [4, 1])
    batch = case.forward_batch
    attention = BatchAttention(case.backend, case.backend.plan(batch), case.kv_pool, batch.out_cache_loc)
    k, v = torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    output = attention.store_and_run(case.q, k, v, case.layer)
    assert torch.equal(case.kv_pool.k_buffer(1)[batch.out_cache_loc], k)
    torch.testing.assert_close(output.double(), expected_output(case), **TOLERANCE[torch.float32])
    assert torch.equal(attention.run(case.q, case.layer), output)
