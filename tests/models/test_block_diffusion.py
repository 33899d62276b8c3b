"""Block diffusion against a plain loop over transformers' model: all tokens anew in each pass, no KV."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import random_hf_model
from transformers import PreTrainedModel

import diptych.optimized.modes.block_diffusion as optimized
import diptych.reference.modes.block_diffusion as reference
from diptych.shared import registry
from diptych.shared.config import EngineConfig
from diptych.shared.engine.llm import LLM
from diptych.shared.sampling.noise import gumbel_noise
from diptych.shared.tools.conformance.oracles.chi_square import ALPHA, independence_p_value, p_value
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.tools.conformance.oracles.sampling_oracle import exact_distribution
from diptych.shared.types import (
    DiffusionParams,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
    Req,
    SamplingParams,
)
from tests.planted import Bug, Bugs

MASK = 330
NUM_NEW = 14
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
HOT = GREEDY.updated(temperature=1.0, seed=2**40 + 7)
PANELS: dict[str, dict[str, Any]] = {
    "reference": {"panel": "reference"},
    "optimized": {"panel": "reference", "use": registry.optimized_without_gpu()},  # but for Triton's kernels
    "interpreted": {"panel": "optimized"},
}
FLAGS: dict[str, Any] = {"device": "cpu", "max_total_tokens": 256, "page_size": 4, "check_invariants": True}
both = pytest.mark.parametrize("panel", ["reference", "optimized"])
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


def likeliest(logits: torch.Tensor, sampling: SamplingParams, position: int) -> tuple[int, float]:
    probs = logits.softmax(-1)
    return int(probs.argmax()), float(probs.max())


def sampled(logits: torch.Tensor, sampling: SamplingParams, position: int) -> tuple[int, float]:
    """By the sampler's contract, joint filters; and the token's probability before them."""
    probs = (logits.double() / sampling.temperature).softmax(-1)
    ordered, ids = probs.sort(descending=True, stable=True)
    kept = (ordered.cumsum(-1) - ordered < sampling.top_p) & (ordered >= sampling.min_p * ordered[0])
    kept &= torch.arange(len(ids)) < (sampling.top_k if sampling.top_k > 0 else len(ids))
    assert sampling.seed is not None
    noise = gumbel_noise(torch.tensor(sampling.seed), torch.tensor(position - 1), ids)
    token = int(ids[(ordered.log() + noise).masked_fill(~kept, -torch.inf).argmax()])
    return token, float(probs[token])


def plain_loop(
    model: PreTrainedModel, prompt: list[int], params: DiffusionParams, sampling: SamplingParams = GREEDY
) -> list[int]:
    """The tokens by their definition."""
    size, num_new = params.block_len, sampling.max_new_tokens
    choose = likeliest if sampling.is_greedy else sampled
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
            unknown = [i for i in range(size) if ids[start + i] == params.mask_id]
            found = {i: choose(logits[i], sampling, start + i) for i in unknown}
            best = max(unknown, key=lambda i: found[i][1])
            for i, (token, prob) in found.items():
                if i == best or prob > params.threshold:
                    ids[start + i] = token
    return ids[len(prompt) : len(prompt) + num_new]


Asked = tuple[int, DiffusionParams | None, SamplingParams]
"""A request: the length of the prompt, and how it is answered."""


def engine(folder: Path, panel: str, **flags: Any) -> LLM:
    return LLM(str(folder), **{**FLAGS, **PANELS[panel], **flags})


def answers(llm: LLM, *requests: Asked) -> list[list[int]]:
    """Answers of requests that run together."""
    found = [llm.submit(prompt_of(n), sampling, diffusion=how)[0] for n, how, sampling in requests]
    while llm.step():
        pass
    return [collector.output_ids for collector in found]


BUG_REQUESTS: list[Asked] = [(9, PARAMS, GREEDY), (9, PARAMS, HOT), (22, PARAMS, HOT.updated(seed=5))]
REQUESTS: list[Asked] = [
    (9, PARAMS, GREEDY),
    (8, DiffusionParams(MASK, 2, 0.95), GREEDY),
    (21, None, GREEDY),
    (21, PARAMS, HOT),
    (3, DiffusionParams(MASK, 4, 0.2), HOT.updated(top_k=20, top_p=0.9, min_p=0.05, temperature=0.7)),
    (21, PARAMS, HOT.updated(seed=-6)),
]


@both
@pytest.mark.parametrize("flags", [{}, {"chunked_prefill_size": 8, "page_size": 8}])
def test_tokens_are_those_of_a_plain_loop(
    model: PreTrainedModel, folder: Path, panel: str, flags: dict[str, Any]
) -> None:
    """Beside plain requests and others with other blocks, cold and warm; and alone."""
    llm = engine(folder, panel, **flags)
    plain = answers(llm, (21, None, GREEDY))[0]
    expected = [plain if how is None else plain_loop(model, prompt_of(n), how, s) for n, how, s in REQUESTS]
    for _ in range(2):
        assert answers(llm, *REQUESTS) == expected
    assert [answers(llm, request)[0] for request in REQUESTS] == expected
    allocator = llm.assembly.parts.allocator
    assert llm.flush_cache()
    assert allocator.available_size() == allocator.size


def test_kernels_give_the_same_tokens(model: PreTrainedModel, folder: Path) -> None:
    """In Triton's interpreter."""
    requests = [(n, how, s.updated(max_new_tokens=6)) for n, how, s in REQUESTS[:1] + REQUESTS[4:]]
    expected = [plain_loop(model, prompt_of(n), how, s) for n, how, s in requests if how is not None]
    assert answers(engine(folder, "interpreted", cuda_graph_block_len=4), *requests) == expected


def test_windows_ask_for_positions(tmp_path: Path) -> None:
    random_hf_model(CONFIGS["mistral-window"]).save_pretrained(tmp_path)
    params = DiffusionParams(7, 4, 0.5)
    found = []
    for panel in ("reference", "optimized"):
        llm = engine(tmp_path, panel)
        prompt = [i % 90 + 10 for i in range(30)]
        found.append(llm.generate(prompt, GREEDY, diffusion=params, progress=False).output_ids)
    assert found[0] == found[1]


@both
def test_kv_of_blocks_is_reused_by_requests_with_these_blocks(
    model: PreTrainedModel, folder: Path, panel: str
) -> None:
    llm = engine(folder, panel)
    whole = [*prompt_of(9), *answers(llm, REQUESTS[0])[0]]
    for params, num_cached in ((PARAMS, 20), (DiffusionParams(MASK, 2, 0.5), 0), (None, 0)):
        collector = llm.submit(whole, GREEDY, diffusion=params)[0]
        while llm.step():
            pass
        assert collector.num_cached_tokens == num_cached
        if params is not None:
            assert collector.output_ids == plain_loop(model, whole, params)


@both
def test_retraction_and_a_small_pool(model: PreTrainedModel, folder: Path, panel: str) -> None:
    """Three requests of 32 slots in a pool of 48, and one that is retracted by hand."""
    llm = engine(folder, panel, max_total_tokens=48)
    requests: list[Asked] = [(18, PARAMS, HOT), (17, PARAMS, GREEDY), (16, None, GREEDY)]
    expected = [plain_loop(model, prompt_of(n), PARAMS, sampling) for n, _, sampling in requests[:2]]
    assert answers(llm, *requests)[:2] == expected
    collector = llm.submit(prompt_of(18), HOT, diffusion=PARAMS)[0]
    for _ in range(3):
        llm.step()
    assert 0 < len(collector.output_ids) < NUM_NEW
    assert llm.scheduler.retract(collector.rid)
    while llm.step():
        pass
    assert collector.output_ids == expected[0]


@both
def test_an_answer_ends_inside_a_block(model: PreTrainedModel, folder: Path, panel: str) -> None:
    llm = engine(folder, panel, max_total_tokens=64)
    tokens = plain_loop(model, prompt_of(9), PARAMS)
    stop = tokens[5]
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, stop_token_ids=(stop,))
    output = llm.generate(prompt_of(9), params, diffusion=PARAMS, progress=False)
    assert output.output_ids == tokens[: tokens.index(stop) + 1]
    params = GREEDY.updated(max_new_tokens=1000)
    longest = llm.generate(prompt_of(9), params, diffusion=PARAMS, progress=False)
    assert len(longest.output_ids) == 64 - 9  # to the end of the pool's last block


@both
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_nan_ends_the_request(folder: Path, panel: str, sampling: SamplingParams) -> None:
    llm = engine(folder, panel)
    collector = llm.submit(prompt_of(9), sampling, diffusion=PARAMS)[0]
    llm.step()
    llm.assembly.model.model.norm.weight.fill_(torch.nan)
    while llm.step():
        pass
    assert "NaN" in str(collector.finish_reason)


@both
def test_a_failed_pass_ends_its_requests_alone(
    model: PreTrainedModel, folder: Path, panel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(folder, panel)
    collectors = [llm.submit(prompt_of(n), s, diffusion=how)[0] for n, how, s in REQUESTS[:3]]
    llm.step()
    with monkeypatch.context() as patch:
        patch.setattr(llm.scheduler.decoding, "_candidates", None)
        while llm.step():
            pass
    assert all("TypeError" in str(collector.finish_reason) for collector in collectors)
    assert answers(llm, REQUESTS[0]) == [plain_loop(model, prompt_of(9), PARAMS)]


@pytest.mark.parametrize(
    ("panel", "fields"),
    [
        ("optimized", {"temperature": 1.5, "top_k": 6, "top_p": 0.95, "min_p": 0.05}),
        pytest.param("optimized", {}, marks=pytest.mark.full),
        pytest.param("reference", {"top_k": 4, "top_p": 0.9, "min_p": 0.1}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_sampled_tokens_follow_the_models_distribution(
    folder: Path, panel: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where logits do not depend on other tokens, each place has the distribution of plain sampling: whether
    a token is filled in early or late depends on its noise, which stays. 1,000 seeds."""
    llm = engine(folder, panel, max_total_tokens=40_000, check_invariants=False)
    logits = torch.full((4, 400), -torch.inf)
    logits[:, :8] = 0.7 * torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    run = llm.assembly.parts.model_runner.forward

    def fixed(batch: ForwardBatch) -> LogitsOutput:
        is_prompt = batch.forward_mode is not ForwardMode.TARGET_VERIFY
        return run(batch) if is_prompt else LogitsOutput(logits[batch.positions % 4], None, None)

    monkeypatch.setattr(llm.assembly.parts.model_runner, "forward", fixed)
    sampling = HOT.updated(max_new_tokens=4, **fields)
    seeds = [sampling.updated(seed=seed) for seed in range(1000)]
    outputs = llm.generate([[5, 6, 7, 8]] * 1000, seeds, diffusion=PARAMS, progress=False)
    ids = torch.tensor([output.output_ids for output in outputs])
    for i in range(4):
        expected = exact_distribution(logits[i, :8].tolist(), Req("", [0], sampling, 0))
        assert p_value(ids[:, i], expected) > ALPHA
    assert independence_p_value(ids[:, 0], ids[:, 1], 8) > ALPHA


def no_last_pass(run: Any) -> Any:
    def planted(self: Any, reqs: Any, blocks: Any) -> Any:
        """The KV of a block is that of its last masks."""
        if isinstance(blocks, list):
            return run(self, reqs, [ids if MASK in ids else torch.full_like(ids, MASK) for ids in blocks])
        is_open = (blocks.ids == MASK).any(dim=1, keepdim=True)
        return run(self, reqs, blocks._replace(ids=blocks.ids.where(is_open, MASK)))

    return planted


def causal(reqs: Any, seq_lens: Any, lens: Any, device: Any) -> torch.Tensor:
    """A token of a block does not see those behind it."""
    masks = [torch.ones(n, s, dtype=torch.bool).tril(s - n) for s, n in zip(seq_lens, lens)]
    return torch.cat([mask.flatten() for mask in masks])


def with_probs(decoding: Any, change: Any) -> Any:
    def planted(self: Any, *given: Any) -> Any:
        """The threshold compares with another number."""
        tokens, probs = decoding_candidates(self, *given)
        return tokens, change(probs)

    decoding_candidates = decoding._candidates
    return planted


BUGS = Bugs("block diffusion", finder="plain_loop")
for _panel in (reference, optimized):
    _name = _panel.__name__.split(".")[1]
    _decoding = f"{_panel.__name__}.DiffusionDecoding"
    for _bug, _where, _plant in (
        ("no last pass", "_forward", no_last_pass(_panel.DiffusionDecoding._forward)),
        ("the least probable first", "_candidates", with_probs(_panel.DiffusionDecoding, lambda p: 1 - p)),
        ("roots against the threshold", "_candidates", with_probs(_panel.DiffusionDecoding, torch.sqrt)),
    ):
        BUGS.add(f"{_bug}, {_name}", _plant, where=f"{_decoding}.{_where}")
    BUGS.add(f"causal prompts, {_name}", causal, where=f"diptych.{_name}.schedule_batch.visible_in_blocks")
BUGS.add("causal blocks, reference", causal, where=f"{reference.__name__}.visible_in_blocks")
for _name, _bug, _before, _after in (
    ("optimized", "causal blocks", "block_len, dtype=torch.bool, device=device)", "block_len).bool().tril()"),
    ("optimized", "noise of the row", "blocks.positions.flatten() - 1", "torch.arange(n * block_len)"),
    ("reference", "noise of the row", "torch.arange(start - 1, end - 1", "torch.arange(0, end - start"),
    ("optimized", "noise of the next token", "blocks.positions.flatten() - 1", "blocks.positions.flatten()"),
    ("reference", "noise of the next token", "torch.arange(start - 1, end - 1", "torch.arange(start, end"),
    ("optimized", "seeds of the first blocks", "info, blocks.numbers.repeat", "info, torch.arange(n).repeat"),
    ("optimized", "slots", "at(unknown)", "at(unknown)._replace(slots=left.slots[: len(unknown)])"),
):  # fmt: skip
    _module = f"{_name}.modes.block_diffusion"
    BUGS.words(
        f"{_bug}, {_name}",
        f"{_module}:serve_blocks",
        (_module, _before, _after),
        where=f"diptych.{_module}.serve_blocks",
    )


@BUGS.found_by(RuntimeError)
def test_planted_bugs_are_found(
    bug: Bug, model: PreTrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    bug.plant_in(monkeypatch)
    panel = "optimized" if "optimized" in bug.name else "reference"
    found = answers(engine(folder, panel, check_invariants=False), *BUG_REQUESTS)
    return found != [plain_loop(model, prompt_of(n), PARAMS, sampling) for n, _, sampling in BUG_REQUESTS]


@both
def test_refusals(folder: Path, panel: str) -> None:
    llm = engine(folder, panel)
    for params, sampling, message in (
        (DiffusionParams(MASK, 8), GREEDY, r"page_size \(4\) must be a multiple of block_len \(8\)"),
        (DiffusionParams(7), GREEDY, r"the prompt has the mask token \(7\)"),
        (DiffusionParams(331), GREEDY, r"mask_id \(331\) must be below"),
        (PARAMS, GREEDY.updated(return_logprob=True), "do not support return_logprob"),
        (PARAMS, HOT.updated(presence_penalty=0.5), "do not support presence_penalty"),
        (PARAMS, HOT.updated(regex="a*"), "do not support regex"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.submit(prompt_of(9), sampling, diffusion=params)
    with pytest.raises(ValueError, match="no room for a block of 4"):
        engine(folder, panel, context_len=30).submit(prompt_of(29), GREEDY, diffusion=PARAMS)
    with pytest.raises(ValueError, match="no logit_processor"):
        llm.submit(prompt_of(9), GREEDY, diffusion=PARAMS, logit_processor=lambda *_: None)
    for wrong in ({"mask_id": -1}, {"mask_id": 1, "block_len": 0}, {"mask_id": 1, "threshold": 1.5}):
        with pytest.raises(ValueError, match="must be"):
            DiffusionParams(**wrong)
    full_gpu = engine(folder, panel)
    object.__setattr__(full_gpu.assembly, "memory", replace(full_gpu.assembly.memory, total=1))
    with pytest.raises(ValueError, match="masks of block diffusion need up to"):
        full_gpu.submit(prompt_of(9), GREEDY, diffusion=PARAMS)
    mixed = engine(folder, panel, enable_mixed_chunk=True)
    with pytest.raises(ValueError, match="without enable_mixed_chunk"):
        mixed.submit(prompt_of(9), GREEDY, diffusion=PARAMS)


@pytest.mark.parametrize(
    "flags",
    [
        {"tp": 2}, {"pp": 2}, {"dp": 2}, {"deterministic": True}, {"enable_mixed_chunk": True},
        {"hicache_tokens": 64}, {"disaggregation": True}, {"speculative": "ngram"}, {"page_size": 6},
    ],
    ids=str,
)  # fmt: skip
def test_graphs_that_no_request_could_use_are_refused(flags: dict[str, Any]) -> None:
    EngineConfig(cuda_graph_block_len=4, page_size=16)
    with pytest.raises(ValueError, match="cuda_graph_block_len"):
        EngineConfig(cuda_graph_block_len=4, **{"page_size": 16, **flags})


def test_at_least_one_token_is_filled_in_and_known_ones_stay() -> None:
    tokens, probs = torch.tensor([0, 1, 1, 2]), torch.tensor([0.99, 0.99, 0.3, 0.4])
    for ids, expected in (([3, 0, 3, 3], [0, 0, 3, 3]), ([0, 0, 3, 3], [0, 0, 3, 2])):
        assert reference.fill_in(torch.tensor(ids), tokens, probs, 3, 0.95).tolist() == expected
    ids = torch.tensor([[3, 0, 3, 3], [0, 0, 3, 3], [3, 3, 3, 3]])
    given = tokens.expand(3, 4), probs.expand(3, 4), torch.tensor([[3], [3], [3]])
    found = optimized.fill_in(ids, *given, torch.tensor([[0.95], [0.95], [0.35]]))
    assert found.tolist() == [[0, 0, 3, 3], [0, 0, 3, 2], [0, 1, 3, 2]]
