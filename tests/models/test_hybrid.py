"""Models with linear attention against transformers in float32, by hand and in the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import build_model, greedy, hf_greedy, load_saved, random_hf_model
from safetensors.torch import load_file, save_file

from diptych.reference.layers import Linear
from diptych.shared.config import parse_config, read_config
from diptych.shared.engine.llm import LLM
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weights import iterate_weights
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS
from diptych.shared.types import DiffusionParams, SamplingParams
from tests.planted import Bug, Bugs

# transformers computes prompts in chunks, in float32: its logits of size 19 are up to 1.1e-3 from those of
# our recurrence in float64, ours in float32 up to 2.2e-4. A wrong model is 1e-1 away (`test_wrong_models`).
TOLERANCE = 3e-3
NUM_NEW = 16


def prompt_of(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 331, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("name", HYBRID_CONFIGS)
def test_logits_and_greedy_text(name: str, tmp_path: Path) -> None:
    """A whole prompt, then one in chunks of one token, some, and the rest."""
    hf_model, prompt = random_hf_model(HYBRID_CONFIGS[name]), prompt_of(80)
    model = load_saved(hf_model, tmp_path)
    expected_ids, expected = hf_greedy(hf_model, prompt, NUM_NEW)
    for chunks in ((), (1, 33)):
        ids, logits = greedy(model, prompt, NUM_NEW, chunks)
        torch.testing.assert_close(logits, expected, rtol=0.0, atol=TOLERANCE)
        assert ids == expected_ids


@pytest.mark.parametrize("name", HYBRID_CONFIGS)
def test_rounding(name: str, tmp_path: Path) -> None:
    """Our logits in float32 and those of transformers, against our recurrence in float64."""
    hf_model, prompt = random_hf_model(HYBRID_CONFIGS[name]), prompt_of(80)
    ours = greedy(load_saved(hf_model, tmp_path), prompt, NUM_NEW)[1]
    config = read_config(tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        exact = build_model(config)
    finally:
        torch.set_default_dtype(torch.float32)
    exact.load_weights(iterate_weights(tmp_path, config))
    expected = greedy(exact, prompt, NUM_NEW)[1]
    assert (ours - expected).abs().max() < 3e-4
    assert (hf_greedy(hf_model, prompt, NUM_NEW)[1] - expected).abs().max() < 1.5e-3


@pytest.mark.parametrize(
    "changes",
    [
        {"linear": {"num_k_heads": 6, "k_head_dim": 4}},
        {"rope": {"rotary_dim": 24}},
        {"moe": {"shared_expert_gate": False}},
        {"norm_unit_offset": False},
    ],
    ids=str,
)
def test_wrong_models(changes: dict[str, Any], tmp_path: Path) -> None:
    """The tolerance has teeth: a part of the config that is ignored moves logits beyond it."""
    hf_model, prompt = random_hf_model(HYBRID_CONFIGS["qwen3-next"]), prompt_of(20)
    hf_model.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert config.linear_attention is not None
    assert config.moe is not None
    fields: dict[str, Any] = {
        "linear": ("linear_attention", config.linear_attention),
        "rope": ("rope", config.rope),
        "moe": ("moe", config.moe),
    }
    wrong = config
    for key, value in changes.items():
        if key in fields:
            name, old = fields[key]
            wrong = replace(wrong, **{name: replace(old, **value)})
        else:
            wrong = replace(wrong, **{key: value})
    model = build_model(wrong)
    names = dict(model.named_parameters())
    model.load_weights((n, t) for n, t in iterate_weights(tmp_path, config) if n in names or "experts" in n)
    difference = greedy(model, prompt, 1)[1] - hf_greedy(hf_model, prompt, 1)[1]
    assert difference.abs().max() > 30 * TOLERANCE


BUGS = Bugs("models with linear attention")
_MODEL, _CONFIG = "reference.models.kimi_linear", "shared.config.hf_linear_attention"
for _name, _before, _after in (
    ("SiluGate", "torch.sigmoid(z)", "F.silu(z)"),
    ("DecayOfValues", "unflatten(1, (len(self.A_log), -1))", "unflatten(1, (-1, len(self.A_log))).mT"),
):
    _where = f"diptych.{_MODEL}.KimiLinearDecoderLayer.linear_attention_class"
    BUGS.words(_name, f"{_MODEL}:KimiDeltaAttention", (_MODEL, _before, _after), where=_where)
for _name, _before, _after in (
    ("LayersCountFrom0", "frozenset(layer - 1 for", "frozenset(layer for"),
    ("LatentAttentionRotates", "nope_layers=frozenset(range(num_layers))", "nope_layers=frozenset()"),
):
    _where = "diptych.shared.config.hf_config.parse_config"
    BUGS.words(_name, "shared.config.hf_config:parse_config", (_CONFIG, _before, _after), where=_where)


_MODEL = "reference.models.qwen_next"
for _name, _of, _where, _before, _after in (
    (
        "GatesBehindAllQ",
        "GatedAttention",
        "attention",
        "-1, layer.num_qo_heads, 2 * layer.head_dim).chunk(2, dim=-1)",
        "-1, 2 * layer.num_qo_heads, layer.head_dim).chunk(2, dim=1)",
    ),
    ("OnePlusWeight", "GatedDeltaNet", "linear_attention", "* self.norm.weight", "* (1 + self.norm.weight)"),
):
    _where = f"diptych.{_MODEL}.QwenNextDecoderLayer.{_where}_class"
    BUGS.words(_name, f"{_MODEL}:{_of}", (_MODEL, _before, _after), where=_where)


@BUGS.found_by(AssertionError, ValueError, honest=True)
def test_wrong_parts(bug: Bug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.plant_in(monkeypatch)
    for name in ("kimi-linear", "qwen3.5"):
        hf_model, prompt = random_hf_model(HYBRID_CONFIGS[name]), prompt_of(20)
        ours = greedy(load_saved(hf_model, tmp_path / name), prompt, 1)[1]
        assert (ours - hf_greedy(hf_model, prompt, 1)[1]).abs().max() < TOLERANCE


PROMPT_LENS = (70, 51, 33, 1)
MIXED = {"chunked_prefill_size": 24, "enable_mixed_chunk": True}


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        *(
            pytest.param(name, {"page_size": page_size, **flags}, marks=[] if is_fast else pytest.mark.full)
            for name in HYBRID_CONFIGS
            for page_size in (1, 4, 16)
            for flags in ({}, MIXED, {"chunked_prefill_size": 40})
            for is_fast in [flags is MIXED and page_size == 4 and name in ("qwen3-next", "kimi-linear")]
        ),
        # memory is short: requests are retracted and computed again
        ("qwen3.5", {"page_size": 1, "max_total_tokens": 180, "schedule_conservativeness": 0.01}),
    ],
    ids=str,
)
def test_engine(name: str, flags: dict[str, Any], tmp_path: Path) -> None:
    """Twice: a second run finds rows that earlier requests have used."""
    hf_model = random_hf_model(HYBRID_CONFIGS[name])
    hf_model.save_pretrained(tmp_path)
    prompts = [prompt_of(n, seed=n) for n in PROMPT_LENS]
    expected = [hf_greedy(hf_model, prompt, NUM_NEW)[0] for prompt in prompts]
    fields = {"max_total_tokens": 1024, "check_invariants": True, **flags}
    llm = LLM(model=str(tmp_path), device="cpu", panel="reference", **fields)
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    for num_cached in (0, 64):
        outputs = llm.generate(prompts, params, progress=False)
        assert [output.output_ids for output in outputs] == expected
        assert [output.num_cached_tokens for output in outputs] == [num_cached, 0, 0, 0]
    if "schedule_conservativeness" in flags:
        assert llm.scheduler.stats().num_retractions > 0


GRAPHS = "tests.model_runner.fake_graphs:FakeGraphsRunner"


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        pytest.param(
            "qwen3.5",
            {"page_size": 4, "chunked_prefill_size": 12, "use": {"model_runner": GRAPHS}},
            marks=pytest.mark.full,
        ),
        ("kimi-linear", {"page_size": 4, "chunked_prefill_size": 12, "use": {"model_runner": GRAPHS}}),
        *(
            pytest.param(
                name,
                {"page_size": 4, **MIXED},
                marks=pytest.mark.full,
            )
            for name in HYBRID_CONFIGS
        ),
        pytest.param("kimi-linear", {"page_size": 16, "max_total_tokens": 112}, marks=pytest.mark.full),
        pytest.param("qwen3.5-moe", {"page_size": 16, "max_total_tokens": 112}, marks=pytest.mark.full),
        pytest.param(
            "qwen3.5-moe",
            {"page_size": 16, "max_total_tokens": 112, "use": {"model_runner": GRAPHS}},
            marks=pytest.mark.full,
        ),
        pytest.param("qwen3-next", {"num_continuous_decode_steps": 3, "use": {"model_runner": GRAPHS}}),
        pytest.param(
            "qwen3-next",
            {"disable_overlap_schedule": True, "use": {"model_runner": GRAPHS}},
            marks=pytest.mark.full,
        ),
        pytest.param("qwen3-next", {"use": {"linear_attention": "reference"}}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_optimized_engine(name: str, flags: dict[str, Any], tmp_path: Path) -> None:
    """Prompts in chunks and mixed steps, whose states go on in the recurrent form, also in graphs."""
    hf_model = random_hf_model(HYBRID_CONFIGS[name])
    hf_model.save_pretrained(tmp_path)
    prompts = [
        prompt_of(n, seed=n) for n in ((17,) if flags.get("chunked_prefill_size") == 12 else PROMPT_LENS)
    ]
    expected = [hf_greedy(hf_model, prompt, 4)[0] for prompt in prompts]
    fields = {"max_total_tokens": 1024, "max_running_requests": 8, "check_invariants": True, **flags}
    llm = LLM(model=str(tmp_path), device="cpu", panel="optimized", cuda_graph_bs=(2, 8), **fields)
    params = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts, params, progress=False)
    assert [output.output_ids for output in outputs] == expected
    runner: Any = llm.assembly.parts.model_runner
    assert (runner.replays.steps > 0) == ("model_runner" in flags.get("use", {}))


def test_aborted_requests_leave_nothing(tmp_path: Path) -> None:
    hf_model = random_hf_model(HYBRID_CONFIGS["qwen3.5"])
    hf_model.save_pretrained(tmp_path)
    prompt = prompt_of(33)
    expected = hf_greedy(hf_model, prompt, NUM_NEW)[0]
    llm = LLM(
        model=str(tmp_path), device="cpu", panel="reference", max_total_tokens=512, max_running_requests=1
    )
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    for steps in (1, 2, 5):
        collector = llm.submit(prompt_of(40, seed=steps), params)[0]
        for _ in range(steps):
            llm.step()
        llm.abort(collector.rid)
        assert llm.generate([prompt], params, progress=False)[0].output_ids == expected


def test_quantized_weights(tmp_path: Path) -> None:
    """The convolution stays as it is; results are those of the dequantized weights."""
    random_hf_model(HYBRID_CONFIGS["qwen3.5"]).save_pretrained(tmp_path)
    flags: dict[str, Any] = {"device": "cpu", "panel": "reference", "max_total_tokens": 64}
    quantized, plain = (LLM(model=str(tmp_path), quantization=q, **flags) for q in ("int4", None))
    modules: dict[str, Any] = dict(quantized.assembly.model.named_modules())
    for name, module in plain.assembly.model.named_modules():
        if isinstance(module, Linear) and name != "lm_head":
            module.weight.data = modules[name].dequantized_weight()
    found = []
    for llm in (quantized, plain):
        output = llm.generate(prompt_of(20), max_tokens=1, return_logprob=True, logprob_start_len=0)
        found.append(torch.tensor([token.logprob for token in output.input_logprobs[1:]]))
    torch.testing.assert_close(*found, rtol=0.0, atol=TOLERANCE)  # sums of groups have another order


REFUSED: list[dict[str, Any]] = [
    {"speculative": "ngram"},  # with trees
    {"hicache_tokens": 64, "hicache_dir": "kv"},
    {"pp": 2},
]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        *(("qwen3.5", flags) for flags in REFUSED),
        ("kimi-linear", {"quantization": "fp8"}),
        ("kimi-linear", {"max_loras_per_batch": 2}),
    ],
    ids=str,
)
def test_what_does_not_work_is_refused_by_name(name: str, flags: dict[str, Any], tmp_path: Path) -> None:
    random_hf_model(HYBRID_CONFIGS[name]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="linear attention"):
        LLM(model=str(tmp_path), device="cpu", max_total_tokens=64, **{"panel": "reference", **flags})


def test_block_diffusion_is_refused(tmp_path: Path) -> None:
    random_hf_model(HYBRID_CONFIGS["qwen3.5"]).save_pretrained(tmp_path)
    flags: dict[str, Any] = {"device": "cpu", "panel": "reference", "page_size": 4}
    llm = LLM(model=str(tmp_path), max_total_tokens=64, **flags)
    params = SamplingParams(temperature=0.0, max_new_tokens=4)
    with pytest.raises(ValueError, match="do not work with linear attention"):
        llm.generate([[1, 2, 3]], params, diffusion=DiffusionParams(block_len=4, mask_id=5), progress=False)


_KDA = HYBRID_CONFIGS["kimi-linear"]["linear_attn_config"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "no layer has full attention"),
        ({"layer_types": ["linear_attention", "mamba", "mamba", "full_attention"]}, "layer_types is"),
        ({"linear_num_value_heads": 5}, r"linear_num_value_heads \(5\) is no multiple"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim is null"),
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"moe_router_activation_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"linear_attn_config": {**_KDA, "kda_layers": [0, 2, 3]}}, r"must name layers 1 to 5.*\[0, 2, 3\]"),
        ({"linear_attn_config": {**_KDA, "num_heads": None}}, "linear_attn_config: num_heads is null"),
    ],
    ids=str,
)
def test_wrong_configs(changes: dict[str, Any], message: str) -> None:
    is_kimi = set(changes) & set(HYBRID_CONFIGS["kimi-linear"])
    with pytest.raises(ValueError, match=message):
        parse_config({**HYBRID_CONFIGS["kimi-linear" if is_kimi else "qwen3.5"], **changes})


@pytest.mark.parametrize("name", ["qwen3-next", "kimi-linear"])
def test_a_rank_reads_its_part_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Whose rows lie key head by key head, or which has A_log in four dimensions."""
    changes = {"linear_attn_config": _KDA | {"num_heads": 4}} if name == "kimi-linear" else {}
    random_hf_model(HYBRID_CONFIGS[name] | changes).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    whole = dict(iterate_weights(tmp_path, config))
    for rank in range(2):
        shards = Shards(config, rank, 2)
        parts = dict(iterate_weights(tmp_path, config, shards=shards))
        assert parts.keys() == whole.keys()
        for weight, part in parts.items():
            assert torch.equal(part, shards.cut(weight, whole[weight]))


def test_checkpoints_as_published(tmp_path: Path) -> None:
    """Names of a multimodal checkpoint, with tensors for images and for drafting."""
    hf_model, prompt = random_hf_model(HYBRID_CONFIGS["qwen3.5"]), prompt_of(9)
    expected = greedy(load_saved(hf_model, tmp_path), prompt, 3)
    path = tmp_path / "model.safetensors"
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(path).items()
    }
    extra = {"model.visual.blocks.0.norm1.weight": torch.zeros(4), "mtp.fc.weight": torch.zeros(4, 8)}
    save_file({**tensors, **extra}, path, metadata={"format": "pt"})
    text_config = {k: v for k, v in HYBRID_CONFIGS["qwen3.5"].items() if k != "architectures"}
    config = parse_config(
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text_config}, "config.json"
    )
    model = build_model(config)
    model.load_weights(iterate_weights(tmp_path, config))
    ids, logits = greedy(model, prompt, 3)
    assert ids == expected[0]
    assert torch.equal(logits, expected[1])
