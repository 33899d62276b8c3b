"""Lockstep: what is alike is called alike, and a planted difference is found where it was planted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.shared.tools.conformance.diff.recorder import LOGITS, SAMPLED_IDS, Recorder
from diptych.shared.types import SamplingParams

from .lockstep_harness import MODEL, NUM_NEW, compare, divergence_of, engine, num_tokens, plant, prompts

# ---- what is alike ----


def test_the_reference_does_not_differ_from_itself() -> None:
    outcome = compare()
    assert outcome.divergence is None
    assert outcome.finished
    assert outcome.num_steps == (NUM_NEW, NUM_NEW)
    assert outcome.num_tokens == num_tokens(engine())
    assert outcome.num_one_sided == (0, 0)
    assert outcome.only == (set(), set())
    assert outcome.schedules_part is None
    assert {worst.ratio for worst in outcome.worst.values()} == {0.0}
    expected = {"ids", "embedding", "norm", "linear", "rotary", "attention", "elementwise"}
    assert set(outcome.worst) == expected | {"mlp", "layer", "logits"}


def test_every_layer_is_looked_at_in_the_order_of_execution() -> None:
    ops = list(compare(max_steps=1).errors)
    assert ops[:2] == ["input_ids", "embed_tokens"]
    assert ops[-3:] == ["norm", LOGITS, SAMPLED_IDS]
    attention = ["input_layernorm"] + [
        f"self_attn.{op}"
        for op in (
            "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "rotated_q", "stored_k", "stored_v",
            "attention", "o_proj",
        )
    ]  # fmt: skip
    mlp = ["post_attention_layernorm"]
    mlp += ["mlp.gate_proj", "mlp.up_proj", "mlp.act_fn", "mlp.down_proj", "mlp"]
    block = attention + mlp
    for layer in range(6):
        expected = [f"layers.{layer}.{op}" for op in block] + [f"layers.{layer}"]
        assert ops[2 + layer * len(expected) :][: len(expected)] == expected


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        pytest.param("tiny-dense", {"page_size": 16}, marks=pytest.mark.full),
        pytest.param(
            "tiny-dense", {"chunked_prefill_size": 7, "enable_mixed_chunk": True}, marks=pytest.mark.full
        ),
        ("tiny-dense", {"page_size": 4, "chunked_prefill_size": 9, "disable_radix_cache": True}),
        ("tiny-moe", {"page_size": 4, "chunked_prefill_size": 9, "enable_mixed_chunk": True}),
        ("tiny-dense", {"dtype": "bfloat16", "chunked_prefill_size": 9, "enable_mixed_chunk": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_other_pages_and_chunks_are_no_divergence(model: str, flags: dict[str, Any]) -> None:
    plain = {name: flags[name] for name in ("dtype",) if name in flags}
    outcome = compare({"model": model, **plain}, {"model": model, **flags})
    assert outcome.divergence is None
    assert outcome.finished
    # Prompts in several steps may find the beginning of an earlier prompt in the cache.
    assert outcome.num_tokens + outcome.num_one_sided[0] == num_tokens(engine())
    assert outcome.num_one_sided[1] == 0
    assert (outcome.schedules_part is not None) == ("chunked_prefill_size" in flags)
    for kind, worst in outcome.worst.items():
        assert worst.ratio <= worst.limit, kind


def test_what_one_side_found_in_its_cache_is_counted() -> None:
    alone = {"max_running_requests": 1}
    outcome = compare(alone, {**alone, "disable_radix_cache": True}, num_new=2)
    assert outcome.divergence is None
    first, second = prompts(engine())[:2]
    num_shared = next(i for i, (x, y) in enumerate(zip(first, second)) if x != y)
    assert num_shared > 4
    assert outcome.num_one_sided[0] == 0
    assert outcome.num_one_sided[1] >= num_shared


def test_mixed_types_are_held_to_the_coarser_one() -> None:
    outcome = compare({"dtype": "float32"}, {"dtype": "bfloat16"}, max_steps=1)
    assert outcome.dtype == torch.bfloat16
    assert outcome.divergence is None
    assert 1e-3 < outcome.worst["layer"].ratio < 2e-2


def test_an_engine_is_left_as_it_was() -> None:
    llm = engine()
    params = SamplingParams(max_new_tokens=4, temperature=0.0)
    before = llm.generate(prompts(llm)[0], params, progress=False)
    recorder = Recorder(llm)
    watched = llm.generate(prompts(llm)[0], params, progress=False)
    assert len(recorder.take()) == 4
    recorder.close()
    after = llm.generate(prompts(llm)[0], params, progress=False)
    assert before.output_ids == watched.output_ids == after.output_ids
    assert recorder.take() == []
    parts = llm.assembly.parts
    for target in (parts.model_runner, parts.sampler, llm.scheduler):
        assert not {"forward", "sample", "add_request"} & set(vars(target))
    for module in llm.assembly.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "add_and_norm" not in vars(module)


# ---- what is planted is found ----

ATTENTION = """
    from diptych.reference.attention import TorchAttention

    class Bad(TorchAttention):
        def plan(self, forward_batch):
            self.is_decode = forward_batch.forward_mode.is_decode
            return super().plan(forward_batch)

        def run(self, q, layer, plan, **kv):
            output = super().run(q, layer, plan, **kv)
            if layer.layer_id == 3 and self.is_decode:
                output[1, 2, 17] += 0.01
            return output
"""


@pytest.mark.parametrize("chunk", [None, 40], ids=["same-schedule", "other-schedule"])
def test_attention_that_is_wrong_in_one_layer_when_decoding(tmp_path: Path, chunk: int | None) -> None:
    outcome = compare(
        {"chunked_prefill_size": chunk}, {"use": {"attention": f"{plant(tmp_path, ATTENTION)}:Bad"}}
    )
    found = divergence_of(outcome)
    assert (found.layer, found.op, found.kind) == (3, "layers.3.self_attn.attention", "attention")
    assert found.steps == (2 if chunk is None else 3, 2)
    assert found.forward_mode == "DECODE"
    assert (found.rid, found.position) == ("prompt-1", len(prompts(engine())[1]))
    assert found.found.index == (2, 17)
    assert found.found.error == pytest.approx(0.01, rel=1e-3)
    assert found.found.num_beyond == 1
    a, b = found.tensors
    assert (a != b).sum() >= 1
    assert found.keys[found.found.row] == found.key
    assert b[found.found.row][2, 17] - a[found.found.row][2, 17] == pytest.approx(0.01, rel=1e-3)
    assert outcome.errors["layers.2"] < 1e-5 < outcome.errors[found.op]
    # The token's own errors go on after the op: that is what the report draws.
    assert found.token_errors["layers.3.self_attn.q_norm"] < 1e-5 < found.token_errors["layers.5"]


def test_attention_that_is_wrong_at_one_position_of_a_prompt(tmp_path: Path) -> None:
    code = """
        from diptych.reference.attention import TorchAttention

        class Bad(TorchAttention):
            def run(self, q, layer, plan, **kv):
                output = super().run(q, layer, plan, **kv)
                if layer.layer_id == 0 and len(q) > 4:
                    output[4] *= 1.001
                return output
    """
    found = divergence_of(compare(b={"use": {"attention": f"{plant(tmp_path, code)}:Bad"}}))
    assert (found.op, found.key, found.steps) == ("layers.0.self_attn.attention", ("prompt-0", 4), (1, 1))
    assert found.found.ratio == pytest.approx(1e-3, rel=1e-2)


def test_a_sampler_that_takes_the_second_best_once(tmp_path: Path) -> None:
    code = """
        from diptych.reference.sampler import Sampler

        class Bad(Sampler):
            num_calls = 0

            def sample(self, logits, info, positions):
                self.num_calls += 1
                output = super().sample(logits, info, positions)
                if self.num_calls == 5:
                    output.next_token_ids[2] = logits[2].topk(2).indices[1]
                return output
    """
    outcome = compare(b={"use": {"sampler": f"{plant(tmp_path, code)}:Bad"}})
    found = divergence_of(outcome)
    assert (found.op, found.steps, found.rid) == (SAMPLED_IDS, (5, 5), "prompt-2")
    assert found.position == len(prompts(engine())[2]) + 3
    assert found.found.a != found.found.b
    assert outcome.near_ties == []


def test_wrong_rope_in_one_layer(tmp_path: Path) -> None:
    body = """def __init__(self, config, layers, moe):
            super().__init__(config, layers, moe)
            attention = self.model.layers[2].self_attn
            right = attention.rotary_emb.forward
            attention.rotary_emb = layers.RotaryEmbedding(config.rope, config.head_dim, 64)
            attention.rotary_emb.forward = lambda positions, q, k: right(positions + 1, q, k)
    """
    found = divergence_of(compare(b={"use": {"models": plant(tmp_path, MODEL.format(body=body))}}))
    assert (found.op, found.kind, found.steps) == ("layers.2.self_attn.rotated_q", "rotary", (1, 1))
    assert found.key == ("prompt-0", 0)


def test_wrong_values_in_the_pool(tmp_path: Path) -> None:
    code = """
        from diptych.reference import memory_pool
        from diptych.reference.memory_pool import ReqToTokenPool, TokenToKVPoolAllocator

        class TokenToKVPool(memory_pool.TokenToKVPool):
            def store(self, layer_id, out_cache_loc, k, v):
                super().store(layer_id, out_cache_loc, k, v * 1.5 if layer_id == 4 else v)
    """
    found = divergence_of(compare(b={"use": {"memory_pool": plant(tmp_path, code)}}))
    assert found.op == "layers.4.self_attn.stored_v"
    assert found.found.b == pytest.approx(1.5 * found.found.a)


def test_a_nan_is_no_closeness(tmp_path: Path) -> None:
    code = """
        from diptych.reference.attention import TorchAttention

        class Bad(TorchAttention):
            def run(self, q, layer, plan, **kv):
                output = super().run(q, layer, plan, **kv)
                if layer.layer_id == 1:
                    output[0, 0, 5] = float("nan")
                return output
    """
    found = divergence_of(compare(b={"use": {"attention": f"{plant(tmp_path, code)}:Bad"}}))
    assert (found.op, found.found.index) == ("layers.1.self_attn.attention", (0, 5))
    assert math.isnan(found.found.b)


def test_an_exception_is_a_divergence_that_says_so(tmp_path: Path) -> None:
    code = """
        from diptych.reference.sampler import Sampler

        class Bad(Sampler):
            def sample(self, logits, info, positions):
                raise RuntimeError("no such kernel")
    """
    found = divergence_of(compare(b={"use": {"sampler": f"{plant(tmp_path, code)}:Bad"}}))
    assert found.op == "run"
    assert "B: prompt-0 ended in an error: RuntimeError: no such kernel" in found.what


def test_a_request_that_ends_otherwise(tmp_path: Path) -> None:
    code = """
        from diptych.reference.scheduler import Scheduler

        class Bad(Scheduler):
            def add_request(self, req):
                super().add_request(req)
                req.max_new_tokens -= req.rid == "prompt-1"
    """
    found = divergence_of(compare(b={"use": {"scheduler": f"{plant(tmp_path, code)}:Bad"}}))
    assert (
        f"prompt-1 ended on A with FinishLength(length={NUM_NEW}) after {NUM_NEW} tokens, on B with"
        in found.what
    )


def test_a_scheduler_that_does_nothing_is_stuck_not_waited_for(tmp_path: Path) -> None:
    code = """
        from diptych.reference.scheduler import Scheduler

        class Bad(Scheduler):
            def get_next_batch_to_run(self):
                return None
    """
    found = divergence_of(compare(b={"use": {"scheduler": f"{plant(tmp_path, code)}:Bad"}}))
    assert "B: no new token" in found.what


def test_a_strict_schedule_is_compared_first() -> None:
    flags = {"chunked_prefill_size": 40}
    assert compare(b=flags, max_steps=2).divergence is None
    found = divergence_of(compare(b=flags, strict_schedule=True))
    assert (found.op, found.steps) == ("schedule", (1, 1))
    assert "requests" in found.what


ONE_ULP = """
    from diptych.reference import memory_pool
    from diptych.reference.memory_pool import ReqToTokenPool, TokenToKVPoolAllocator

    class TokenToKVPool(memory_pool.TokenToKVPool):
        def store(self, layer_id, out_cache_loc, k, v):
            v = v.clone()
            v[0, 0, 0] *= 1 + 2**-7
            super().store(layer_id, out_cache_loc, k, v)
"""


def test_deterministic_engines_are_compared_bit_for_bit(tmp_path: Path) -> None:
    """Other chunks give equal bits. One other bit is a divergence; without the mode it is none."""
    flags = {"dtype": "bfloat16", "deterministic": True}
    outcome = compare(flags, {**flags, "chunked_prefill_size": 20}, num_new=2)
    assert outcome.divergence is None
    assert max(worst.ratio for worst in outcome.worst.values()) == 0.0
    assert {worst.limit for worst in outcome.worst.values()} == {0.0}
    one_bit = {"use": {"memory_pool": plant(tmp_path, ONE_ULP)}}
    assert divergence_of(compare(flags, {**flags, **one_bit}, num_new=2)).op == "layers.0.self_attn.stored_v"
    flags["deterministic"] = False
    outcome = compare(flags, {**flags, **one_bit}, num_new=2)
    assert outcome.divergence is None
    assert outcome.worst["logits"].ratio > 0.0
