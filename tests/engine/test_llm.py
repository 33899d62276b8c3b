"""LLM: what people call. On the built-in model, reference panel."""

from __future__ import annotations

import math
import re
import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from diptych.shared.engine.llm import LLM
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.types import (
    FinishAbort,
    FinishError,
    FinishLength,
    FinishString,
    FinishToken,
    SamplingParams,
)

GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
STORY = [{"role": "user", "content": "Mia has a red kite. Tom has a green box. Who has the kite?"}]


@pytest.fixture(scope="module")
def shared_llm() -> LLM:
    return LLM(model="tiny-dense", device="cpu", panel="reference", check_invariants=True)


@pytest.fixture
def llm(shared_llm: LLM) -> LLM:
    """One engine for all tests, empty at the start of each."""
    assert shared_llm.flush_cache(), "a test left a request behind"
    return shared_llm


def test_the_phases_of_the_start_are_timed(llm: LLM) -> None:
    assert list(llm.assembly.seconds) == ["tokenizer", "weights", "pools", "kernels", "graphs"]
    assert min(llm.assembly.seconds.values()) >= 0


def test_it_answers(llm: LLM) -> None:
    output = llm.generate(llm.tokenizer.chat(QUESTION), GREEDY, progress=False)
    assert "42" in output.text
    assert isinstance(output.finish_reason, FinishToken)
    assert output.num_output_tokens == len(output.output_ids)
    assert output.num_prompt_tokens == len(llm.tokenizer.chat(QUESTION))


class TestInput:
    def test_single_or_list_text_or_ids(self, llm: LLM) -> None:
        ids = llm.tokenizer.encode("one two three")
        single = llm.generate("one two three", GREEDY, progress=False)
        both = llm.generate(["one two three", ids], GREEDY, progress=False)
        assert [o.output_ids for o in both] == [single.output_ids] * 2
        assert llm.generate([], GREEDY, progress=False) == []

    def test_one_params_for_each_prompt(self, llm: LLM) -> None:
        params = [SamplingParams(max_new_tokens=n, temperature=0.0, ignore_eos=True) for n in (1, 5)]
        outputs = llm.generate(["a", "b"], params, progress=False)
        assert [o.num_output_tokens for o in outputs] == [1, 5]
        with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
            llm.generate(["a"], params, progress=False)

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ("", "the prompt is empty"),
            ([], "the prompt is empty"),
            ([1, 10**6], "token id 1000000 at position 1 is outside the vocabulary"),
            ([5] * 5000, "5000 tokens; the context of 2048"),
            ({"a": 1}, "a prompt is a text or a list of token ids"),
            ([1, "a"], "a prompt is a text or a list of token ids"),
        ],
    )
    def test_bad_prompts_disturb_no_request(self, llm: LLM, prompt: object, message: str) -> None:
        other = llm.submit("one two", GREEDY)[0]
        llm.step()
        with pytest.raises(ValueError, match=message):
            llm.generate(["good", prompt], GREEDY, progress=False)
        while llm.step():
            pass
        assert other.is_finished
        assert other.whole().text == llm.generate("one two", GREEDY, progress=False).text

    def test_a_progress_bar_counts_answers_on_a_terminal(
        self, llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        llm.generate(["a", "b"], GREEDY)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        llm.generate("a", GREEDY, n=2)
        assert re.search("/2 .*answer", capsys.readouterr().err)


class TestStream:
    def test_pieces_make_the_whole(self, llm: LLM) -> None:
        prompt = llm.tokenizer.chat(STORY)
        whole = llm.generate(prompt, GREEDY, progress=False)
        pieces = list(llm.stream(prompt, GREEDY))
        assert len(pieces) > 3
        assert "".join(p.text for p in pieces) == whole.text
        assert [t for p in pieces for t in p.output_ids] == whole.output_ids
        assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == whole.finish_reason

    def test_several_are_read_in_turn(self, llm: LLM) -> None:
        prompts = [llm.tokenizer.chat(chat) for chat in (QUESTION, STORY)]
        expected = [llm.generate(p, GREEDY, progress=False).text for p in prompts]
        streams = [llm.stream(p, GREEDY) for p in prompts]
        texts = ["", ""]
        done = [False, False]
        while not all(done):
            for i, stream in enumerate(streams):
                piece = next(stream, None)
                done[i] = piece is None
                texts[i] += piece.text if piece else ""
        assert texts == expected

    @pytest.mark.parametrize("num_read", [0, 1])
    def test_dropping_it_aborts_the_request(self, llm: LLM, num_read: int) -> None:
        stream = llm.stream("a b c", SamplingParams(max_new_tokens=500, ignore_eos=True), rid="dropped")
        for _ in range(num_read):
            next(stream)
        stream.close()
        assert not llm.abort("dropped")
        stats = llm.stats()
        assert (stats.num_waiting, stats.num_running) == (0, 0)
        while llm.step():
            pass

    def test_bad_input_is_raised_at_the_call(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="the prompt is empty"):
            llm.stream("")

    def test_abort_by_id(self, llm: LLM) -> None:
        params = SamplingParams(max_new_tokens=500, ignore_eos=True, n=2)
        pieces = []
        for piece in llm.stream("a b c", params, rid="mine"):
            pieces.append(piece)
            if len(pieces) == 4:
                assert llm.abort("mine")
        last = {p.index: p for p in pieces}
        assert all(isinstance(p.finish_reason, FinishAbort) for p in last.values())
        assert not llm.abort("mine")

    @pytest.mark.parametrize(
        ("request_args", "message"),
        [
            ({"priority": "hi"}, "priority must be an integer, got 'hi'"),
            ({"priority": None}, "priority must be an integer, got None"),
            ({"rid": 5}, "rid must be a text or None, got 5"),
            ({"extra_key": 5}, "extra_key must be a text or None, got 5"),
            ({"routing_key": b"x"}, "routing_key must be a text or None"),
            ({"sampling_params": {"max_new_tokens": 2}}, "sampling_params are SamplingParams, or a list"),
            ({"prompts": "hi \ud800 x"}, r"no valid Unicode: character 3 is '\\ud800'"),
        ],
    )
    def test_what_is_no_request_is_refused_before_it_is_one(
        self, llm: LLM, request_args: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            llm.generate(**{"prompts": "a b c", "progress": False, **request_args})
        assert not llm.scheduler.has_work()

    def test_what_a_request_has_that_names_nothing(self, llm: LLM) -> None:
        llm.submit("a b c", SamplingParams())
        (req,) = llm.scheduler.state().waiting_queue
        assert (req.priority, req.extra_key, req.routing_key, req.is_pooling) == (0, None, None, False)
        assert llm.abort(req.rid)
        while llm.step():
            pass

    def test_abort_takes_ids_exactly(self, llm: LLM) -> None:
        params = SamplingParams(max_new_tokens=500, ignore_eos=True)
        [other] = llm.submit("a b c", params, rid="mine#1")  # no sample of "mine", though it looks like one
        assert not llm.abort("mine")
        llm.step()
        assert not other.is_finished
        assert llm.abort("mine#1")
        while llm.step():
            pass


class TestSampling:
    """CASES D22."""

    def test_a_seed_gives_the_same_text_whatever_its_mates(self, llm: LLM) -> None:
        params = SamplingParams(max_new_tokens=16, temperature=1.2, seed=7, ignore_eos=True)
        alone = llm.generate("once upon", params, progress=False)
        noise = SamplingParams(max_new_tokens=30, temperature=2.0, ignore_eos=True)
        mixed = llm.generate(["x y z", "once upon", "1 2"], [noise, params, noise], progress=False)
        assert mixed[1].output_ids == alone.output_ids

    def test_unseeded_requests_differ(self, llm: LLM) -> None:
        params = SamplingParams(max_new_tokens=16, temperature=1.5, ignore_eos=True)
        outputs = llm.generate(["once upon"] * 4, params, progress=False)
        assert len({tuple(o.output_ids) for o in outputs}) == 4

    def test_samples_of_one_request_are_distinct_and_repeatable(self, llm: LLM) -> None:
        params = SamplingParams(max_new_tokens=16, temperature=1.5, seed=3, n=3, ignore_eos=True)
        first, second = (llm.generate("once upon", params, progress=False) for _ in range(2))
        assert [o.index for o in first] == [0, 1, 2]
        assert [o.output_ids for o in first] == [o.output_ids for o in second]
        assert len({tuple(o.output_ids) for o in first}) == 3

    def test_ids_without_a_token_are_never_sampled(self, llm: LLM) -> None:
        """CASES D21: the head has more rows than the tokenizer has tokens."""
        num_ids = llm.tokenizer.vocab_size
        assert num_ids < llm.model_config.vocab_size
        params = SamplingParams(max_new_tokens=60, temperature=100.0, ignore_eos=True)
        outputs = llm.generate(["a"] * 8, params, progress=False)
        assert max(t for o in outputs for t in o.output_ids) < num_ids
        with pytest.raises(ValueError, match="temperature"):
            SamplingParams(temperature=math.inf)

    def test_padding_ids_in_a_prompt_disturb_no_request(self, llm: LLM) -> None:
        num_ids, vocab_size = llm.tokenizer.vocab_size, llm.model_config.vocab_size
        params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True, repetition_penalty=1.3)
        prompts = [[5, num_ids, 7], [5, vocab_size - 1, 7], [5, 6, 7]]
        together = llm.generate(prompts, params, progress=False)
        alone = [llm.generate(prompt, params, progress=False) for prompt in prompts]
        assert [o.output_ids for o in together] == [o.output_ids for o in alone]
        assert all(isinstance(o.finish_reason, FinishLength) for o in together)

    def test_a_request_that_bans_every_token_says_so(self, llm: LLM) -> None:
        bias = dict.fromkeys(range(llm.tokenizer.vocab_size), -math.inf)
        params = SamplingParams(max_new_tokens=4, temperature=0.0, logit_bias=bias)
        output = llm.generate("a", params, progress=False)
        assert isinstance(output.finish_reason, FinishError)
        assert "every token is banned" in output.finish_reason.message
        assert "NaN" not in output.finish_reason.message


def counted(llm: LLM, **params: object) -> tuple[str, object]:
    """Text and finish reason, which a stream gives too."""
    prompt = llm.tokenizer.chat([{"role": "user", "content": "Count from 1 to 20."}])
    asked = SamplingParams(max_new_tokens=60, temperature=0.0, **params)
    output = llm.generate(prompt, asked, progress=False)
    assert "".join(piece.text for piece in llm.stream(prompt, asked)) == output.text
    return output.text, output.finish_reason


@pytest.fixture(scope="module")
def whole(shared_llm: LLM) -> str:
    return counted(shared_llm)[0]


class TestStop:
    """CASES G31."""

    def test_string(self, llm: LLM, whole: str) -> None:
        assert "7" in whole
        text, reason = counted(llm, stop=("7",))
        assert text == whole[: whole.index("7")]
        assert reason == FinishString("7")
        assert counted(llm, stop=("7",), no_stop_trim=True)[0].endswith("7")

    def test_string_that_never_comes(self, llm: LLM, whole: str) -> None:
        assert counted(llm, stop=("7 8 no",))[0] == whole

    def test_regex(self, llm: LLM, whole: str) -> None:
        text, reason = counted(llm, stop_regex=(r"1[0-9]",))
        assert text == whole[: whole.index("10")]
        assert reason.matched == "10"

    def test_length(self, llm: LLM) -> None:
        output = llm.generate("a", SamplingParams(max_new_tokens=3, ignore_eos=True), progress=False)
        assert output.finish_reason == FinishLength(3)


@pytest.fixture(scope="module")
def expected() -> tuple[list[int], torch.Tensor]:
    """A text, and transformers' log-probabilities of its tokens."""
    hf = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-dense", dtype=torch.float32)
    llm = LLM(model="tiny-dense", device="cpu", panel="reference")
    ids = llm.tokenizer.chat(STORY)
    with torch.no_grad():
        logits = hf(torch.tensor([ids])).logits[0]
    return ids, logits


class TestLogprobs:
    """CASES D23: aligned lengths and right values with prefix hits and chunks."""

    @pytest.mark.parametrize("start", [0, 1, 7])
    @pytest.mark.parametrize(
        "flags",
        [
            {},
            {"chunked_prefill_size": 5},
            {"page_size": 4, "chunked_prefill_size": 8},
            {"disable_radix_cache": True},
        ],
    )
    def test_of_the_prompt(
        self, expected: tuple[list[int], torch.Tensor], start: int, flags: dict[str, object]
    ) -> None:
        ids, logits = expected
        llm = LLM(model="tiny-dense", device="cpu", panel="reference", check_invariants=True, **flags)
        params = SamplingParams(
            max_new_tokens=2,
            temperature=0.0,
            return_logprob=True,
            logprob_start_len=start,
            top_logprobs_num=3,
        )
        reference = logits.log_softmax(-1)
        for _ in range(2):  # cold, then with the prompt in the cache
            output = llm.generate(ids, params, progress=False)
            assert [entry.token_id for entry in output.input_logprobs] == ids[start:]
            for position, entry in enumerate(output.input_logprobs, start):
                if position == 0:
                    assert entry.logprob is None
                    continue
                row = reference[position - 1]
                # Sums in another order: 6e-5 was the largest difference of logits seen.
                assert entry.logprob == pytest.approx(float(row[ids[position]]), abs=2e-4)
                assert len(entry.top) == 3
                assert entry.top[0][1] == pytest.approx(float(row.max()), abs=2e-4)
                assert entry.top[0][0] == int(row.argmax())

    def test_of_the_output(self, llm: LLM) -> None:
        params = SamplingParams(max_new_tokens=8, temperature=0.0, return_logprob=True, top_logprobs_num=2)
        prompt = llm.tokenizer.chat(STORY)
        plain = SamplingParams(max_new_tokens=8, temperature=0.0)
        output, other = llm.generate([prompt, prompt], [params, plain], progress=False)
        assert [entry.token_id for entry in output.output_logprobs] == output.output_ids
        assert all(
            entry.top[0][0] == entry.token_id and len(entry.top) == 2 for entry in output.output_logprobs
        )
        assert all(entry.logprob == entry.top[0][1] <= 0.0 for entry in output.output_logprobs)
        assert other.output_logprobs == []
        streamed = [e for p in llm.stream(prompt, params) for e in p.output_logprobs]
        assert [e.token_id for e in streamed] == output.output_ids

    def test_of_the_prompt_and_of_the_output_are_normalised_alike(self, llm: LLM) -> None:
        """Over the ids that have a token: those of padding rows of the head have no probability."""
        num_ids = llm.tokenizer.vocab_size
        params = SamplingParams(
            max_new_tokens=1,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=num_ids,
            temperature=1.0,
            ignore_eos=True,
        )
        output = llm.generate("one two three", params, progress=False)
        for entry in (*output.input_logprobs[1:], *output.output_logprobs):
            assert {token_id for token_id, _ in entry.top} == set(range(num_ids))
            assert sum(math.exp(logprob) for _, logprob in entry.top) == pytest.approx(1.0, abs=1e-4)

    def test_of_the_prompt_only(self, llm: LLM) -> None:
        params = SamplingParams(max_new_tokens=0, return_logprob=True, logprob_start_len=0)
        output = llm.generate("one two three", params, progress=False)
        assert len(output.input_logprobs) == output.num_prompt_tokens
        assert output.output_ids == []

    def test_survive_retraction(self, llm: LLM) -> None:
        params = SamplingParams(
            max_new_tokens=12, temperature=0.0, return_logprob=True, logprob_start_len=0, ignore_eos=True
        )
        plain = llm.generate("one two three", params, progress=False)
        collector = llm.submit("one two three", params)[0]
        for step in range(40):
            if step % 4 == 2:
                llm.scheduler.retract(collector.scheduler_rid)
            llm.step()
        output = collector.whole()
        assert output.num_retractions > 1
        assert output.output_ids == plain.output_ids
        assert len(output.output_logprobs) == 12
        assert len(output.input_logprobs) == output.num_prompt_tokens


def test_a_shape_with_dummy_weights_and_no_tokenizer() -> None:
    folder = ASSETS / "configs" / "Qwen3-0.6B"
    assert folder.is_dir()
    flags = {"model": "tiny-dense", "load_format": "dummy", "device": "cpu", "panel": "reference"}
    one, same, other = (LLM(**flags, random_seed=seed) for seed in (1, 1, 2))
    outputs = [llm.generate([5, 6, 7], GREEDY, progress=False).output_ids for llm in (one, same, other)]
    assert outputs[0] == outputs[1] != outputs[2]
