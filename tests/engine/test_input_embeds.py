"""Prompts of rows: transformers' answers to `inputs_embeds`, whatever is cached, chunked or beside them."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from diptych.shared.config import EngineConfig
from diptych.shared.engine.llm import LLM
from diptych.shared.engine.requests import input_embeds
from diptych.shared.engine.requests.input_embeds import check_supported, rows_of_bytes
from diptych.shared.scheduling.select_embeds import embeds_of_step
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.types import PromptEmbeds, Req, SamplingParams
from tests.models.model_harness import random_hf_model
from tests.planted import Bug, Bugs

CONFIG = "qwen3-layer-types"
NUM_NEW = 6
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, return_logprob=True)
WHOLE: dict[str, Any] = {}
CHUNKED = {"chunked_prefill_size": 7, "enable_mixed_chunk": True, "page_size": 4}
ON_GPU = {"device": "cuda", "panel": "optimized", "use": {"attention": "triton"}, "skip_warmup": True}
AHEAD = dict.fromkeys(
    ("scheduler", "model_runner", "radix_cache", "prefill_adder", "schedule_policy"), "optimized"
)

Answer = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_hf_model(CONFIGS[CONFIG])


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embeds")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(model: PreTrainedModel) -> list[torch.Tensor]:
    """No row is the embedding of a token. The second prompt begins as the first one; rows of the third one
    begin as those of the first one."""
    generator = torch.Generator().manual_seed(0)
    first, other = 0.3 * torch.randn(2, 23, model.config.hidden_size, generator=generator)
    return [first, torch.cat([first[:18], other[:4]]), torch.cat([first[:, :30], other[:, 30:]], dim=1)]


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel, prompts: list[torch.Tensor]) -> list[Answer]:
    return [hf_answer(model, rows) for rows in prompts]


def hf_answer(model: PreTrainedModel, rows: torch.Tensor) -> Answer:
    """Greedy tokens and their log-probabilities, from transformers without a cache."""
    ids: list[int] = []
    logprobs = []
    embed = model.get_input_embeddings()
    with torch.inference_mode():
        while len(ids) < NUM_NEW:
            whole = torch.cat([rows, embed(torch.tensor(ids, dtype=torch.int64))])
            last = model(inputs_embeds=whole[None]).logits[0, -1].log_softmax(-1)
            ids.append(int(last.argmax()))
            logprobs.append(float(last.max()))
    return ids, logprobs


def engine(folder: Path, **flags: Any) -> LLM:
    given = {"device": "cpu", "panel": "reference", "max_total_tokens": 512, **flags}
    return LLM(str(folder), check_invariants=True, **given)


def answers(llm: LLM, rows: list[torch.Tensor]) -> list[Answer]:
    outputs = llm.generate(input_embeds=rows, sampling_params=GREEDY, progress=False)
    assert isinstance(outputs, list)
    return [(each.output_ids, [p.logprob for p in each.output_logprobs]) for each in outputs]


def expect_answers(found: list[Answer], expected: list[Answer]) -> None:
    for (ids, logprobs), (their_ids, their_logprobs) in zip(found, expected, strict=True):
        assert ids == their_ids
        assert logprobs == pytest.approx(their_logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        {**CHUNKED, "use": AHEAD},
        *(
            pytest.param(flags, marks=pytest.mark.full)
            for flags in (
                CHUNKED,
                WHOLE,
                {"chunked_prefill_size": 16, "page_size": 16},
                {"disable_radix_cache": True},
                {"schedule_policy": "lpm"},
                {"schedule_policy": "dfs-weight", "chunked_prefill_size": 5},
                {"schedule_policy": "lpm", "use": AHEAD},
                {"panel": "optimized", "chunked_prefill_size": 16},
                {"panel": "optimized", **CHUNKED},
            )
        ),
        *(pytest.param({**ON_GPU, **flags}, marks=pytest.mark.gpu) for flags in (WHOLE, CHUNKED)),
    ],
    ids=str,
)
def test_cold_warm_and_chunked_are_transformers(
    folder: Path, prompts: list[torch.Tensor], expected: list[Answer], flags: dict[str, Any]
) -> None:
    llm = engine(folder, **flags)
    text = list(range(40))
    alone = llm.generate(text, GREEDY, progress=False)
    for _ in range(2):
        beside = llm.submit(text[:33], GREEDY)[0]  # tokens in the same batches
        llm.step()
        expect_answers(answers(llm, prompts), expected)
        while llm.step():
            pass
        assert len(beside.output_ids) == NUM_NEW
    assert llm.generate(text, GREEDY, progress=False).output_ids == alone.output_ids


def test_rows_are_cached_by_their_content(
    folder: Path, prompts: list[torch.Tensor], expected: list[Answer]
) -> None:
    llm = engine(folder)
    for rows, answer, num_cached in zip([*prompts, prompts[2]], [*expected, expected[2]], (0, 18, 0, 22)):
        output = llm.generate(input_embeds=rows, sampling_params=GREEDY, progress=False)
        assert output.output_ids == answer[0]
        assert output.num_cached_tokens == num_cached
    zeros = llm.generate([input_embeds.PLACEHOLDER] * 23, GREEDY, progress=False)
    assert zeros.num_cached_tokens == 0


@pytest.mark.full
def test_a_retracted_request_computes_its_rows_again(
    folder: Path, prompts: list[torch.Tensor], expected: list[Answer]
) -> None:
    llm = engine(folder, chunked_prefill_size=9)
    collector = llm.submit(input_embeds.EmbedsPrompt(prompts[0]), GREEDY)[0]
    for num_steps in (2, 4, 3):  # in the middle of the prompt; after some tokens, twice
        for _ in range(num_steps):
            llm.step()
        assert llm.scheduler.retract(collector.rid)
        llm.scheduler.parts.tree_cache.evict(512)
    while llm.step():
        pass
    assert collector.num_retractions == 3
    expect_answers([(collector.output_ids, [p.logprob for p in collector.output_logprobs])], expected[:1])


def test_the_prompt_has_no_text(folder: Path, prompts: list[torch.Tensor]) -> None:
    """Placeholders are no tokens to a repetition penalty. Samples, streams and embeddings take rows too."""
    llm = engine(folder)
    collector = llm.submit(input_embeds.EmbedsPrompt(prompts[0]), GREEDY)[0]
    req = llm.scheduler.requests.live[collector.rid]
    assert req.prompt_text_ids == []
    assert len(req.origin_input_ids) == collector.num_prompt_tokens == 23
    while llm.step():
        pass
    samples = llm.generate(input_embeds=prompts[0], n=2, max_tokens=3, seed=1, progress=False)
    streamed = list(llm.stream(input_embeds.EmbedsPrompt(prompts[0]), n=2, max_tokens=3, seed=1))
    assert [sample.index for sample in samples] == [0, 1]
    for sample in samples:
        pieces = [piece.output_ids for piece in streamed if piece.index == sample.index]
        assert list(chain.from_iterable(pieces)) == sample.output_ids


def test_no_rows_of_a_step_whose_rows_are_cached() -> None:
    given = PromptEmbeds(torch.tensor([1, 2]), torch.ones(2, 4), [5, -1, -2, 6, 7], True)
    req = Req("a", [5, 0, 0, 6, 7], GREEDY, seed=0, embeds=given)
    req.fill_ids = list(req.origin_input_ids)
    for num_cached, is_none in ((2, False), (3, True)):
        req.prefix_indices = torch.arange(num_cached)
        assert [each is None for each in embeds_of_step([req], [0], torch.device("cpu"))] == [is_none] * 2


def keyed_by_placeholders(rows: torch.Tensor) -> list[int]:
    return [input_embeds.PLACEHOLDER] * len(rows)


def keyed_by_the_first_half(rows: torch.Tensor) -> list[int]:
    return [input_embeds.digest_key(b"row", row.numpy()) for row in rows[:, :30].contiguous()]


def from_the_start(extending: Any, start_locs: Any, device: Any) -> Any:
    """Chunks get the first rows again."""
    rows, embeds = embeds_of_step(extending, start_locs, device)
    return rows, extending[0].embeds.rows[: len(embeds)] if extending[0].embeds is not None else embeds


def all_rows_first(extending: Any, start_locs: Any, device: Any) -> Any:
    """Token indices of the batch are those of its first request."""
    return embeds_of_step(extending, [0] * len(start_locs), device)


KEYS = Bugs("keys of embeddings", f"{input_embeds.__name__}.row_keys", "other answers")
KEYS.add_all(keyed_by_placeholders, keyed_by_the_first_half)
CHUNKS = Bugs("chunks of embeddings", "diptych.reference.schedule_batch.embeds_of_step", "other answers")
CHUNKS.add_all(from_the_start, all_rows_first)


@KEYS.found_by(is_fast=lambda *_: False)
def test_planted_bugs_in_keys_are_found(
    bug: Bug, folder: Path, prompts: list[torch.Tensor], expected: list[Answer], monkeypatch: Any
) -> bool:
    bug.plant_in(monkeypatch)
    llm = engine(folder)
    found = [answers(llm, [rows])[0][0] for rows in prompts]
    return found != [ids for ids, _ in expected]


@CHUNKS.found_by(is_fast=lambda *_: False)
def test_planted_bugs_in_chunks_are_found(
    bug: Bug, folder: Path, prompts: list[torch.Tensor], expected: list[Answer], monkeypatch: Any
) -> bool:
    bug.plant_in(monkeypatch)
    llm = engine(folder, **(CHUNKED if bug.name == "from_the_start" else WHOLE))
    found = [ids for ids, _ in answers(llm, prompts)]
    return found != [ids for ids, _ in expected]


def test_flags_that_need_token_ids() -> None:
    check_supported("images", EngineConfig(panel="reference"))
    with pytest.raises(ValueError, match="images work with speculative=None alone; this engine has spec"):
        check_supported("images", EngineConfig(speculative="ngram"))
    check_supported("images", EngineConfig(panel="optimized", use={"attention": "triton"}))
    with pytest.raises(ValueError, match="images do not work with a component of your own: use has models"):
        check_supported("images", EngineConfig(use={"models": "mine.py:Model"}))


def test_rows_come_back_from_their_bytes() -> None:
    rows = torch.randn(3, 5)
    assert torch.equal(rows_of_bytes(rows.numpy().tobytes(), 3), rows)
    with pytest.raises(ValueError, match="60 bytes of input_embeds are not 4 rows of float32"):
        rows_of_bytes(rows.numpy().tobytes(), 4)


def test_refusals(folder: Path, prompts: list[torch.Tensor]) -> None:
    llm, rows = engine(folder, context_len=24), prompts[0]
    bad = rows.clone()
    bad[3, 5] = torch.nan
    for wrong, message in (
        (rows[:, :-1], r"shape \[num_tokens, hidden_size=60\], got \[23, 59\]"),
        (rows[None][0, 0], r"shape \[num_tokens, hidden_size=60\], got \[60\]"),
        (rows.long(), "floating dtype, got torch.int64"),
        ("rows", r"must be a tensor \[num_tokens, hidden_size=60\], got str"),
        (bad, r"input_embeds\[3, 5\] is nan in torch.float32"),
        (rows.repeat(2, 1), "input_embeds has 46 tokens; the context of 24 tokens allows 23"),
        (rows[:0], "the prompt is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(input_embeds=wrong, max_tokens=1)
    with pytest.raises(ValueError, match="logprob_start_len must be -1, got 0"):
        llm.generate(input_embeds=rows, return_logprob=True, logprob_start_len=0)
    with pytest.raises(ValueError, match="give either prompts or input_embeds"):
        llm.generate([1, 2], input_embeds=rows)
    assert not llm.scheduler.has_work()


@pytest.mark.full
def test_refusals_of_other_engines(folder: Path, prompts: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"input_embeds\[0, 0\] is inf in torch.float16"):
        engine(folder, dtype="float16").generate(input_embeds=torch.full((2, 60), 1e5), max_tokens=1)
    drafting = engine(folder, speculative="ngram", speculative_topk=1)
    with pytest.raises(ValueError, match="input_embeds work with speculative=None alone"):
        drafting.generate(input_embeds=prompts[0])
