"""Drafting from the target's hidden states: whatever the scheduler does, the draft model has read what it
should have read, and what it drafts is what it would have said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diptych.reference.speculative.eagle import EagleDrafter
from diptych.shared.config import read_config, read_draft_config
from diptych.shared.engine.llm import LLM
from diptych.shared.loading.draft_weights import dummy_draft_weights
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.tools.conformance.contracts.draft_models.forward import DraftSession
from diptych.shared.tools.conformance.oracles.model_session import ModelSession
from diptych.shared.types import DraftBatch, DraftShape, DraftTree, SamplingParams

TARGET = ASSETS / "tiny-dense"
PROMPTS = [
    "Repeat this sentence: Mara has the red kite.",
    "Count from 3 to 9.",
    "Repeat this sentence: Mara has the blue drum.",  # what it shares with the first comes from the cache
]
LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 2},
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 700, **LAYERS},
    "nextn": {"architectures": ["Qwen3ForCausalLMNextN"]},
}


@pytest.fixture(scope="module", params=HEADS)
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A format, and a folder with a draft model of random weights."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "config.json").write_text(json.dumps(HEADS[request.param]))
    config = read_draft_config(folder, read_config(TARGET))
    save_file(dict(dummy_draft_weights(config)), folder / "model.safetensors")
    return request.param, folder


def test_a_head_loads_under_the_name_of_a_plain_family(head: tuple[str, Path], tmp_path: Path) -> None:
    draft_format, folder = head
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [config["architectures"][0].partition("ForCausalLM")[0] + "ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    llm = engine((draft_format, tmp_path), DraftShape(3, 1, 4))
    assert drafter_of(llm).model.config.draft_format == draft_format


@pytest.mark.parametrize(
    ("draft_format", "what"),
    [("eagle", "an EAGLE head"), ("eagle3", "an EAGLE-3 head"), ("nextn", "a NEXTN layer")],
)
@pytest.mark.parametrize(
    ("model", "architecture"), [("tiny-dense", "Qwen3ForCausalLM"), ("tiny-moe", "Qwen3MoeForCausalLM")]
)
def test_a_language_model_is_no_head(draft_format: str, what: str, model: str, architecture: str) -> None:
    expected = rf"^{model} is a language model \({architecture}\), not {what}: it has no "
    with pytest.raises(ValueError, match=expected):
        engine((draft_format, Path(model)), DraftShape(3, 1, 4))


def engine(head: tuple[str, Path], shape: DraftShape, **flags: Any) -> LLM:
    return LLM(
        model="tiny-dense",
        panel="reference",
        device="cpu",
        max_total_tokens=1024,
        check_invariants=True,
        speculative=head[0],
        speculative_draft_model=str(head[1]),
        speculative_num_steps=shape.num_steps,
        speculative_topk=shape.top_k,
        speculative_num_draft_tokens=shape.num_draft_tokens,
        **flags,
    )


def drafter_of(llm: LLM) -> EagleDrafter:
    drafter = llm.assembly.parts.drafter
    assert isinstance(drafter, EagleDrafter)
    return drafter


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_new_tokens=10, ignore_eos=True)
    tokenizer = llm.assembly.tokenizer
    prompts = [tokenizer.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    first = llm.generate(prompts[:2], params)
    return [output.output_ids for output in (*first, *llm.generate(prompts, params))]


@pytest.fixture(scope="module")
def plain_answers() -> list[list[int]]:
    return answers(LLM(model="tiny-dense", panel="reference", device="cpu", max_total_tokens=1024))


def read_anew(drafter: EagleDrafter, ids: list[int]) -> tuple[DraftSession, Any]:
    """A fresh draft model's session that has read a text, and what it gave."""
    session = ModelSession(drafter.parts.model)
    layers = drafter.hidden_layers
    captured = dict.fromkeys(layers, torch.empty(0))
    hidden = session.hidden_states(session.forward_batch({0: ids[:-1]}), captured)
    features = torch.cat([captured[layer] for layer in layers], dim=-1) if layers else hidden
    draft_session = DraftSession(drafter.model)
    return draft_session, draft_session.draft(ids[1:], features)


CASES = (
    (DraftShape(3, 1, 4), {}),
    (DraftShape(4, 3, 12), {"chunked_prefill_size": 7}),
    pytest.param(DraftShape(3, 2, 6), {"page_size": 4, "chunked_prefill_size": 12}, marks=pytest.mark.full),
)


@pytest.mark.parametrize(("shape", "flags"), CASES, ids=lambda value: str(value))
def test_it_has_read_every_token_with_the_right_hidden_state(
    head: tuple[str, Path], shape: DraftShape, flags: dict[str, Any], plain_answers: list[list[int]]
) -> None:
    llm = engine(head, shape, **flags)
    drafter, num_calls, num_checked = drafter_of(llm), 0, 0
    drafter_draft = drafter.draft

    def checked(batch: DraftBatch, its_shape: DraftShape) -> DraftTree:
        nonlocal num_calls, num_checked
        num_calls += 1
        for req, seq_len in list(zip(batch.reqs, batch.seq_lens_cpu))[num_calls % 2 :: 2]:
            slots = drafter.req_to_token_pool.read(req.req_pool_idx, 0, seq_len)
            session, _ = read_anew(drafter, req.all_ids)
            own = session.req_to_token_pool.read(session.req_pool_indices[0], 0, seq_len)
            for layer_id in range(drafter.kv_pool.num_layers):
                for found, anew in (
                    (drafter.kv_pool.k_buffer(layer_id), session.kv_pool.k_buffer(layer_id)),
                    (drafter.kv_pool.v_buffer(layer_id), session.kv_pool.v_buffer(layer_id)),
                ):
                    # The same sums in other batches and orders: float32 rounding, through the target too.
                    torch.testing.assert_close(found[slots], anew[own], atol=1e-3, rtol=1e-3)
            num_checked += 1
        return drafter_draft(batch, its_shape)

    drafter.draft = checked  # type: ignore[method-assign]
    assert answers(llm) == plain_answers
    assert num_checked > 10
    assert drafter.last_rows == {}


@pytest.mark.parametrize(
    "shape", [pytest.param(DraftShape(3, 1, 4), marks=pytest.mark.full), DraftShape(4, 3, 12)], ids=str
)
def test_each_branch_is_drafted_as_if_alone(head: tuple[str, Path], shape: DraftShape) -> None:
    """A node's token is among the likeliest after its own ancestors: no sibling is seen, no position off."""
    llm = engine(head, shape)
    drafter, trees = drafter_of(llm), []
    drafter_draft = drafter.draft

    def recorded(batch: DraftBatch, its_shape: DraftShape) -> DraftTree:
        tree = drafter_draft(batch, its_shape)
        trees.extend((req.all_ids, i, tree) for i, req in enumerate(batch.reqs))
        return tree

    drafter.draft = recorded  # type: ignore[method-assign]
    answers(llm)
    num_compared = 0
    for ids, row, tree in trees[::11]:
        for node in range(1, shape.num_draft_tokens):
            path = []
            while node > 0:
                path.append(int(tree.token_ids[row, node]))
                node = int(tree.parents[row, node])
            *ancestors, token = path[::-1]
            session, output = read_anew(drafter, ids)
            for ancestor in ancestors:
                output = session.draft([ancestor], output.next_hidden_states[-1:])
            top = drafter._top_tokens(output.hidden_states[-1:], shape.top_k).token_ids[0].tolist()
            assert token in top
            num_compared += 1
    assert num_compared >= 9


def test_its_drafts_are_tokens(head: tuple[str, Path]) -> None:
    """Ids of the target that stand for no token are never drafted, through d2t or not."""
    llm = engine(head, DraftShape(2, 4, 8))
    drafter = drafter_of(llm)
    num_token_ids = llm.assembly.parts.num_token_ids
    assert num_token_ids < llm.assembly.model_config.vocab_size
    drafts = drafter._top_tokens(torch.randn(50, 256), 4).token_ids
    assert int(drafts.max()) < num_token_ids
    vocab_size = drafter.draft_config.model.vocab_size
    all_ids = drafter.model.to_target_ids(torch.arange(vocab_size))
    assert drafter.is_no_token is not None
    assert bool((all_ids[drafter.is_no_token] >= num_token_ids).all())


def test_memory_of_its_pool_is_known_before_it_is_made(head: tuple[str, Path]) -> None:
    drafter = drafter_of(engine(head, DraftShape(3, 1, 4)))
    assert drafter.num_kv_bytes_per_token == drafter.kv_pool.num_bytes_per_token


def test_a_draft_model_that_does_not_fit_is_refused(head: tuple[str, Path]) -> None:
    with pytest.raises(ValueError, match="made for another target"):
        LLM(
            model="tiny-moe", panel="reference", device="cpu",
            speculative="eagle3", speculative_draft_model="tiny-dense-eagle3",
        )  # fmt: skip
    other = "nextn" if head[0] != "nextn" else "eagle"
    with pytest.raises(ValueError, match=f"a draft model of format {head[0]}, not {other}"):
        engine((other, head[1]), DraftShape(3, 1, 4))


def test_a_dummy_draft_model_needs_a_config_only(head: tuple[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((head[1] / "config.json").read_text())
    llm = engine((head[0], tmp_path), DraftShape(3, 2, 6), load_format="dummy")
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert len(output.output_ids) == 4
    assert drafter_of(llm).model.d2t is None or head[0] == "eagle3"
