"""LoRA adapters in an engine: PEFT's answers, whatever happens around a request; loading and unloading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from diptych.shared.engine.llm import LLM
from diptych.shared.engine.requests import submission
from diptych.shared.loading.lora_adapter import read_adapter
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.types import SamplingParams
from tests.models.model_harness import random_hf_model
from tests.planted import Bug, Bugs

NUM_NEW = 8
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
PROMPT = [3, 14, 159, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95]
PROMPTS = [[*PROMPT, 7 + i] for i in range(4)]
ADAPTERS: dict[str, dict[str, Any]] = {
    "every": {"r": 8, "lora_alpha": 12, "target_modules": "all-linear"},
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 7},
        "alpha_pattern": {"v_proj": 20, "layers.0.mlp.down_proj": 3},
    },
    "rslora": {"r": 9, "lora_alpha": 6, "use_rslora": True, "target_modules": ["k_proj", "o_proj"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model and adapters, as transformers and PEFT write them."""
    peft = pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("lora")
    random_hf_model(CONFIGS["llama-llama3"]).save_pretrained(folder / "model")
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **fields))
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.data.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5, generator=generator)
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str | None, list[list[int]]]:
    """PEFT's greedy tokens after each prompt, for each adapter and for none."""
    peft = pytest.importorskip("peft")
    found = {}
    for name in (None, *ADAPTERS):
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
        if name is not None:
            model = peft.PeftModel.from_pretrained(model, folder / name).eval()
        found[name] = [greedy(model, prompt) for prompt in PROMPTS]
    return found


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        while len(ids) < len(prompt) + NUM_NEW:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def engine(folder: Path, **flags: Any) -> LLM:
    paths = {name: str(folder / name) for name in ADAPTERS}
    given = {"device": "cpu", "panel": "reference", "lora_paths": paths, "max_total_tokens": 512, **flags}
    return LLM(str(folder / "model"), check_invariants=True, **given)


def answers(llm: LLM, retracts: bool = False) -> dict[str | None, list[list[int]]]:
    """All prompts with all adapters at once, those of one prompt side by side."""
    live = {
        (name, i): llm.submit(prompt, GREEDY, lora=name)[0]
        for i, prompt in enumerate(PROMPTS)
        for name in (None, *ADAPTERS)
    }
    steps = 0
    while llm.step():
        steps += 1
        if retracts and steps % 3 == 0:
            llm.scheduler.retract(next((c.rid for c in live.values() if not c.is_finished), ""))
    return {name: [live[name, i].output_ids for i in range(len(PROMPTS))] for name in (None, *ADAPTERS)}


NGRAM = {"speculative": "ngram"}
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"max_loras_per_batch": 2, "schedule_policy": "lpm", "chunked_prefill_size": 7},
    {"chunked_prefill_size": 5, "enable_mixed_chunk": True},
    {"page_size": 4, "max_total_tokens": 96, "schedule_conservativeness": 0.01},  # memory is short
    {"max_loras_per_batch": 1},
    {"deterministic": True},
    NGRAM,
    {**NGRAM, "speculative_topk": 1, "page_size": 4},
)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(flags, id=str(flags), marks=[pytest.mark.full] * (i > 1))
        for i, flags in enumerate(SETTINGS)
    ],
)
def test_answers_are_those_of_peft(
    folder: Path, expected: dict[str | None, list[list[int]]], flags: dict[str, Any]
) -> None:
    assert len({str(each) for each in expected.values()}) == 4  # each adapter changes the answers
    llm = engine(folder, **flags)
    assert answers(llm) == expected
    assert answers(llm, retracts=True) == expected  # now with a warm cache
    if not flags:
        assert llm.stats().num_cached_tokens > 200


def test_a_draft_model_has_no_adapter(folder: Path, expected: dict[str | None, list[list[int]]]) -> None:
    draft = {"speculative": "standalone", "speculative_draft_model": str(folder / "model")}
    llm = engine(folder, **draft)
    assert answers(llm) == expected
    assert llm.stats().speculation.num_accepted_tokens > 0


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for a GPU")
@pytest.mark.parametrize("runner", ["optimized", "tests.model_runner.fake_graphs:FakeGraphsRunner"])
def test_the_optimized_panel_in_the_interpreter(
    folder: Path, expected: dict[str | None, list[list[int]]], runner: str
) -> None:
    use = {"attention": "triton", "model_runner": runner}
    sizes = {"max_running_requests": 6, "cuda_graph_bs": (6,), "cuda_graph_max_tokens": 128}
    llm = engine(folder, panel="optimized", use=use, **sizes)  # batches of four, padded to six
    params = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
    live = {name: llm.submit(PROMPTS[0], params, lora=name)[0] for name in (None, *ADAPTERS)}
    while llm.step():
        pass
    for name, collector in live.items():
        assert collector.output_ids == expected[name][0][:3], name
    if runner != "optimized":
        assert llm.assembly.parts.model_runner.replays.steps > 0
        assert llm.assembly.parts.model_runner.replays.prompts > 0


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{}, {"disable_cuda_graph": True}, {"max_loras_per_batch": 1}], ids=str)
def test_the_optimized_panel_on_a_gpu(
    folder: Path, expected: dict[str | None, list[list[int]]], flags: dict[str, Any]
) -> None:
    llm = engine(folder, panel="optimized", device="cuda", dtype="float32", **flags)
    assert answers(llm) == expected
    assert answers(llm, retracts=True) == expected


KEYS = Bugs("keys of adapters", f"{submission.__name__}.cache_namespace", "other answers")
KEYS.add("an adapter does not count in the key of cached KV", lambda extra_key, *_: extra_key)


@KEYS.found_by()
def test_a_cache_shared_between_adapters_is_found(
    bug: Bug, folder: Path, expected: dict[str | None, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> bool:
    bug.plant_in(monkeypatch)
    llm = engine(folder)
    return [answers(llm), answers(llm)] != [expected, expected]


@pytest.mark.parametrize("scheduler", ["reference", "optimized"])
def test_a_more_important_request_waits_for_its_adapter(
    folder: Path, expected: dict[str | None, list[list[int]]], scheduler: str
) -> None:
    """Though it could have the place of a request that runs."""
    flags = {"max_loras_per_batch": 1, "max_running_requests": 2, "enable_priority_scheduling": True}
    llm = engine(folder, use={"scheduler": scheduler}, **flags)
    found = [llm.submit(prompt, GREEDY, lora="every")[0] for prompt in PROMPTS[:2]]
    for _ in range(3):
        llm.step()
    found += llm.submit(PROMPTS[2], GREEDY, lora="patterns", priority=100)
    while llm.step():
        pass
    assert [collector.output_ids for collector in found] == [*expected["every"][:2], expected["patterns"][2]]


def test_loading_while_requests_run(folder: Path, expected: dict[str | None, list[list[int]]]) -> None:
    llm = engine(folder, lora_paths={"a": str(folder / "every")}, max_loras_per_batch=1)
    assert llm.generate(PROMPTS, GREEDY, lora="a", progress=False)[0].output_ids == expected["every"][0]
    collector = llm.submit(PROMPTS[0], GREEDY, lora="a")[0]
    llm.step()
    for call in (lambda: llm.unload_lora("a"), lambda: llm.load_lora("a", str(folder / "rslora"))):
        with pytest.raises(ValueError, match="'a' is in use by 1 request"):
            call()
    llm.load_lora("b", str(folder / "patterns"))
    later = llm.submit(PROMPTS[1], GREEDY, lora="b")[0]  # waits: there is one slot
    llm.step()
    assert llm.stats().num_running == 1
    while llm.step():
        pass
    assert collector.output_ids == expected["every"][0]
    assert later.output_ids == expected["patterns"][1]
    llm.load_lora("a", str(folder / "rslora"))  # the same name, another content: nothing cached is right
    output = llm.generate(PROMPTS[0], GREEDY, lora="a", progress=False)
    assert output.output_ids == expected["rslora"][0]
    assert output.num_cached_tokens == 0
    llm.unload_lora("a")
    with pytest.raises(ValueError, match="no LoRA adapter 'a' is loaded; there are b"):
        llm.generate(PROMPTS[0], GREEDY, lora="a", progress=False)
    with pytest.raises(ValueError, match="rank 40; this engine takes at most 16"):
        llm.load_lora("c", str(with_rank(folder / "rslora", 40)))


def with_rank(path: Path, rank: int) -> Path:
    target = path.with_name(f"rank-{rank}")
    shutil.copytree(path, target)
    tensors = load_file(target / "adapter_model.safetensors")
    resized = {
        key: torch.zeros(rank, tensor.shape[1]) if "lora_A" in key else torch.zeros(tensor.shape[0], rank)
        for key, tensor in tensors.items()
    }
    save_file(resized, target / "adapter_model.safetensors")
    return target


def test_the_same_content_is_the_same_adapter(folder: Path) -> None:
    first, again = (read_adapter(folder / "every", name) for name in ("x", "y"))
    assert first.content_id == again.content_id != read_adapter(folder / "rslora", "x").content_id
    assert read_adapter(folder / "rslora", "x").modules["model.layers.0.self_attn.k_proj"].scale == 2.0


def test_names_of_a_multimodal_model(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "rslora", tmp_path, dirs_exist_ok=True)
    file, plain = tmp_path / "adapter_model.safetensors", read_adapter(tmp_path, "x")
    save_file({k.replace(".layers.", ".language_model.layers."): v for k, v in load_file(file).items()}, file)
    assert read_adapter(tmp_path, "x").content_id == plain.content_id


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA is supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    shutil.copytree(folder / "rslora", tmp_path / "changed")
    path = tmp_path / "changed" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=f"adapter 'mine': {message}"):
        read_adapter(tmp_path / "changed", "mine")


def test_flags_that_exclude_adapters() -> None:
    with pytest.raises(ValueError, match=r"max_loras_per_batch=8\) do not work with tp=2"):
        LLM("tiny-dense", tp=2, lora_paths={"a": "somewhere"})
    with pytest.raises(ValueError, match="takes no LoRA adapters: give lora_paths or max_loras_per_batch"):
        LLM("tiny-dense", device="cpu", max_total_tokens=64).load_lora("a", "somewhere")
