"""Models with linear attention on a GPU: random small checkpoints, the optimized panel against the reference.

`HYBRID_CONFIGS` have heads of odd sizes; `WIDE` has those of published models, 128 columns of k and v."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.optimized.linear_attention import LinearAttention
from diptych.shared.config import parse_config
from diptych.shared.engine.llm import LLM
from diptych.shared.loading.weight_names import expected_shapes
from diptych.shared.tools.conformance.contracts.linear_attention.recurrence import expect_recurrence
from diptych.shared.tools.conformance.diff.lockstep import Lockstep
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS
from diptych.shared.tools.conformance.oracles.linear_batches import LinearCase
from diptych.shared.types import GenerateOutput, SamplingParams
from tests.engine.deterministic_answers import expect_same_bits

from .harness import computed_once, name_of, optimized

pytestmark = pytest.mark.gpu

WIDE: dict[str, Any] = {
    **HYBRID_CONFIGS["qwen3.5"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_parameters": {**HYBRID_CONFIGS["qwen3.5"]["rope_parameters"], "mrope_section": [6, 5, 5]},
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
CONFIGS = {**HYBRID_CONFIGS, "wide": WIDE}
PROMPT_LENS = (70, 51, 33, 1, 130)
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
FLAGS: tuple[dict[str, Any], ...] = (
    {},
    {"page_size": 4, "chunked_prefill_size": 24, "enable_mixed_chunk": True},
    {"chunked_prefill_size": 1},
    {"page_size": 16, "chunked_prefill_size": 40},
    {"max_total_tokens": 300, "schedule_conservativeness": 0.01},  # memory is short: retraction
)


def prompts_of(*lens: int) -> list[list[int]]:
    generators = [torch.Generator().manual_seed(n) for n in lens]
    return [torch.randint(0, 331, (n,), generator=each).tolist() for n, each in zip(lens, generators)]


def write_checkpoint(folder: Path, name: str) -> Path:
    """Logits with a spread of some units, and in some heads a decay that is slow."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    generator, tensors = torch.Generator().manual_seed(0), {}
    for key, shape in expected_shapes(parse_config(CONFIGS[name])).items():
        mean, std = 0.0, 1.5 * shape[-1] ** -0.5
        if len(shape) == 1:
            mean, std = {"A_log": (-2.0, 2.0)}.get(key.rpartition(".")[2], (0.0, 0.2))
            mean += float(key.endswith("linear_attn.norm.weight") or ("kimi" in name and "norm" in key))
        elif "embed" in key or "lm_head" in key:
            std = 0.3 * (60 / shape[-1]) ** 0.5
        tensors[key] = torch.empty(shape).normal_(mean, std, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hybrid")
    return {name: str(write_checkpoint(folder / name, name)) for name in CONFIGS}


def of_reference(model: str, device: str = "cpu", **flags: Any) -> LLM:
    return LLM(model=model, device=device, panel="reference", **{"max_total_tokens": 2048, **flags})


def of_optimized(model: str, dtype: str = "float32", **flags: Any) -> LLM:
    return optimized(model, "triton", dtype=dtype, **{"max_total_tokens": 2048, **flags})


@computed_once
def expected_answers(name: str) -> tuple[GenerateOutput, ...]:
    """Answers of the reference on the CPU, with the log-probability of each token."""
    params = GREEDY.updated(return_logprob=True)
    with TemporaryDirectory() as folder:
        llm = of_reference(str(write_checkpoint(Path(folder, name), name)), dtype="float32")
        return tuple(llm.generate(prompts_of(*PROMPT_LENS), params, progress=False))


def logprobs(output: GenerateOutput) -> torch.Tensor:
    return torch.tensor([each.logprob for each in output.output_logprobs])


ANSWERS = [("wide", flags) for flags in FLAGS] + [(name, FLAGS[1]) for name in HYBRID_CONFIGS]


@pytest.mark.parametrize(("name", "flags"), ANSWERS, ids=name_of)
def test_float32_answers_are_the_references(
    name: str, flags: dict[str, Any], folders: dict[str, str]
) -> None:
    """Twice: the second run finds rows that others have used, and states in the prefix cache."""
    llm, expected = of_optimized(folders[name], check_invariants=True, **flags), expected_answers(name)
    params = GREEDY.updated(return_logprob=True)
    for i in range(2):
        outputs = llm.generate(prompts_of(*PROMPT_LENS), params, progress=False)
        for found, wanted in zip(outputs, expected):
            assert found.output_ids == wanted.output_ids
            torch.testing.assert_close(logprobs(found), logprobs(wanted), rtol=0.0, atol=3e-3)
        if "schedule_conservativeness" not in flags:
            assert [output.num_cached_tokens > 0 for output in outputs] == [
                i > 0 and n > 64 for n in PROMPT_LENS
            ]
    runner: Any = llm.assembly.parts.model_runner
    assert runner.replays.steps > 0
    if "schedule_conservativeness" in flags:
        assert llm.scheduler.stats().num_retractions > 0


OPS = [(name, FLAGS[0]) for name in CONFIGS] + [("wide", FLAGS[1])]


@pytest.mark.parametrize(("name", "flags"), OPS, ids=name_of)
def test_float32_ops_are_the_references(name: str, flags: dict[str, Any], folders: dict[str, str]) -> None:
    """Op by op: whole prompts, then mixed steps."""
    a = of_reference(folders[name], "cuda", dtype="float32")
    b = of_optimized(folders[name], **flags)
    outcome = Lockstep(a, b, labels=("reference", "optimized")).run(prompts_of(*PROMPT_LENS), GREEDY)
    assert outcome.divergence is None, outcome.divergence.rows()
    assert outcome.finished
    assert outcome.num_tokens > 250


DRAFTS = {"speculative": "ngram", "speculative_topk": 1, "speculative_num_steps": 3}
DETERMINISTIC: tuple[dict[str, Any], ...] = (FLAGS[1], FLAGS[4], DRAFTS)


@pytest.mark.parametrize("flags", DETERMINISTIC, ids=name_of)
def test_deterministic_answers_have_the_bits_of_a_cold_request(
    flags: dict[str, Any], folders: dict[str, str]
) -> None:
    """Crowded, and with hits of the prefix cache; decode and verify steps in graphs."""
    fields = {"deterministic": True, "dtype": "bfloat16", "max_total_tokens": 2048}
    prompts, params = prompts_of(*PROMPT_LENS), GREEDY.updated(return_logprob=True)
    cold = optimized(folders["wide"], **{**fields, "disable_radix_cache": True})
    alone = [cold.generate(prompt, params, progress=False) for prompt in prompts]
    llm = optimized(folders["wide"], **{**fields, **flags})
    for _ in range(2):
        outputs = llm.generate(prompts, params, progress=False)
        expect_same_bits("beside others", outputs, alone)  # type: ignore[arg-type]
    assert any(output.num_cached_tokens > 0 for output in outputs)


def test_retracted_and_aborted_requests_leave_nothing(folders: dict[str, str]) -> None:
    llm, (prompt,) = of_optimized(folders["wide"], check_invariants=True), prompts_of(PROMPT_LENS[0])
    expected = expected_answers("wide")[0].output_ids
    for steps in (1, 2, 3, 6):
        collector = llm.submit(prompt, GREEDY)[0]
        for _ in range(steps):
            llm.step()
        llm.scheduler.retract(collector.scheduler_rid)
        while llm.scheduler.has_work():
            llm.step()
        assert collector.output_ids == expected
        collector = llm.submit(prompts_of(80 + steps)[0], GREEDY)[0]
        for _ in range(steps):
            llm.step()
        llm.abort(collector.rid)
        assert llm.generate([prompt], GREEDY, progress=False)[0].output_ids == expected


LONG_PROMPTS, SHORT_PROMPTS = (240, 230, 220, 64, 129), (90, 40, 60)
LARGEST_FACTOR = 1.25
"""The optimized panel's error in bfloat16 as a multiple of the reference's: one rounds before a sum, another
behind it. Models without experts: behind a router's near tie errors are of any size."""


@pytest.mark.parametrize("chunk", [None, 1], ids=["chunks", "recurrence"])
@pytest.mark.parametrize("name", ["wide", "qwen3.5"])
def test_bfloat16_errs_no_more_than_the_reference(
    name: str, chunk: int | None, folders: dict[str, str]
) -> None:
    """Log-probabilities of the tokens of prompts, against those of the same weights in float32. With prompts
    token by token a small set is enough: the forms differ in the recurrence alone."""
    prompts = prompts_of(*(LONG_PROMPTS if chunk is None else SHORT_PROMPTS))
    params = SamplingParams(max_new_tokens=1, temperature=0.0, return_logprob=True, logprob_start_len=0)
    folder = Path(folders[name], "bfloat16")
    exact_folder = Path(folders[name], "rounded")
    round_weights(Path(folders[name]), folder, exact_folder)

    def of_prompts(llm: LLM) -> torch.Tensor:
        outputs = llm.generate(prompts, params, progress=False)
        return torch.tensor([each.logprob for output in outputs for each in output.input_logprobs[1:]])

    exact = of_prompts(of_reference(str(exact_folder), "cuda", dtype="float32"))
    reference = of_prompts(of_reference(str(folder), "cuda", dtype="bfloat16"))
    found = of_prompts(of_optimized(str(folder), "bfloat16", chunked_prefill_size=chunk))
    error, limit = (each.sub(exact).abs().median().item() for each in (found, reference))
    print(f"{name}: median error {error:.4f}, the reference's {limit:.4f}")
    assert error <= LARGEST_FACTOR * limit


def round_weights(folder: Path, rounded: Path, exact: Path) -> None:
    """The checkpoint in bfloat16, and the same values in float32."""
    for target, dtype in ((rounded, torch.bfloat16), (exact, torch.float32)):
        target.mkdir(exist_ok=True)
        (target / "config.json").write_text((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        tensors = {name: tensor.to(torch.bfloat16).to(dtype) for name, tensor in weights.items()}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def case(name: str, *steps: tuple[int, ...], **fields: Any) -> LinearCase:
    sizes = {"num_k_heads": 2, "num_v_heads": 4, "k_head_dim": 128, "v_head_dim": 128, "decay": 0.05}
    return LinearCase(name, steps=steps, **{**sizes, **fields})


LARGE = (
    case("2048 tokens", (2048,)),
    case("2048 tokens that decay fast", (2048,), decay=20.0),
    case("2048 tokens, bfloat16", (2048,), dtype=torch.bfloat16),
    case("chunks of a prompt", (700,), (64,), (1,), (135,)),
    case("64 requests", tuple(3 + i % 70 for i in range(64)), (1,) * 64, (1,) * 64, num_v_heads=2),
    case(
        "64 requests, mixed",
        (40,) * 64,
        tuple(1 + i % 3 * 5 for i in range(64)),
        num_k_heads=1,
        num_v_heads=2,
    ),
    case("64 requests, bfloat16", (2,) * 64, (1,) * 64, num_v_heads=2, dtype=torch.bfloat16),
)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_kernels_against_the_recurrence(case: LinearCase) -> None:
    """In float64, at the sizes of published models."""
    expect_recurrence(LinearAttention, case)
