"""LoRA adapters of models with linear attention: PEFT's answers, and states under the adapter's namespace."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import random_hf_model
from transformers import AutoModelForCausalLM

from diptych.optimized.kernels.portable import INTERPRETED
from diptych.shared.config import parse_config
from diptych.shared.engine.llm import LLM
from diptych.shared.loading.lora_adapter import fit_model
from diptych.shared.scheduling import state_checkpoints
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS
from diptych.shared.types import SamplingParams
from diptych.shared.types.lora import LoraAdapter, LoraWeights
from tests.planted import Bug, Bugs

NUM_NEW = 6
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS: dict[str, Any] = {
    "qwen3.5": "all-linear",
    "qwen3-next": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"],
}
PROMPTS = [[(7 * j + 5 * i) % 331 for j in range(20)] for i in range(2)]


@cache
def written(root: Path, name: str) -> dict[str | None, list[list[int]]]:
    """A model and two adapters below `root`, and PEFT's greedy tokens for each adapter and for none."""
    peft = pytest.importorskip("peft")
    model = random_hf_model(HYBRID_CONFIGS[name])
    for key, parameter in model.named_parameters():
        if key.endswith("A_log"):
            parameter.data.sub_(6.0)  # states decay slowly: answers depend on them
    model.save_pretrained(root / "model")
    found = {None: [greedy(load(root), prompt) for prompt in PROMPTS]}
    for seed, adapter in enumerate(("a", "b")):
        fields = {"r": 5 + seed, "lora_alpha": 7, "target_modules": TARGETS[name]}
        model = peft.get_peft_model(load(root), peft.LoraConfig(task_type="CAUSAL_LM", **fields))
        generator = torch.Generator().manual_seed(seed)
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.data.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        model.save_pretrained(root / adapter)
        found[adapter] = [greedy(model.eval(), prompt) for prompt in PROMPTS]
    assert len({str(tokens) for tokens in found.values()}) == 3
    return found


def load(root: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        root / "model", dtype=torch.float32, attn_implementation="eager"
    )
    model.config._experts_implementation = "eager"
    return model.eval()


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        while len(ids) < len(prompt) + NUM_NEW:
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(autouse=True)
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_checkpoints, "GRID", 8)
    monkeypatch.setattr(state_checkpoints, "ROLLING", 16)


def engine(root: Path, **flags: Any) -> LLM:
    flags = {"panel": "reference", "max_total_tokens": 512, "check_invariants": True, **flags}
    paths = {name: str(root / name) for name in ("a", "b")}
    return LLM(str(root / "model"), device="cpu", lora_paths=paths, max_kept_states=16, **flags)


def answers(
    llm: LLM, prompts: list[list[int]] = PROMPTS, num_new: int = NUM_NEW, retracts: bool = False
) -> tuple[Any, list[int]]:
    """All adapters side by side; and the numbers of cached tokens."""
    params = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
    live = {
        (name, i): llm.submit(p, params, lora=name)[0]
        for i, p in enumerate(prompts)
        for name in (None, "a", "b")
    }
    steps = 0
    while llm.step():
        steps += 1
        if retracts and steps % 3 == 0:
            llm.scheduler.retract(next((each.rid for each in live.values() if not each.is_finished), ""))
    found = {name: [live[name, i].output_ids for i in range(len(prompts))] for name in (None, "a", "b")}
    return found, [each.num_cached_tokens for each in live.values()]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        pytest.param("qwen3.5", {}, marks=pytest.mark.full),
        ("qwen3-next", {"chunked_prefill_size": 9, "enable_mixed_chunk": True, "page_size": 4}),
        ("qwen3.5", {"speculative": "ngram", "speculative_topk": 1, "max_loras_per_batch": 1}),
    ],
    ids=str,
)
def test_answers_are_those_of_peft(name: str, flags: dict[str, Any], root: Path) -> None:
    """The same prompt under each adapter. A second run has hits, each in its own namespace."""
    folder = root / name
    expected, llm = written(folder, name), engine(root / name, **flags)
    found, hits = answers(llm)
    assert found == expected
    assert hits == [0] * 6
    found, hits = answers(llm, retracts=True)
    assert found == expected
    assert hits == [16] * 6


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on CPU tensors")
@pytest.mark.parametrize("name", ["qwen3.5", pytest.param("qwen3-next", marks=pytest.mark.full)])
def test_optimized_panel(name: str, root: Path) -> None:
    expected = written(root / name, name)
    llm = engine(root / name, panel="optimized", use={"attention": "reference"}, max_running_requests=3)
    found = answers(llm, PROMPTS[:1], num_new=2)[0]
    assert found == {key: [tokens[0][:2]] for key, tokens in expected.items()}


BUGS = Bugs("adapters of linear attention")
_LORA, _DIGESTS = "shared.loading.lora_adapter", state_checkpoints.StateCheckpoints.digests
BUGS.add(
    "StatesOfAllAdapters",
    lambda self, token_ids, extra_key: _DIGESTS(self, token_ids, None),
    where="diptych.shared.scheduling.state_checkpoints.StateCheckpoints.digests",
)
BUGS.words(
    "RowsAsStored",
    f"{_LORA}:fit_model",
    (_LORA, "b=part.of(weights.b)", "b=weights.b[: part.shape[0]]"),
    where="diptych.shared.engine.requests.lora_adapters.fit_model",
)


@BUGS.found_by(honest=True)
def test_a_wrong_adapter_is_another_answer(bug: Bug, root: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    folder = root / "qwen3-next"
    expected = written(folder, "qwen3-next")
    bug.plant_in(monkeypatch)
    llm = engine(folder)
    return any(answers(llm)[0] != expected for _ in range(2))


def test_modules_without_adapters_are_refused_by_name(root: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    written(root / "qwen3-next", "qwen3-next")
    config = peft.LoraConfig(r=2, target_modules=["shared_expert_gate"], task_type="CAUSAL_LM")
    peft.get_peft_model(load(root / "qwen3-next"), config).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"shared_expert_gate.*in_proj_qkv, .*in_proj_ba of linear attention"
    ):
        engine(root / "qwen3-next").load_lora("c", str(tmp_path))


@pytest.mark.parametrize(("module", "num_out"), [("in_proj_qkvz", 288), ("in_proj_ba", 12)])
def test_a_wrong_size_of_a_grouped_layer_is_said(module: str, num_out: int) -> None:
    config, name = parse_config(HYBRID_CONFIGS["qwen3-next"]), f"model.layers.0.linear_attn.{module}"
    for wrong in (num_out - 1, num_out):
        weights = LoraWeights(torch.zeros(2, 60), torch.zeros(wrong, 2), 1.0)
        adapter = LoraAdapter("c", "", {name: weights})
        if wrong == num_out:
            assert len(fit_model(adapter, config).modules) == 2
            continue
        with pytest.raises(ValueError, match=rf"lora_B \[{wrong}, 2\] does not fit {name} \[{num_out}, 60\]"):
            fit_model(adapter, config)
