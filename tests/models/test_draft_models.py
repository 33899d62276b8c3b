"""Each format of draft model against the same computation written out here: whole texts, explicit matrices,
in float64. Checkpoints go through files in the public formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import diptych.reference.models
import diptych.reference.speculative.draft_models
from diptych.shared.config import read_draft_config
from diptych.shared.interfaces import CausalLM, DraftModel
from diptych.shared.loading.draft_weights import iterate_draft_weights
from diptych.shared.loading.safetensors_file import read_checkpoint
from diptych.shared.tools.conformance.contracts.draft_models.forward import (
    HEADS,
    DraftSession,
    Head,
    make_target,
    new_draft,
)
from diptych.shared.tools.conformance.contracts.draft_models.weights import weights_of

Weights = dict[str, torch.Tensor]
NUM_PROMPT, NUM_DRAFTED = 11, 3


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: torch.Tensor, config: Any) -> torch.Tensor:
    """x [n, heads, head_dim] at positions 0, 1, ...: complex numbers turned by position * frequency."""
    half = x.shape[-1] // 2
    frequencies = config.rope.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def attend(x: torch.Tensor, w: Weights, prefix: str, config: Any) -> torch.Tensor:
    def heads(name: str, num_heads: int) -> torch.Tensor:
        y = x @ w[f"{prefix}.{name}.weight"].T + w.get(f"{prefix}.{name}.bias", 0.0)
        return y.view(len(x), num_heads, config.head_dim)

    q, k, v = (
        heads("q_proj", config.num_qo_heads),
        *(heads(n, config.num_kv_heads) for n in ("k_proj", "v_proj")),
    )
    if config.qk_norm:
        q, k = (
            rms_norm(y, w[f"{prefix}.{n}.weight"], config.rms_norm_eps)
            for y, n in ((q, "q_norm"), (k, "k_norm"))
        )
    q, k = rotate(q, config), rotate(k, config)
    outputs = []
    for head in range(config.num_qo_heads):
        kv_head = head // (config.num_qo_heads // config.num_kv_heads)
        scores = q[:, head] @ k[:, kv_head].T / config.head_dim**0.5
        causal = torch.ones(len(x), len(x)).tril().bool()
        outputs.append(scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v[:, kv_head])
    y = torch.cat(outputs, dim=-1)
    return y @ w[f"{prefix}.o_proj.weight"].T + w.get(f"{prefix}.o_proj.bias", 0.0)


def swiglu(x: torch.Tensor, w: Weights, prefix: str) -> torch.Tensor:
    gate = x @ w[f"{prefix}.gate_proj.weight"].T
    return (gate * gate.sigmoid() * (x @ w[f"{prefix}.up_proj.weight"].T)) @ w[f"{prefix}.down_proj.weight"].T


def block(x: torch.Tensor, w: Weights, prefix: str, config: Any, attended: torch.Tensor) -> torch.Tensor:
    """A decoder layer from what goes into its attention on; x is the residual stream."""
    x = x + attend(attended, w, f"{prefix}.self_attn", config)
    normed = rms_norm(x, w[f"{prefix}.post_attention_layernorm.weight"], config.rms_norm_eps)
    return x + swiglu(normed, w, f"{prefix}.mlp")


def eagle(embeds: torch.Tensor, hidden: torch.Tensor, w: Weights, config: Any) -> tuple[torch.Tensor, ...]:
    x = torch.cat((embeds, hidden), dim=-1) @ w["fc.weight"].T
    for layer_id in range(config.num_hidden_layers):
        norm = w.get(f"layers.{layer_id}.input_layernorm.weight")
        attended = x if norm is None else rms_norm(x, norm, config.rms_norm_eps)
        x = block(x, w, f"layers.{layer_id}", config, attended)
    return x, x


def eagle3(embeds: torch.Tensor, hidden: torch.Tensor, w: Weights, config: Any) -> tuple[torch.Tensor, ...]:
    eps = config.rms_norm_eps
    attended = torch.cat(
        (
            rms_norm(embeds, w["midlayer.input_layernorm.weight"], eps),
            rms_norm(hidden, w["midlayer.hidden_norm.weight"], eps),
        ),
        dim=-1,
    )
    x = block(hidden, w, "midlayer", config, attended)
    return rms_norm(x, w["norm.weight"], eps), x


def eagle3_normed(embeds: torch.Tensor, hidden: torch.Tensor, w: Weights, config: Any) -> Any:
    """norm_before_residual."""
    normed = rms_norm(hidden, w["midlayer.hidden_norm.weight"], config.rms_norm_eps)
    token = rms_norm(embeds, w["midlayer.input_layernorm.weight"], config.rms_norm_eps)
    x = block(normed, w, "midlayer", config, torch.cat((token, normed), dim=-1))
    return rms_norm(x, w["norm.weight"], config.rms_norm_eps), x


def fused(hidden: torch.Tensor, w: Weights, config: Any) -> torch.Tensor:
    """What becomes of the target's hidden states before they meet a token."""
    eps = config.rms_norm_eps
    if "fc.weight" not in w:
        return hidden
    if "input_norm.weight" in w:
        hidden = rms_norm(hidden, w["input_norm.weight"], eps)
    if "fc_norm.0.weight" in w:
        parts = hidden.view(len(hidden), 3, -1)
        hidden = torch.cat([rms_norm(parts[:, i], w[f"fc_norm.{i}.weight"], eps) for i in range(3)], dim=-1)
    return hidden @ w["fc.weight"].T


def nextn(embeds: torch.Tensor, hidden: torch.Tensor, w: Weights, config: Any) -> tuple[torch.Tensor, ...]:
    eps, layer = config.rms_norm_eps, "layers.0"
    both = (
        rms_norm(embeds, w[f"{layer}.enorm.weight"], eps),
        rms_norm(hidden, w[f"{layer}.hnorm.weight"], eps),
    )
    x = torch.cat(both, dim=-1) @ w[f"{layer}.eh_proj.weight"].T
    x = block(x, w, layer, config, rms_norm(x, w[f"{layer}.input_layernorm.weight"], eps))
    x = rms_norm(x, w[f"{layer}.shared_head.norm.weight"], eps)
    return x, x


WRITTEN_OUT = {"eagle": eagle, "eagle3": eagle3, "nextn": nextn}


def load(head: Head, folder: Path, weights: Weights, target: CausalLM) -> DraftModel:
    """Through the files of a checkpoint."""
    (folder / "config.json").write_text(json.dumps(HEADS[head.head][1]))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    config = read_draft_config(folder, head.target_config)
    draft = new_draft(diptych.reference.speculative.draft_models, config)
    draft.load_weights(iterate_draft_weights(folder))
    draft.share(target)
    return draft


# RoPE without scaling, dense: what is written out above.
PLAIN = (
    Head("eagle, two layers with biases", head="eagle, two layers with biases"),
    Head("eagle3", head="eagle3, the whole vocabulary, heads of its own"),
    Head("nextn", head="nextn, norms on heads"),
    Head("eagle3, normed", head="eagle3, a normed residual stream"),
    Head("eagle3, one norm", head="eagle3, one norm before fc, fed back normed"),
    Head("eagle3, a norm each", head="eagle3, a norm for each layer, by speculators"),
    Head("eagle3, without fc", head="eagle3, the target's last hidden states"),
)


@pytest.mark.parametrize("head", PLAIN, ids=lambda head: head.name)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_what_a_draft_model_computes(head: Head, prefix: str, tmp_path: Path, monkeypatch: Any) -> None:
    keys = HEADS[head.head][1]
    layer_keys = keys.get("transformer_layer_config", keys)
    if "rope_theta" not in layer_keys:  # inherited, and there with a scaling
        monkeypatch.setitem(layer_keys, "rope_theta", 777.0)
    weights = weights_of(head)
    target = make_target(head)
    draft = load(head, tmp_path, {f"{prefix}{name}": tensor for name, tensor in weights.items()}, target)
    config, w = draft.config.model, {name: tensor.double() for name, tensor in weights.items()}
    generator = torch.Generator().manual_seed(1)
    length = NUM_PROMPT + NUM_DRAFTED
    ids = torch.randint(0, head.target_config.vocab_size, (length,), generator=generator)
    features = torch.randn(NUM_PROMPT, draft.config.target_hidden_size, generator=generator)

    with torch.inference_mode():
        embeds = target.embed(ids).double()
    hidden = features.double()
    if draft.config.draft_format == "eagle3":
        hidden = fused(hidden, w, config)
    written_out = WRITTEN_OUT[draft.config.draft_format]
    if keys.get("norm_before_residual", "transformer_layer_config" in keys):
        written_out = eagle3_normed
    # A text grows by one drafted token at a time, each with the hidden state that came before it.
    results = []
    for num_tokens in range(NUM_PROMPT, length + 1):
        out, next_hidden = written_out(embeds[:num_tokens], hidden, w, config)
        next_hidden = out if keys.get("norm_output") else next_hidden
        results.append((out[-1], next_hidden[-1]))
        hidden = torch.cat((hidden, next_hidden[-1:]))

    session = DraftSession(draft)
    output = session.draft(ids[:NUM_PROMPT].tolist(), features)
    for step, (expected, expected_next) in enumerate(results):
        if step > 0:
            token = ids[NUM_PROMPT + step - 1 : NUM_PROMPT + step].tolist()
            output = session.draft(token, output.next_hidden_states[-1:])
        # float32 against float64, values of about 1 through at most four passes.
        torch.testing.assert_close(output.hidden_states[-1].double(), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            output.next_hidden_states[-1].double(), expected_next, atol=1e-4, rtol=1e-4
        )


def test_eagle3_maps_draft_ids_and_uses_its_own_head(tmp_path: Path) -> None:
    head = Head("", head="eagle3, a part of the vocabulary")
    weights = weights_of(head)
    weights["d2t"] = torch.arange(97) * 2 + 5  # draft id i is 3 i + 5 in the target
    weights["t2d"] = torch.zeros(331, dtype=torch.bool)
    draft = load(head, tmp_path, weights, make_target(head))
    assert draft.to_target_ids(torch.tensor([[0, 1], [50, 96]])).tolist() == [[5, 8], [155, 293]]
    hidden_states = torch.randn(3, 100)
    expected = hidden_states @ weights["lm_head.weight"].T
    torch.testing.assert_close(draft.compute_logits(hidden_states), expected, atol=1e-5, rtol=1e-5)


def test_eagle3_takes_layers_0_for_midlayer(tmp_path: Path) -> None:
    head = PLAIN[1]
    weights = weights_of(head)
    renamed = {name.replace("midlayer", "layers.0"): tensor for name, tensor in weights.items()}
    target = make_target(head)
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    drafts = [load(head, folder, w, target) for folder, w in zip(folders, (weights, renamed))]
    features = torch.randn(4, drafts[0].config.target_hidden_size)
    one, other = (DraftSession(draft).draft([1, 2, 3, 4], features) for draft in drafts)
    assert torch.equal(one.hidden_states, other.hidden_states)


def test_nextn_takes_the_layer_number_of_the_targets_checkpoint(tmp_path: Path) -> None:
    head = PLAIN[2]
    renamed = {name.replace("layers.0", "layers.61"): tensor for name, tensor in weights_of(head).items()}
    load(head, tmp_path, {f"model.{name}": tensor for name, tensor in renamed.items()}, make_target(head))


def test_a_checkpoint_of_another_format_names_what_does_not_fit(tmp_path: Path) -> None:
    head = PLAIN[0]
    with pytest.raises(ValueError, match=r"midlayer\.\S+ is no weight of a Qwen2ForCausalLMEagle"):
        load(head, tmp_path, weights_of(PLAIN[1]), make_target(head))


def test_tables_are_read_but_not_in_a_models_checkpoint(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": torch.ones(3), "d2t": torch.zeros(3, dtype=torch.int64)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert set(dict(iterate_draft_weights(tmp_path))) == {"model.norm.weight", "d2t"}
    with pytest.raises(ValueError, match="d2t is of type I64"):
        read_checkpoint(tmp_path)


def test_using_it_before_share_is_a_mistake_in_the_program() -> None:
    head = PLAIN[0]
    draft = new_draft(diptych.reference.speculative.draft_models, head.config())
    draft.load_weights(weights_of(head).items())
    with pytest.raises(AssertionError, match="share"):
        draft.compute_logits(torch.zeros(1, 64))
