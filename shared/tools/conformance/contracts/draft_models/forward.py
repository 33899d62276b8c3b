"""Clauses of draft models: drafts from the target's hidden states, and from their own."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config import DraftConfig, ModelConfig, parse_config, parse_draft_config
from diptych.shared.interfaces import CausalLM, DraftModel, DraftOutput
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.loading.draft_weights import dummy_draft_weights
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import (
    expect_close,
    expect_equal,
    expect_form,
    expect_true,
)
from diptych.shared.tools.conformance.clauses.device import building, check_device
from diptych.shared.tools.conformance.clauses.inputs import HALF_TYPES, Inputs, type_name
from diptych.shared.tools.conformance.clauses.poison import run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import EXACT, tolerance
from diptych.shared.tools.conformance.contracts.models.logits import make_model
from diptych.shared.tools.conformance.contracts.models.weights import expect_refused
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.tools.conformance.oracles.model_session import ModelSession
from diptych.shared.types import ForwardMode

DraftModels = Any
"""A module (or namespace) with `draft_model_class(draft_format)`."""

FORMATS = ("eagle", "eagle3", "nextn", "dflash")

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle, llama3 rope": ("llama-llama3", {"architectures": ["LlamaForCausalLMEagle"]}),
    "eagle, two layers with biases": (
        "qwen2-yarn",
        {"architectures": ["Qwen2ForCausalLMEagle"], "num_hidden_layers": 2},
    ),
    "eagle3, a part of the vocabulary": (
        "llama-llama3",
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 97,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        },
    ),
    "eagle3, the whole vocabulary, heads of its own": (
        "mixtral",
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "intermediate_size": 50,
            "attention_bias": True,
            "rope_theta": 500.0,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0]},
        },
    ),
    "eagle3, a normed residual stream": (
        "qwen3-yarn",
        {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "norm_before_residual": True,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
        },
    ),
    "eagle3, one norm before fc, fed back normed": (
        "qwen2-yarn",
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "norm_output": True,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1], "norm_before_fc": True},
        },
    ),
    "eagle3, a norm for each layer, by speculators": (
        "llama-llama3",
        {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3"},
            "eagle_aux_hidden_state_layer_ids": [0, 2, 3],
            "fc_norm": True,
            "transformer_layer_config": {"model_type": "llama", "num_attention_heads": 5, "head_dim": 20},
        },
    ),
    "eagle3, the target's last hidden states": (
        "qwen3-yarn",
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"use_aux_hidden_state": False},
        },
    ),
    "dflash, norms on heads": (
        "llama-llama3",
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "block_size": 6,
            "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 0]},
        },
    ),
    "dflash, biases, one layer of the target": (
        "qwen3-yarn",
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "llama",
            "attention_bias": True,
            "num_hidden_layers": 1,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "block_size": 4,
            "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0]},
        },
    ),
    "nextn, norms on heads": ("qwen3-yarn", {"architectures": ["Qwen3ForCausalLMNextN"]}),
    "nextn, experts": (
        "qwen3-moe",
        {
            **CONFIGS["qwen3-moe"],
            "architectures": ["Qwen3MoeForCausalLMNextN"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "nextn, latent attention, experts": (
        "deepseek-v3",
        {**CONFIGS["deepseek-v3"], "architectures": ["DeepseekV3ForCausalLMNextN"]},
    ),
}
"""name -> the target (see `CONFIGS`), and the draft model's config.json"""


class Head(Case):
    """A draft model of `HEADS`, a prompt cut into chunks of these lengths, and the number of drafted
    tokens."""

    chunks: tuple[int, ...] = (20,)
    num_drafted: int = 3
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def check(self) -> None:
        if not self.chunks or min(self.chunks) < 1 or self.num_drafted < 0:
            raise ValueError("a prompt has at least one token")

    @property
    def target_config(self) -> ModelConfig:
        return parse_config(CONFIGS[HEADS[self.head][0]])

    def config(self) -> DraftConfig:
        return parse_draft_config(HEADS[self.head][1], self.target_config)


HEADS_ONCE = tuple(Head(name, head=name) for name in HEADS)
HEADS_CHUNKED = tuple(Head(f"{name}, chunks", head=name, chunks=(1, 13, 20)) for name in HEADS)
HEADS_HALF = tuple(
    Head(f"{name}, {type_name(dtype)}", head=name, dtype=dtype)
    for name in HEADS
    for dtype in HALF_TYPES
    if "experts" not in name  # a rounded router logit may choose another expert
)


def new_draft(
    impl: DraftModels, config: DraftConfig, dtype: torch.dtype = torch.float32, device: str | None = None
) -> DraftModel:
    """A draft model without weights, with the reference's layers and experts."""
    layers, moe = registry.load("layers", "reference"), registry.load("moe", "reference")
    with building(dtype, device):
        return impl.draft_model_class(config.draft_format)(config, layers, moe)


def make_target(case: Head, dtype: torch.dtype | None = None) -> CausalLM:
    reference = registry.load("models", "reference")
    return make_model(reference, case.target_config, dtype or case.dtype, case.seed)


def make_draft(impl: DraftModels, case: Head, target: CausalLM) -> DraftModel:
    draft = new_draft(impl, case.config(), case.dtype)
    draft.load_weights(dummy_draft_weights(case.config(), case.seed))
    draft.share(target)
    return draft.eval()


class DraftSession(ModelSession):
    """A session of a draft model."""

    def layers_of(self, model: Any) -> ModelConfig:
        return model.config.model

    @torch.inference_mode()
    def store(self, hidden_states: torch.Tensor) -> None:
        """Store the target's hidden states, with a `BlockDraftModel`."""
        batch = self.forward_batch({0: [0] * len(hidden_states)})
        attention = BatchAttention(self.attention, None, self.kv_pool, batch.out_cache_loc)
        self.model.store_features(hidden_states, batch.positions, attention)

    @torch.inference_mode()
    def fill_in(self, root_id: int, num_masks: int) -> torch.Tensor:
        """The hidden states of a block behind what is stored."""
        n, mask_id = 1 + num_masks, self.model.config.block.mask_id
        everything = torch.ones(1, n, n, dtype=torch.bool)
        batch = self.forward_batch(
            {0: [root_id] + [mask_id] * num_masks},
            forward_mode=ForwardMode.TARGET_VERIFY,
            tree_mask=everything,
        )
        plan = self.attention.plan(batch)
        attention = BatchAttention(self.attention, plan, self.kv_pool, batch.out_cache_loc)
        hidden_states: torch.Tensor = self.model(batch.input_ids, batch.positions, attention)
        return hidden_states

    @torch.inference_mode()
    def draft(self, input_ids: list[int], hidden_states: torch.Tensor) -> DraftOutput:
        batch = self.forward_batch({0: input_ids})
        attention = BatchAttention(
            self.attention, self.attention.plan(batch), self.kv_pool, batch.out_cache_loc
        )
        return self.model(batch.input_ids, batch.positions, hidden_states, attention)


def drafted(session: DraftSession, case: Head) -> dict[str, torch.Tensor]:
    """Drafts for a prompt with the target's hidden states, then with the draft model's own, or a block."""
    if case.config().block is not None:
        return filled_in(session, case)
    inputs, config = Inputs(case.seed), case.config()
    dtype = next(session.model.parameters()).dtype
    results: dict[str, torch.Tensor] = {}
    output: Any = None
    for step, num_tokens in enumerate((*case.chunks, *[1] * case.num_drafted)):
        input_ids = inputs.integers(config.target.vocab_size, num_tokens).tolist()
        hidden_states = inputs.normal(num_tokens, config.target_hidden_size, dtype=case.dtype).to(dtype)
        if step >= len(case.chunks):
            hidden_states = output.next_hidden_states[-1:]
        before = hidden_states.clone()
        output = run_poisoned(session.draft, input_ids, hidden_states)
        expect_close(f"step {step}: the hidden states given", hidden_states, before, EXACT)
        results[f"step {step}: hidden states"] = output.hidden_states
        results[f"step {step}: next hidden states"] = output.next_hidden_states
        with torch.inference_mode():
            results[f"step {step}: logits"] = session.model.compute_logits(output.hidden_states)
    return results


def filled_in(session: DraftSession, case: Head) -> dict[str, torch.Tensor]:
    """A block behind a prompt."""
    inputs, config = Inputs(case.seed), case.config()
    dtype = next(session.model.parameters()).dtype
    for num_tokens in case.chunks:
        hidden_states = inputs.normal(num_tokens, config.target_hidden_size, dtype=case.dtype).to(dtype)
        before = hidden_states.clone()
        run_poisoned(session.store, hidden_states)
        expect_close("the hidden states given", hidden_states, before, EXACT)
    (root_id,) = inputs.integers(config.target.vocab_size, 1).tolist()
    hidden_states = run_poisoned(session.fill_in, root_id, case.num_drafted)
    with torch.inference_mode():
        return {"hidden states": hidden_states, "logits": session.model.compute_logits(hidden_states)}


def expect_same_drafts(impl: DraftModels, case: Head, reference: DraftModels) -> None:
    """Compare with the reference, which has the same weights (rounded to the case's type) and computes in
    float64."""
    actual_session = DraftSession(make_draft(impl, case, make_target(case)))
    expected_session = DraftSession(make_draft(reference, case, make_target(case).double()).double())
    actual, expected = drafted(actual_session, case), drafted(expected_session, case)
    close = tolerance("logits", case.dtype)
    for name, tensor in actual.items():
        dtype = torch.float32 if "logits" in name else case.dtype
        expect_form(name, tensor, like=expected[name], dtype=dtype)
        expect_close(name, tensor, expected[name], close)
    for i, (ours, theirs) in enumerate(zip(actual_session.kv_buffers(), expected_session.kv_buffers())):
        # Rows that were never written hold NaN.
        expect_close(f"KV buffer {i}", ours, theirs, close)


@agreement(
    "From the target's hidden states and from its own: hidden states, logits and KV are the reference's.",
    HEADS_ONCE,
)
def forward(impl: DraftModels, case: Head, reference: DraftModels) -> None:
    expect_same_drafts(impl, case, reference)


@agreement("The same when the prompt comes in chunks.", HEADS_CHUNKED)
def forward_in_chunks(impl: DraftModels, case: Head, reference: DraftModels) -> None:
    expect_same_drafts(impl, case, reference)


@agreement("In a half type logits are float32, and all is close to exact arithmetic.", HEADS_HALF)
def half_types(impl: DraftModels, case: Head, reference: DraftModels) -> None:
    expect_same_drafts(impl, case, reference)


@contract(
    "A mask is a token as any other: its row of the embedding counts at every place of a block.",
    tuple(case for case in HEADS_ONCE if case.config().block is not None),
)
def masks_count(impl: DraftModels, case: Head) -> None:
    config, target = case.config(), make_target(case)
    assert config.block is not None
    embedding = Inputs(case.seed).normal(config.target.vocab_size, config.model.hidden_size)
    found = []
    for _ in range(2):
        draft = new_draft(impl, config, case.dtype)
        draft.load_weights([*dummy_draft_weights(config, case.seed), ("embed_tokens.weight", embedding)])
        draft.share(target)
        found.append(filled_in(DraftSession(draft.eval()), case)["hidden states"])
        embedding[config.block.mask_id] *= -1.0
    plain, changed = found
    least = float((changed - plain).abs().amax(dim=1).min())
    expect_true("every place changes", least > 1e-3, least)


@contract("compute_logits: float32 over the draft vocabulary, also of no row.", HEADS_ONCE)
def logits_form(impl: DraftModels, case: Head) -> None:
    config = case.config()
    draft = make_draft(impl, case, make_target(case))
    for num_rows in (0, 1, 7):
        hidden_states = Inputs(1).normal(num_rows, config.model.hidden_size)
        with torch.inference_mode():
            logits = run_poisoned(draft.compute_logits, hidden_states)
        like = torch.empty(num_rows, config.model.vocab_size, device=check_device())
        expect_form("logits", logits, like=like, dtype=torch.float32)


@contract(
    "to_target_ids gives each id of the draft vocabulary its own id in the target's, in any shape.",
    HEADS_ONCE,
)
def target_ids(impl: DraftModels, case: Head) -> None:
    config = case.config()
    vocab_size, target_vocab_size = config.model.vocab_size, config.target.vocab_size
    draft = make_draft(impl, case, make_target(case))
    draft_ids = torch.arange(vocab_size, device=check_device())
    expected = draft_ids
    if vocab_size != target_vocab_size:
        expected = draft_ids + dict(dummy_draft_weights(config))["d2t"].to(check_device())
        expect_true("the case maps ids", bool((expected != draft_ids).any()))
    expect_equal("target ids", draft.to_target_ids(draft_ids).tolist(), expected.tolist())
    square = draft_ids[:12].view(3, 4)
    expect_equal("in a square", draft.to_target_ids(square).tolist(), expected[:12].view(3, 4).tolist())


@contract(
    "draft_model_class knows every format, and refuses the others by name, listing those it knows.", EXAMPLE
)
def draft_model_class(impl: DraftModels, case: Case) -> None:
    for draft_format in FORMATS:
        found = impl.draft_model_class(draft_format)
        expect_true(f"{draft_format} is a DraftModel", issubclass(found, DraftModel), found)
    expect_refused("medusa", lambda: impl.draft_model_class("medusa"), "medusa", *FORMATS)
