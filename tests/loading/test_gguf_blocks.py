"""Linear layers of a GGUF file that stay in the blocks of the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import as_type, llama, same_logits

from diptych import LLM
from diptych.shared.config import QuantConfig, read_config
from diptych.shared.config.quant_config import ALL_LINEAR
from diptych.shared.engine.build import plan
from diptych.shared.loading.gguf_weights import KEPT, as_in_file
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.loading.quantized_weights import dequantized, quantized_layers
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weights import iterate_weights


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of GGUF files are made below the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["Q8_0", pytest.param("Q4_0", marks=pytest.mark.full)])
def test_layers_stay_in_their_blocks(
    kind: str, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, also in the parts of ranks, and the reference answers with them as with plain weights."""
    model, file, weights = llama(tmp_path, as_type(kind))
    folder = resolve_model_path(str(file))
    config = as_in_file(read_config(folder), folder)
    assert config.quantization is not None
    layers = quantized_layers(config)
    assert len(layers) == 14
    assert not any("lm_head" in name or "embed" in name for name in layers)
    found = dict(iterate_weights(folder, config))
    assert sum(name.endswith(".weight_scale") for name in found) == len(layers)
    plain = dict(
        dequantized(iter(found.items()), lambda name: layers[name].scheme if name in layers else None)
    )
    assert all(torch.equal(plain[name], weights[name]) for name in weights)
    assert f"weights in {kind}: no kernel" in capfd.readouterr().err  # the embedding and the head
    ranks = [dict(iterate_weights(folder, config, shards=Shards(config, rank, 2))) for rank in range(2)]
    for suffix in ("weight", "weight_scale"):
        for name, dim in (("self_attn.q_proj", 0), ("self_attn.o_proj", 1)):
            name = f"model.layers.1.{name}.{suffix}"
            assert torch.equal(torch.cat([part[name] for part in ranks], dim), found[name])
    monkeypatch.setattr(plan, "read_config", lambda _: config)
    same_logits(model, file)
    # Live weights come whole, as tensors or in a folder, and are rounded to blocks.
    name = "model.layers.0.self_attn.k_proj"
    doubled = model.state_dict()[f"{name}.weight"].mul_(2).clone()
    model.save_pretrained(tmp_path / "other")
    llm = LLM(str(file), panel="reference")
    scale = llm.assembly.model.state_dict()[f"{name}.weight_scale"]
    for change in ("from_folder", "from_tensors"):
        scale.fill_(0)
        with llm.weight_updates() as updates:
            if change == "from_folder":
                updates.from_folder(str(tmp_path / "other"))
            else:
                updates.from_tensors({f"{name}.weight": doubled})
        expected = 2 * found[f"{name}.weight_scale"].abs()  # of Q4_0 the largest value over 8, here over 7
        assert torch.allclose(scale, expected, rtol=0.15)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_kernels_multiply_the_blocks(kind: str, tmp_path: Path) -> None:
    """In bfloat16 the error against float32 is at most 1.5 times that of the dequantized weights, which are
    rounded to bfloat16 once more."""
    model, file, _ = llama(tmp_path, as_type(kind))
    prompt, errors = [1 + 7 * i % 95 for i in range(48)], []
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = expected[:-1].gather(1, torch.tensor(prompt)[1:, None])[:, 0]
    for panel in ("optimized", "reference"):
        llm = LLM(str(file), panel=panel, device="cuda", dtype="bfloat16")
        assert (llm.model_config.quantization is not None) == (panel == "optimized")
        out = llm.generate(prompt, max_tokens=4, return_logprob=True, logprob_start_len=0, ignore_eos=True)
        found = torch.tensor([each.logprob for each in out.input_logprobs[1:]])
        errors.append(float((found - expected).square().mean().sqrt()))
    assert errors[0] <= 1.5 * errors[1], errors


def test_a_layer_of_two_types_is_dequantized(tmp_path: Path) -> None:
    """Two types can stay beside each other, but not in what is merged into one layer."""

    def mixed(writer: Any, name: str, values: np.ndarray) -> np.ndarray:
        kinds = {"blk.0.attn_v.weight": "F16", "blk.1.ffn_down.weight": "Q4_0"}
        return as_type(kinds.get(name, "Q8_0"))(writer, name, values)

    _, file, weights = llama(tmp_path, mixed)
    folder = resolve_model_path(str(file))
    config = as_in_file(read_config(folder), folder)
    schemes = {name: str(layer.scheme) for name, layer in quantized_layers(config).items()}
    absent = {f"model.layers.0.self_attn.{each}_proj" for each in "qkv"}
    assert len(schemes) == 11
    assert not schemes.keys() & absent
    assert schemes["model.layers.1.mlp.down_proj"].startswith("int4")
    assert schemes["model.layers.1.mlp.up_proj"].startswith("int8")
    found = dict(iterate_weights(folder, config))
    assert all(torch.equal(found[f"{name}.weight"], weights[f"{name}.weight"]) for name in absent)
    both = replace(config, quantization=QuantConfig("gguf", ((ALL_LINEAR, KEPT["Q8_0"]),)))
    with pytest.raises(ValueError, match=r"blk\.0\.attn_v\.weight is of type F16; the model has int8 by"):
        iterate_weights(folder, both)
