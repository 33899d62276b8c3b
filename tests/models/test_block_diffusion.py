"""Block diffusion against a plain loop over transformers' model: all tokens anew in each pass, no KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import random_hf_model
from transformers import PreTrainedModel

from diptych.reference.modes.block_diffusion import DiffusionDecoding, fill_in
from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.types import MIN_TEMPERATURE, DiffusionParams, SamplingParams
from tests.planted import Bug, Bugs

MASK = 330
NUM_NEW = 14
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
FLAGS: dict[str, Any] = {"panel": "reference", "device": "cpu", "max_total_tokens": 256, "page_size": 4}
PARAMS = DiffusionParams(MASK, 4, 0.5)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_hf_model(CONFIGS["llama-llama3"])


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion")
    model.save_pretrained(folder)
    return folder


def prompt_of(num_tokens: int) -> list[int]:
    return [(7 * i) % 300 for i in range(num_tokens)]


def plain_loop(
    model: PreTrainedModel, prompt: list[int], params: DiffusionParams, num_new: int = NUM_NEW
) -> list[int]:
    """The tokens by their definition."""
    size = params.block_len
    num_blocks = -(-(len(prompt) + num_new) // size)
    ids = [*prompt, *[params.mask_id] * (num_blocks * size - len(prompt))]
    for start in range(len(prompt) // size * size, len(ids), size):
        block = torch.arange(start + size) // size
        mask = torch.where(block[None, :] <= block[:, None], 0.0, -torch.inf)[None, None]
        while params.mask_id in ids[start : start + size]:
            with torch.inference_mode():
                logits = model(torch.tensor([ids[: start + size]]), attention_mask=mask).logits[0, start:]
            logits = logits.clone()
            logits[:, params.mask_id] = -torch.inf
            probs, tokens = logits.softmax(-1).max(-1)
            unknown = [i for i in range(size) if ids[start + i] == params.mask_id]
            best = max(unknown, key=lambda i: float(probs[i]))
            for i in unknown:
                if i == best or probs[i] > params.threshold:
                    ids[start + i] = int(tokens[i])
    return ids[len(prompt) : len(prompt) + num_new]


def answers(llm: LLM, *requests: tuple[int, DiffusionParams | None]) -> list[list[int]]:
    """Answers of requests that run together: (length of the prompt, how)."""
    found = [llm.submit(prompt_of(num), GREEDY, diffusion=params)[0] for num, params in requests]
    while llm.step():
        pass
    return [collector.output_ids for collector in found]


@pytest.mark.parametrize("flags", [{}, {"chunked_prefill_size": 8, "page_size": 8}])
def test_tokens_are_those_of_a_plain_loop(
    model: PreTrainedModel, folder: Path, flags: dict[str, Any]
) -> None:
    """Beside plain requests and others with other blocks, cold and warm."""
    requests = [(9, PARAMS), (8, DiffusionParams(MASK, 2, 0.95)), (21, None), (21, PARAMS), (3, PARAMS)]
    llm = LLM(str(folder), check_invariants=True, **{**FLAGS, **flags})
    plain = answers(llm, (21, None))[0]
    expected = [plain if how is None else plain_loop(model, prompt_of(n), how) for n, how in requests]
    for _ in range(2):
        assert answers(llm, *requests) == expected
    allocator = llm.assembly.parts.allocator
    assert llm.flush_cache()
    assert allocator.available_size() == allocator.size


def test_kv_of_blocks_is_reused_by_requests_with_these_blocks(model: PreTrainedModel, folder: Path) -> None:
    llm = LLM(str(folder), check_invariants=True, **FLAGS)
    whole = [*prompt_of(9), *answers(llm, (9, PARAMS))[0]]
    for params, num_cached in ((PARAMS, 20), (DiffusionParams(MASK, 2, 0.5), 0), (None, 0)):
        collector = llm.submit(whole, GREEDY, diffusion=params)[0]
        while llm.step():
            pass
        assert collector.num_cached_tokens == num_cached
        if params is not None:
            assert collector.output_ids == plain_loop(model, whole, params)


def test_retraction_and_a_small_pool(model: PreTrainedModel, folder: Path) -> None:
    """Three requests of 32 slots in a pool of 48, and one that is retracted by hand."""
    llm = LLM(str(folder), check_invariants=True, **{**FLAGS, "max_total_tokens": 48})
    requests = [(18, PARAMS), (17, PARAMS), (16, None)]
    expected = [plain_loop(model, prompt_of(n), PARAMS) for n, _ in requests[:2]]
    assert answers(llm, *requests)[:2] == expected
    collector = llm.submit(prompt_of(18), GREEDY, diffusion=PARAMS)[0]
    for _ in range(3):
        llm.step()
    assert 0 < len(collector.output_ids) < NUM_NEW
    assert llm.scheduler.retract(collector.rid)
    while llm.step():
        pass
    assert collector.output_ids == expected[0]


def test_an_answer_ends_inside_a_block(model: PreTrainedModel, folder: Path) -> None:
    llm = LLM(str(folder), check_invariants=True, **FLAGS)
    tokens = plain_loop(model, prompt_of(9), PARAMS)
    stop = tokens[5]
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, stop_token_ids=(stop,))
    output = llm.generate(prompt_of(9), params, diffusion=PARAMS, progress=False)
    assert output.output_ids == tokens[: tokens.index(stop) + 1]
    params = GREEDY.updated(max_new_tokens=1000)
    longest = llm.generate(prompt_of(9), params, diffusion=PARAMS, progress=False)
    assert len(longest.output_ids) == 256 - 9  # to the end of the pool's last block


def test_nan_ends_the_request(folder: Path) -> None:
    llm = LLM(str(folder), check_invariants=True, **FLAGS)
    collector = llm.submit(prompt_of(9), GREEDY, diffusion=PARAMS)[0]
    llm.step()
    llm.assembly.model.model.norm.weight.fill_(torch.nan)
    while llm.step():
        pass
    assert "NaN" in str(collector.finish_reason)


def no_last_pass(self: Any, reqs: Any, blocks: Any, run: Any = DiffusionDecoding._forward) -> Any:
    """The KV of a block is that of its last masks."""
    unknown = [ids if MASK in ids else torch.full_like(ids, MASK) for ids in blocks]
    return run(self, reqs, unknown)


def causal(reqs: Any, seq_lens: Any, lens: Any, device: Any) -> torch.Tensor:
    """A token of a block does not see those behind it."""
    masks = [torch.ones(n, s, dtype=torch.bool).tril(s - n) for s, n in zip(seq_lens, lens)]
    return torch.cat([mask.flatten() for mask in masks])


BUGS = Bugs("block diffusion", finder="plain_loop")
for _name, _where, _bug in (
    ("no last pass", f"{DiffusionDecoding.__module__}.DiffusionDecoding._forward", no_last_pass),
    ("causal prompts", "diptych.reference.schedule_batch.visible_in_blocks", causal),
    ("causal blocks", "diptych.reference.modes.block_diffusion.visible_in_blocks", causal),
):
    BUGS.add(_name, _bug, where=_where)


@BUGS.found_by()
def test_planted_bugs_are_found(
    bug: Bug, model: PreTrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    bug.plant_in(monkeypatch)
    found = answers(LLM(str(folder), **FLAGS), (9, PARAMS))[0]
    return found != plain_loop(model, prompt_of(9), PARAMS)


def test_refusals(folder: Path) -> None:
    llm = LLM(str(folder), **FLAGS)
    for params, sampling, message in (
        (DiffusionParams(MASK, 8), GREEDY, r"page_size \(4\) must be a multiple of block_len \(8\)"),
        (DiffusionParams(7), GREEDY, r"the prompt has the mask token \(7\)"),
        (DiffusionParams(331), GREEDY, r"mask_id \(331\) must be below"),
        (PARAMS, GREEDY.updated(temperature=0.5), "temperature must be 0, got 0.5"),
        (PARAMS, GREEDY.updated(temperature=MIN_TEMPERATURE), "temperature must be 0, got 1e-06"),
        (PARAMS, GREEDY.updated(return_logprob=True), "do not support return_logprob"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.submit(prompt_of(9), sampling, diffusion=params)
    with pytest.raises(ValueError, match="no room for a block of 4"):
        LLM(str(folder), context_len=30, **FLAGS).submit(prompt_of(29), GREEDY, diffusion=PARAMS)
    with pytest.raises(ValueError, match="no logit_processor"):
        llm.submit(prompt_of(9), GREEDY, diffusion=PARAMS, logit_processor=lambda *_: None)
    for wrong in ({"mask_id": -1}, {"mask_id": 1, "block_len": 0}, {"mask_id": 1, "threshold": 1.5}):
        with pytest.raises(ValueError, match="must be"):
            DiffusionParams(**wrong)
    mixed = LLM(str(folder), enable_mixed_chunk=True, **FLAGS)
    with pytest.raises(ValueError, match="without enable_mixed_chunk"):
        mixed.submit(prompt_of(9), GREEDY, diffusion=PARAMS)


def test_at_least_one_token_is_filled_in_and_known_ones_stay() -> None:
    params = DiffusionParams(mask_id=3, block_len=4, threshold=0.95)
    logits = torch.tensor([[9.0, 0, 0, 99], [0, 9, 0, 0], [0, 0.1, 0, 0], [0, 0, 0.2, 0]])
    mask = torch.tensor([3, 0, 3, 3])
    assert fill_in(mask, logits, params).tolist() == [0, 0, 3, 3]
    assert fill_in(torch.tensor([0, 0, 3, 3]), logits, params).tolist() == [0, 0, 3, 2]
