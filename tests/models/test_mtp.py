"""The layer for drafting (MTP) in a DeepSeek-V3 checkpoint, against transformers' MtpModel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from model_harness import build_model, random_hf_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_layers import MtpModel

import diptych.reference.speculative.draft_models
from diptych.reference.speculative.eagle import EagleDrafter
from diptych.shared.config import read_config, read_draft_config
from diptych.shared.engine.llm import LLM
from diptych.shared.loading.draft_weights import iterate_draft_weights
from diptych.shared.loading.quantize import quantize_weight
from diptych.shared.loading.weights import iterate_weights
from diptych.shared.modeling.dequantized_values import dequantize
from diptych.shared.tools.conformance.contracts.draft_models.forward import DraftSession, new_draft
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.types.outputs import GenerateOutput
from diptych.shared.types.quant_scheme import QuantScheme

TOLERANCE = 2e-4  # as in test_parity.py
HF_CONFIG = {**CONFIGS["deepseek-v3"], "num_nextn_predict_layers": 1}


def random_mtp(hf_model: PreTrainedModel) -> MtpModel:
    mtp, generator = MtpModel(hf_model, 1).eval(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in (*mtp.layers.named_parameters(), *mtp.layers.named_buffers()):
            is_norm = tensor.dim() == 1 and "norm" in name
            std = 0.2 if tensor.dim() == 1 else 1.5 * tensor.shape[-1] ** -0.5
            tensor.normal_(1.0 if is_norm else 0.0, std, generator=generator)
    return mtp


def hidden_behind(
    mtp: MtpModel, hidden_states: torch.Tensor, positions: torch.Tensor, input_ids: torch.Tensor
) -> torch.Tensor:
    """Hidden states behind the layer for drafting: `MtpModel.forward_layer`, which transformers 5.17 does not
    have."""
    embeds, cache = mtp.embed_tokens(input_ids), DynamicCache(config=mtp.config)
    masks = mtp.create_masks_for_mtp_layer(0, embeds, cache, positions)
    found: torch.Tensor = mtp.layers[0](
        embeds,
        hidden_states,
        position_embeddings=mtp.rotary_emb(embeds, position_ids=positions),
        position_ids=positions,
        past_key_values=cache,
        **masks,
    )
    return found


def published_names(mtp: MtpModel, layer_id: int) -> dict[str, torch.Tensor]:
    """As DeepSeek names them: behind the last layer, experts one by one."""
    tensors = {}
    for name, tensor in mtp.layers[0].state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if ".experts." in name:
            parts = tensor.chunk(2, dim=1) if "gate_up" in name else (tensor,)
            for proj, part in zip(("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",), parts):
                experts = {f"mlp.experts.{e}.{proj}.weight": weight for e, weight in enumerate(part)}
                tensors |= experts
        else:
            tensors[name] = tensor
    return {f"model.layers.{layer_id}.{name}": tensor.clone() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, MtpModel, Path]:
    hf_model, folder = random_hf_model(HF_CONFIG), tmp_path_factory.mktemp("mtp")
    hf_model.save_pretrained(folder)
    mtp, file = random_mtp(hf_model), folder / "model.safetensors"
    layer_id = hf_model.config.num_hidden_layers
    save_file(load_file(file) | published_names(mtp, layer_id), file, metadata={"format": "pt"})
    return hf_model, mtp, folder


@torch.inference_mode()
def test_drafts_are_those_of_transformers(checkpoint: tuple[PreTrainedModel, MtpModel, Path]) -> None:
    hf_model, mtp, folder = checkpoint
    ids = torch.randint(3, 331, (1, 40), generator=torch.Generator().manual_seed(1))
    hidden_states = hf_model.model(ids[:, :-1]).last_hidden_state
    positions = torch.arange(1, ids.shape[1])[None]
    theirs = hidden_behind(mtp, hidden_states, positions, ids[:, 1:])[0]

    target = build_model(read_config(folder))
    target.load_weights(iterate_weights(folder))  # leaves the layer for drafting out
    config = read_draft_config(folder, target.config, "nextn")
    draft = new_draft(diptych.reference.speculative.draft_models, config)
    draft.load_weights(iterate_draft_weights(folder))
    draft.share(target)
    ours = DraftSession(draft.eval()).draft(ids[0, 1:].tolist(), hidden_states[0])
    torch.testing.assert_close(ours.hidden_states, theirs, rtol=0.0, atol=TOLERANCE)
    logits = mtp.shared_head(theirs)
    torch.testing.assert_close(draft.compute_logits(ours.hidden_states), logits, rtol=0.0, atol=TOLERANCE)


def test_an_engine_drafts_what_transformers_does(
    checkpoint: tuple[PreTrainedModel, MtpModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal answers alone would not show it: verification hides bad drafts."""
    hf_model, mtp, folder = checkpoint
    prompt = torch.randint(3, 331, (30,), generator=torch.Generator().manual_seed(30)).tolist()
    trees, draft = [], EagleDrafter.draft
    monkeypatch.setattr(
        EagleDrafter, "draft", lambda *args: trees.append(draft(*args)) or trees[-1], raising=True
    )

    def answer(**flags: str) -> GenerateOutput:
        llm = LLM(
            model=str(folder),
            panel="reference",
            device="cpu",
            max_total_tokens=512,
            check_invariants=True,
            **flags,
        )
        return llm.generate(prompt, temperature=0, max_tokens=10, ignore_eos=True, progress=False)

    plain = answer()
    assert not trees
    drafted = answer(speculative="nextn", speculative_draft_model=str(folder))
    assert drafted.output_ids == plain.output_ids
    assert drafted.speculation.num_drafted_tokens > 0

    ids = torch.tensor([[*prompt, plain.output_ids[0]]])
    with torch.inference_mode():
        hidden_states = hf_model.model(ids[:, :-1]).last_hidden_state
        positions = torch.arange(1, ids.shape[1])[None]
        theirs = hidden_behind(mtp, hidden_states, positions, ids[:, 1:])
        logits = mtp.shared_head(theirs[0, -1])
    best, second = logits.topk(2).values
    assert best - second > 2 * TOLERANCE, "a near tie: the drafts could differ for no reason"
    assert int(trees[0].token_ids[0, 0]) == plain.output_ids[0]  # the root
    assert int(trees[0].token_ids[0, 1]) == int(logits.argmax())


BLOCK = QuantScheme("fp8", 32, 32, "group")


@pytest.fixture(scope="module")
def in_blocks(checkpoint: tuple[PreTrainedModel, MtpModel, Path]) -> tuple[Path, Path]:
    """The checkpoint in FP8 blocks, as DeepSeek publishes its own, and plain with the same values."""
    hf_model, mtp, folder = checkpoint
    stored, plain = {}, {}
    weights = {**dict(iterate_weights(folder)), **published_names(mtp, hf_model.config.num_hidden_layers)}
    for name, weight in weights.items():
        stored[name] = plain[name] = weight
        if weight.dim() == 2 and "_proj" in name and "eh_proj" not in name:
            q, scale = quantize_weight(weight, BLOCK).values()
            stored |= {name: q, f"{name}_scale_inv": scale[::32]}
            plain[name] = dequantize(q, scale, None, BLOCK)
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    folders = folder.with_name("fp8"), folder.with_name("dequantized")
    for each, tensors, extra in zip(folders, (stored, plain), ({"quantization_config": quantization}, {})):
        each.mkdir()
        (each / "config.json").write_text(json.dumps(config | extra))
        dense = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(dense, each / "model.safetensors")
    return folders


@torch.inference_mode()
def test_a_layer_in_fp8_blocks_drafts_as_dequantized(in_blocks: tuple[Path, Path]) -> None:
    drafts, weights = [], []
    target = build_model(read_config(in_blocks[1]))
    target.load_weights(iterate_weights(in_blocks[1]))
    for folder in in_blocks:
        config = read_draft_config(folder, target.config, "nextn")
        weights.append(dict(iterate_draft_weights(folder, config)))
        draft = new_draft(diptych.reference.speculative.draft_models, config)
        draft.load_weights(weights[-1].items())
        draft.share(target)
        hidden_states = torch.randn(20, 64, generator=torch.Generator().manual_seed(2))
        drafts.append(DraftSession(draft.eval()).draft(list(range(3, 23)), hidden_states))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert torch.equal(drafts[0].hidden_states, drafts[1].hidden_states)


def test_an_engine_with_fp8_blocks_drafts(in_blocks: tuple[Path, Path]) -> None:
    flags = {"panel": "reference", "device": "cpu", "max_total_tokens": 512, "check_invariants": True}
    nextn = {"speculative": "nextn", "speculative_draft_model": str(in_blocks[0])}
    outputs = [
        LLM(str(in_blocks[0]), **flags, **more).generate(
            list(range(3, 33)), temperature=0, max_tokens=10, ignore_eos=True
        )
        for more in ({}, nextn)
    ]
    assert outputs[0].output_ids == outputs[1].output_ids
    assert outputs[1].speculation.num_drafted_tokens > 0


def test_a_missing_scale_of_a_layer_for_drafting_is_named(
    in_blocks: tuple[Path, Path], tmp_path: Path
) -> None:
    name = "self_attn.o_proj.weight_scale_inv"
    tensors = load_file(in_blocks[0] / "model.safetensors")
    layer_id = max(int(key.split(".")[2]) for key in tensors if key.startswith("model.layers."))
    del tensors[f"model.layers.{layer_id}.{name}"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((in_blocks[0] / "config.json").read_text())
    config = read_draft_config(tmp_path, read_config(tmp_path), "nextn")
    with pytest.raises(ValueError, match=f"{layer_id}.{name} is missing"):
        iterate_draft_weights(tmp_path, config)
