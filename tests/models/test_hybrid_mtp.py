"""Qwen's layer for drafting (mtp.*) as NEXTN drafter, against a decoder layer of transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_harness import build_model, hf_greedy, random_hf_model
from safetensors.torch import load_file, save_file
from torch import nn

import diptych.reference.speculative.draft_models
from diptych.reference.speculative.eagle import EagleDrafter
from diptych.shared.config import read_config, read_draft_config
from diptych.shared.engine.llm import LLM
from diptych.shared.loading.draft_weights import iterate_draft_weights
from diptych.shared.loading.weights import iterate_weights
from diptych.shared.tools.conformance.contracts.draft_models.forward import DraftSession, new_draft
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS
from diptych.shared.types import SamplingParams

TOLERANCE = 5e-4
NUM_NEW = 10
PROMPT = torch.randint(0, 331, (30,), generator=torch.Generator().manual_seed(1)).tolist()


class Mtp(nn.Module):
    """fc(norm_e(embedding) beside norm_h(hidden state)), a layer of full attention, a norm."""

    def __init__(self, hf_model: Any) -> None:
        super().__init__()
        config, model, size = hf_model.config, hf_model.model, hf_model.config.hidden_size
        full = config.layer_types.index("full_attention")
        norm_class = type(model.norm)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = norm_class(size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm_class(size, config.rms_norm_eps)
        self.norm = norm_class(size, config.rms_norm_eps)
        self.layers = nn.ModuleList([type(model.layers[full])(config, full)])

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor, rotary: Any) -> torch.Tensor:
        """embeds, hidden [1, n, hidden_size] -> [n, hidden_size]"""
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)), -1))
        n = x.shape[1]
        positions = torch.arange(n)[None]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        out = self.layers[0](
            x,
            rotary(x, positions.expand(3, 1, -1) if hasattr(rotary, "mrope_section") else positions),
            attention_mask=mask,
            position_ids=positions,
        )
        found: torch.Tensor = self.norm(out)[0]
        return found


@cache
def models(name: str) -> tuple[Any, Mtp]:
    hf_model = random_hf_model(HYBRID_CONFIGS[name])
    mtp, generator = Mtp(hf_model).eval(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in mtp.parameters():
            std = 0.2 if tensor.dim() == 1 else 1.5 * tensor.shape[-1] ** -0.5
            tensor.normal_(0.0, std, generator=generator)
    return hf_model, mtp


def save(name: str, folder: Path) -> tuple[Any, Mtp]:
    hf_model, mtp = models(name)
    hf_model.save_pretrained(folder)
    file = folder / "model.safetensors"
    layer = {f"mtp.{key}": tensor.clone() for key, tensor in mtp.state_dict().items()}
    save_file(load_file(file) | layer, file, metadata={"format": "pt"})
    return hf_model, mtp


@torch.inference_mode()
def theirs(hf_model: Any, mtp: Mtp, ids: list[int]) -> torch.Tensor:
    """The hidden states behind the layer for all tokens but the first."""
    hidden = hf_model.model(torch.tensor([ids[:-1]])).last_hidden_state
    embeds = hf_model.model.embed_tokens(torch.tensor([ids[1:]]))
    return mtp(embeds, hidden, hf_model.model.rotary_emb)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("qwen3.5", marks=pytest.mark.full),
        "qwen3-next",
        pytest.param("qwen3.5-moe", marks=pytest.mark.full),
    ],
)
@torch.inference_mode()
def test_drafts(name: str, tmp_path: Path) -> None:
    hf_model, mtp = save(name, tmp_path)
    target = build_model(read_config(tmp_path))
    target.load_weights(iterate_weights(tmp_path))  # leaves the layer for drafting out
    config = read_draft_config(tmp_path, target.config, "nextn")
    draft = new_draft(diptych.reference.speculative.draft_models, config)
    draft.load_weights(iterate_draft_weights(tmp_path, config))
    draft.share(target)
    hidden = hf_model.model(torch.tensor([PROMPT[:-1]])).last_hidden_state
    ours = DraftSession(draft.eval()).draft(PROMPT[1:], hidden[0])
    torch.testing.assert_close(ours.hidden_states, theirs(hf_model, mtp, PROMPT), rtol=0.0, atol=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("panel", ["reference", "optimized"])
def test_engine(panel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, so that the second run begins in the prefix cache; the first draft is the layer's."""
    hf_model, mtp = save("qwen3.5", tmp_path)
    trees, draft = [], EagleDrafter.draft
    monkeypatch.setattr(EagleDrafter, "draft", lambda *args: trees.append(draft(*args)) or trees[-1])
    fields: dict[str, Any] = {"max_total_tokens": 512, "max_running_requests": 2, "check_invariants": True}
    nextn = {"speculative": "nextn", "speculative_draft_model": str(tmp_path)}
    llm = LLM(model=str(tmp_path), device="cpu", panel=panel, **fields, **nextn)
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    prompts = [[*PROMPT, *PROMPT[::-1], *PROMPT], PROMPT]
    expected = [hf_greedy(hf_model, prompt, NUM_NEW)[0] for prompt in prompts]
    for num_cached in (0, 64):
        outputs = llm.generate(prompts, params, progress=False)
        assert [output.output_ids for output in outputs] == expected
        assert outputs[0].num_cached_tokens == num_cached
    assert llm.scheduler.stats().speculation.num_drafted_tokens > 0
    if panel == "reference":
        with torch.inference_mode():
            logits = hf_model.lm_head(theirs(hf_model, mtp, [*prompts[0], expected[0][0]])[-1])
        assert int(trees[0].token_ids[0, 0]) == expected[0][0]
        assert int(trees[0].token_ids[0, 1]) == int(logits.argmax())


def test_quantized_layers_are_refused(tmp_path: Path) -> None:
    save("qwen3.5", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, file, metadata={"format": "pt"})
    config = read_draft_config(tmp_path, read_config(tmp_path), "nextn")
    with pytest.raises(ValueError, match="mtp"):
        list(iterate_draft_weights(tmp_path, config))
