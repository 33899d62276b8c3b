"""`import diptych`: what users write."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import diptych
from diptych import LLM, EngineConfig, GenerateOutput, SamplingParams
from diptych.shared.engine import llm as llm_module
from diptych.shared.types import FinishAbort, FinishError
from tests.house.tree import ROOT

SUM = [{"role": "user", "content": "What is 12 + 30?"}]


def run_python(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-dense", device="cpu", panel="reference", check_invariants=True)


def test_importing_it_imports_nothing_heavy() -> None:
    program = "import sys, diptych; print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_names() -> None:
    assert set(diptych.__all__) <= set(dir(diptych))
    for name in diptych.__all__:
        assert getattr(diptych, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        diptych.Engine


def test_the_model_is_the_first_argument() -> None:
    config = EngineConfig(device="cpu", max_total_tokens=128)
    small = LLM("tiny-dense", config=config, max_running_requests=2)
    assert (small.config.model, small.config.max_running_requests) == ("tiny-dense", 2)
    assert small.config.max_total_tokens == 128


def test_sampling_keywords(llm: LLM) -> None:
    output = llm.generate("Count from 3 to 9.", temperature=0, max_tokens=5, ignore_eos=True)
    assert isinstance(output, GenerateOutput)
    assert output.num_output_tokens == 5
    params = SamplingParams(temperature=0, ignore_eos=True)
    assert llm.generate("Count from 3 to 9.", params, max_new_tokens=5).output_ids == output.output_ids
    pieces = list(llm.stream("Count from 3 to 9.", temperature=0, max_tokens=5, ignore_eos=True))
    assert [i for piece in pieces for i in piece.output_ids] == output.output_ids


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"temprature": 0}, "unknown sampling parameter 'temprature'; did you mean temperature"),
        ({"max_tokens": 1, "max_new_tokens": 1}, "are the same"),
        ({"n": 10**6}, "n must be at most 1024"),
        ({"ignore_eos": "false"}, "ignore_eos must be True or False, got 'false'"),
        ({"rid": 3}, "rid must be a text"),
    ],
)
def test_wrong_keywords(llm: LLM, keywords: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate("a", **keywords)


WRONG_PROMPTS = (5, 5.0, True, {"a", "b"}, (x for x in "ab"), object(), {"text": "a"}, torch.ones(3), b"a")


@pytest.mark.parametrize("prompt", WRONG_PROMPTS, ids=[type(each).__name__ for each in WRONG_PROMPTS])
def test_prompts_of_a_wrong_type(llm: LLM, prompt: object) -> None:
    for call in (llm.generate, llm.embed, llm.stream):
        with pytest.raises(ValueError, match=f"got {type(prompt).__name__}"):
            call(prompt)
    with pytest.raises(ValueError, match="messages must be a non-empty list"):
        llm.chat(prompt)


def test_parameters_of_a_wrong_type(llm: LLM) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(ValueError, match="sampling_params are SamplingParams"):
            call("a", 5)
    with pytest.raises(ValueError, match="images must be a list for the prompt"):
        llm.generate("a", images=5)


def test_chat(llm: LLM) -> None:
    output = llm.chat(SUM, temperature=0)
    assert isinstance(output, GenerateOutput)
    assert output.text == "12 + 30 = 42"
    assert "".join(piece.text for piece in llm.stream(llm.chat_prompt(SUM), temperature=0)) == output.text


def test_parts_that_are_all_text_are_one_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "12 + 30?"}]
    assert llm.chat_prompt([{"role": "user", "content": parts}]) == llm.chat_prompt(SUM)


def test_an_rid_is_free_again_after_an_abort(llm: LLM) -> None:
    """The second request must not get the first one's end."""
    (first,) = llm.submit("one two", SamplingParams(max_new_tokens=50, ignore_eos=True), rid="a")
    llm.step()
    with pytest.raises(ValueError, match="'a' is in use"):
        llm.submit("three", SamplingParams(), rid="a")
    assert llm.abort("a")
    assert not llm.abort("a")
    output = llm.generate("three four", rid="a", temperature=0, max_tokens=4, ignore_eos=True)
    assert (output.rid, output.num_output_tokens) == ("a", 4)
    assert isinstance(first.finish_reason, FinishAbort)


@pytest.mark.parametrize(
    ("first", "second"), [(("a", 2), ("a#1", 1)), (("a#1", 1), ("a", 2)), (("a", 2), ("a", 1))]
)
def test_an_id_of_a_sample_is_taken(llm: LLM, first: tuple[str, int], second: tuple[str, int]) -> None:
    """`abort` of it would end two requests."""
    llm.submit("one", SamplingParams(n=first[1]), rid=first[0])
    with pytest.raises(ValueError, match=f"'{max(first[0], second[0])}' is in use"):
        llm.submit("two", SamplingParams(n=second[1]), rid=second[0])
    assert llm.stats().num_waiting == first[1]
    assert llm.abort(first[0])


def test_an_id_that_is_chosen_is_free(llm: LLM) -> None:
    (chosen,) = llm.submit("one", SamplingParams())
    number = int(chosen.rid.removeprefix("req-"))
    (given,) = llm.submit("two", SamplingParams(), rid=f"req-{number + 1}")
    (third,) = llm.submit("three", SamplingParams())
    assert len({chosen.rid, given.rid, third.rid}) == 3
    for each in (chosen, given, third):
        assert llm.abort(each.rid)


def test_an_abort_within_a_step_waits_for_its_end(llm: LLM) -> None:
    """As the garbage collector may close a stream in the middle of a step."""
    (first,) = llm.submit("one two", SamplingParams(max_new_tokens=50, ignore_eos=True), rid="a")
    with llm._live.exclusive():
        assert llm.abort("a")
        assert not llm.abort("a")
        assert llm.stats().num_waiting == 1
    assert llm.stats().num_waiting == 0
    while llm.step():
        pass
    assert isinstance(first.finish_reason, FinishAbort)


def test_an_rid_is_free_again_after_a_full_queue() -> None:
    llm = LLM("tiny-dense", device="cpu", max_total_tokens=256, max_queued_requests=1)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    (first,), (refused,) = (llm.submit("one two", params, rid=rid) for rid in "ab")
    assert llm.abort("a")
    (second,) = llm.submit("three four", params, rid="b")
    while llm.step():
        pass
    assert isinstance(first.finish_reason, FinishAbort)
    assert (refused.finish_reason, refused.num_output_tokens) == (
        FinishAbort("the queue is full (1 waiting)", 503),
        0,
    )
    assert (second.rid, second.num_output_tokens) == ("b", 4)


@pytest.mark.parametrize("n", [1, 2])
def test_an_rid_is_free_again_after_a_stream_is_closed(llm: LLM, n: int) -> None:
    stream = llm.stream("one two", rid="a", n=n, max_tokens=50, ignore_eos=True)
    next(stream)
    stream.close()
    output = llm.generate("three four", rid="a", temperature=0, max_tokens=4, ignore_eos=True)
    assert (output.rid, output.num_output_tokens) == ("a", 4)


def test_generated_names_do_not_collide(llm: LLM) -> None:
    (other,) = llm.submit("x", SamplingParams(), rid="probe")
    number = int(llm.submit("y", SamplingParams())[0].rid.partition("-")[2])
    llm.submit("z", SamplingParams(), rid=f"req-{number + 1}")
    outputs = llm.generate(["b", "c"], temperature=0, max_tokens=2, ignore_eos=True)
    assert [o.num_output_tokens for o in outputs] == [2, 2]
    while llm.step():
        pass
    assert other.is_finished


def test_a_refused_request_changes_no_seed() -> None:
    def answers(llm: LLM) -> list[list[int]]:
        return [
            o.output_ids for o in llm.generate(["a", "b"], temperature=2.0, max_tokens=8, ignore_eos=True)
        ]

    plain, disturbed = (LLM("tiny-dense", device="cpu", max_total_tokens=256) for _ in range(2))
    with pytest.raises(ValueError, match="KV pool"):
        disturbed.generate([1] * 300)
    for refused in (["ok", [10**6]], ["ok", "ok", 5]):
        with pytest.raises(ValueError, match=r"outside the vocabulary|a prompt is a text"):
            disturbed.generate(refused)
    assert answers(disturbed) == answers(plain)


def test_a_stream_forgotten_during_a_step_is_aborted_behind_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may close a stream in the middle of a batch."""
    params = {"max_tokens": 30, "ignore_eos": True}
    stream = llm.stream("forgotten", **params)
    next(stream)
    holder = [stream]
    del stream
    add_output = llm_module.OutputCollector.add
    run = llm.scheduler.decoding.run

    def dropping(*args):
        holder.clear()
        gc.collect()
        return run(*args)

    monkeypatch.setattr(llm.scheduler.decoding, "run", dropping)
    output = llm.generate("kept", progress=False, **params)
    assert output.num_output_tokens == 30
    assert llm_module.OutputCollector.add is add_output
    while llm.step():
        pass
    assert llm.flush_cache()


def test_threads_share_an_llm(llm: LLM) -> None:
    prompts = [f"Count from {i} to 9." for i in range(6)]
    alone = [llm.generate(p, temperature=0, max_tokens=12, progress=False).output_ids for p in prompts]
    found: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        found[i] = llm.generate(prompts[i], temperature=0, max_tokens=12, progress=False).output_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(6)] == alone


def test_a_regex_without_end_ends_its_own_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.shared.scheduling.stop_conditions.REGEX_SECONDS", 0.002)
    ids = llm.tokenizer.encode("a" * 60)
    bias = {ids[-1]: 1000.0}
    (hostile,) = llm.submit(ids, SamplingParams(stop_regex="(a+)+b", max_new_tokens=400, logit_bias=bias))
    (other,) = llm.submit("Count:", SamplingParams(max_new_tokens=20, temperature=0, ignore_eos=True))
    while llm.step():
        pass
    assert isinstance(hostile.finish_reason, FinishError)
    assert "took more than" in hostile.finish_reason.message
    assert other.num_output_tokens == 20


def test_a_long_prompt_is_refused_before_it_is_tokenized(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "encode", lambda *_: pytest.fail("tokenized"))
    with pytest.raises(ValueError, match="20000000 characters; the context of 2048 tokens holds at most"):
        llm.generate("a" * 20_000_000)
    with pytest.raises(ValueError, match=r"the conversation has 20000.* characters; the context holds"):
        llm.chat([{"role": "user", "content": "a" * 20_000_000}])


@pytest.mark.parametrize(
    "name", ["chat_template", "messages", "self", "tokenize", "return_dict", "conversations"]
)
def test_reserved_names_are_no_switches_of_the_template(llm: LLM, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is no switch of the chat template"):
        llm.chat(SUM, template_args={name: "a"})


def test_a_checkpoint_without_a_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    source = ROOT / "shared" / "assets" / "tiny-dense"
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    ids = LLM("tiny-dense", device="cpu").tokenizer.encode("Count from 3 to 9.")
    bare = LLM(str(tmp_path), device="cpu", max_total_tokens=256)
    output = bare.generate(ids, temperature=0, max_tokens=4, ignore_eos=True)
    assert (output.num_output_tokens, output.text) == (4, "")
    for wrong in (lambda: bare.generate("text"), lambda: bare.chat(SUM)):
        with pytest.raises(ValueError, match="no tokenizer"):
            wrong()
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.generate(ids, stop="a")
    tokenizer_only = tmp_path / "tokenizer"
    tokenizer_only.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tokenizer_only / name).write_bytes((source / name).read_bytes())
    named = LLM(str(tmp_path), device="cpu", tokenizer=str(tokenizer_only), max_total_tokens=256)
    assert named.generate("Count from 3 to 9.", temperature=0, max_tokens=2).text


def test_version() -> None:
    program = (
        "import sys; sys.argv = ['diptych', '--version']; from diptych.shared.tools.cli import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == f"diptych {diptych.__version__}"


def test_a_stream_may_be_unfinished_at_exit() -> None:
    program = (
        "from diptych import LLM\n"
        "llm = LLM('tiny-dense', device='cpu', panel='reference')\n"
        "stream = llm.stream('Count', temperature=0)\n"
        "print(len(next(stream).output_ids))"
    )
    assert run_python(program) == "1"
