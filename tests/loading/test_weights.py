import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from diptych.shared.config import ModelConfig, parse_config
from diptych.shared.config.families import FUSED
from diptych.shared.loading import weights as weights_module
from diptych.shared.loading.load_model import MIN_BYTES, LoadingBar
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weight_names import canonical_parts, expected_shapes
from diptych.shared.loading.weights import dummy_weights, iterate_weights
from diptych.shared.tools.conformance.oracles.configs import CONFIGS

NORM = "model.norm.weight"
MOE = "qwen3-moe"


def save(folder: Path, name: str = MOE, weights: dict[str, torch.Tensor] | None = None) -> ModelConfig:
    config = parse_config(CONFIGS[name])
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    save_file(weights or dict(dummy_weights(config)), folder / "model.safetensors")
    return config


def save_sharded(folder: Path, num_shards: int = 3) -> dict[str, str]:
    """Returns the weight map."""
    config = parse_config(CONFIGS[MOE])
    (folder / "config.json").write_text(json.dumps(CONFIGS[MOE]))
    weights = dict(dummy_weights(config))
    names = list(weights)
    weight_map = {}
    for i in range(num_shards):
        file, its_names = f"model-{i + 1:05}-of-{num_shards:05}.safetensors", names[i::num_shards]
        save_file({name: weights[name] for name in its_names}, folder / file)
        weight_map |= dict.fromkeys(its_names, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("sharded", [False, True])
def test_round_trip_with_progress(tmp_path: Path, sharded: bool) -> None:
    config = parse_config(CONFIGS[MOE])
    if sharded:
        save_sharded(tmp_path)
    else:
        save(tmp_path)
    progress: list[tuple[int, int]] = []
    found = list(iterate_weights(tmp_path, config, lambda done, total: progress.append((done, total))))
    assert_same_weights(dict(found), dict(dummy_weights(config)))
    assert len(found) == len(progress) == len(expected_shapes(config))
    num_bytes = sum(4 * tensor.numel() for _, tensor in found)
    assert {total for _, total in progress} == {num_bytes}
    done = [done for done, _ in progress]
    assert done == sorted(set(done))
    assert done[-1] == num_bytes


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_saves_has_the_expected_names(name: str, tmp_path: Path) -> None:
    hf_config = AutoConfig.for_model(**json.loads(json.dumps(CONFIGS[name])))
    AutoModelForCausalLM.from_config(hf_config).save_pretrained(tmp_path)
    config = parse_config(CONFIGS[name])
    found = {name: tuple(tensor.shape) for name, tensor in iterate_weights(tmp_path, config)}
    assert found == expected_shapes(config)


def test_transformers_shards_are_read(tmp_path: Path) -> None:
    hf_config = AutoConfig.for_model(**json.loads(json.dumps(CONFIGS["mixtral"])))
    model = AutoModelForCausalLM.from_config(hf_config)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert_same_weights(dict(iterate_weights(tmp_path / "many")), dict(iterate_weights(tmp_path / "one")))


def test_mixtral_names_of_published_checkpoints(tmp_path: Path) -> None:
    config = parse_config(CONFIGS["mixtral"])
    expected = dict(dummy_weights(config))
    words = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", ".mlp.": ".block_sparse_moe."}
    published = {}
    for name, tensor in expected.items():
        for ours, theirs in words.items():
            name = name.replace(ours, theirs)
        published[name] = tensor
    assert "model.layers.1.block_sparse_moe.experts.4.w3.weight" in published
    assert "model.layers.1.block_sparse_moe.gate.weight" in published
    save(tmp_path, "mixtral", published)
    assert_same_weights(dict(iterate_weights(tmp_path)), expected)


def test_packed_experts(tmp_path: Path) -> None:
    config = parse_config(CONFIGS[MOE])
    expected = dict(dummy_weights(config))
    packed = {name: tensor for name, tensor in expected.items() if ".experts." not in name}
    experts = [
        [expected[f"model.layers.1.mlp.experts.{e}.{proj}_proj.weight"] for e in range(7)]
        for proj in ("gate", "up", "down")
    ]
    gate, up, down = map(torch.stack, experts)
    packed["model.layers.1.mlp.experts.gate_up_proj"] = torch.cat((gate, up), 1)
    packed["model.layers.1.mlp.experts.down_proj"] = down
    save(tmp_path, MOE, packed)
    assert_same_weights(dict(iterate_weights(tmp_path)), expected)

    save(tmp_path, MOE, packed | {"model.layers.1.mlp.experts.down_proj": down[:6]})
    with pytest.raises(ValueError, match=r"1 missing: model.layers.1.mlp.experts.6.down_proj.weight"):
        iterate_weights(tmp_path)


def test_fused_layers(tmp_path: Path) -> None:
    """Grouped queries: q has more rows than k and v. Rows that are too many are those of the last part."""
    config = parse_config(CONFIGS["phi3"])
    expected = dict(dummy_weights(config))
    fused = {name: tensor for name, tensor in expected.items() if "_proj" not in name}
    for layer in (f"model.layers.{i}" for i in range(3)):
        for name, parts in FUSED.items():
            module = f"{layer}.{'mlp' if 'up' in name else 'self_attn'}"
            fused[f"{module}.{name}.weight"] = torch.cat([expected[f"{module}.{p}.weight"] for p in parts])
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            fused[f"{layer}.{name}"] = expected[f"{layer}.{name}"]
    save(tmp_path, "phi3", fused)
    assert_same_weights(dict(iterate_weights(tmp_path)), expected)
    for shards in (Shards(config, rank, 2) for rank in range(2)):
        found = dict(iterate_weights(tmp_path, config, shards=shards))
        assert_same_weights(found, dict(dummy_weights(config, shards=shards)))

    save(tmp_path, "phi3", fused | {"model.layers.1.self_attn.qkv_proj.weight": torch.zeros(121, 72)})
    with pytest.raises(ValueError, match=r"shape: model.layers.1.self_attn.v_proj.weight \[25, 72\]"):
        iterate_weights(tmp_path)

    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    quantized = CONFIGS["phi3"] | {"quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ValueError, match=r"gate_up_proj.weight holds 2 quantized layers"):
        iterate_weights(tmp_path)


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    tied = dict(dummy_weights(parse_config(CONFIGS["llama-llama3"])))
    extras = {
        "lm_head.weight": tied["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((10,), torch.nan),
    }
    save(tmp_path, "llama-llama3", tied | extras)
    assert_same_weights(dict(iterate_weights(tmp_path)), tied)


@pytest.mark.parametrize("rows", [1, 10**6], ids=["row-by-row", "at-once"])
def test_a_tied_head_that_is_no_copy_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """The checkpoint does not say which of the two the model was trained with."""
    tied = dict(dummy_weights(parse_config(CONFIGS["llama-llama3"])))
    embedding = tied["model.embed_tokens.weight"]
    monkeypatch.setattr(weights_module, "PIECE_BYTES", rows * embedding.shape[1] * embedding.itemsize)
    other = embedding.clone()
    other[-1, -1] += 1
    for head in (other, embedding[:-1].clone(), torch.zeros(3)):
        save(tmp_path, "llama-llama3", tied | {"lm_head.weight": head})
        with pytest.raises(ValueError, match=r"tie_word_embeddings, but lm_head\.weight is not"):
            dict(iterate_weights(tmp_path))
    save(tmp_path, "llama-llama3", tied | {"lm_head.weight": embedding.clone()})
    assert_same_weights(dict(iterate_weights(tmp_path)), tied)


def test_checks_come_before_the_first_tensor(tmp_path: Path) -> None:
    """An error at the call: a caller need not have made the model yet."""
    weights = dict(dummy_weights(parse_config(CONFIGS[MOE])))
    del weights[NORM]
    save(tmp_path, MOE, weights)
    with pytest.raises(ValueError, match=r"1 missing: model\.norm\.weight"):
        iterate_weights(tmp_path)


def test_all_that_does_not_fit_is_in_one_error(tmp_path: Path) -> None:
    weights = dict(dummy_weights(parse_config(CONFIGS[MOE])))
    for layer_id in range(4):
        del weights[f"model.layers.{layer_id}.self_attn.q_norm.weight"]
    weights["model.layers.0.self_attn.sinks"] = torch.zeros(4)
    weights["lm_head.weight"] = torch.zeros(331, 65)
    save(tmp_path, MOE, weights)
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM") as error:
        iterate_weights(tmp_path)
    message = str(error.value)
    assert str(tmp_path) in message
    assert "4 missing: model.layers.0.self_attn.q_norm.weight, " in message
    assert "1 unknown: model.layers.0.self_attn.sinks;" in message
    assert "1 of the wrong shape: lm_head.weight [331, 65] instead of [331, 64]" in message


def damage(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], r"cut off or damaged: its header promises ([\d,]+) bytes, it has [\d,]+"),
        (lambda data: data + b"\0", "its header promises"),
        (lambda data: data[:500], "500 bytes end in its header"),
        (lambda data: data[:5], "5 bytes end in its header"),
        (lambda data: b"", "0 bytes end in its header"),
        (lambda data: b"PK\3\4" + data, "end in its header"),
        (lambda data: data[:8] + b"?" + data[9:], "its header is invalid"),
        (lambda data: data.replace(b'"data_offsets"', b'"date_offsets"', 1), "KeyError.*data_offsets"),
        (lambda data: data.replace(b'"F32"', b'"I32"', 1), r"of type I32; supported are F64, F32, F16, BF16"),
    ],
)
def test_a_damaged_file(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    save(tmp_path)
    damage(tmp_path, change)
    with pytest.raises(ValueError, match=rf"{tmp_path}/model\.safetensors.*{message}"):
        iterate_weights(tmp_path)


def test_offsets_that_overlap_are_found_when_the_file_is_opened(tmp_path: Path) -> None:
    """The sizes add up, so only the safetensors library notices."""
    save(tmp_path, "llama-llama3")
    data = (tmp_path / "model.safetensors").read_bytes()
    header_len = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_len])
    norms = [name for name in header if name.endswith("layernorm.weight")]
    header[norms[0]]["data_offsets"] = header[norms[1]]["data_offsets"]
    changed = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(changed).to_bytes(8, "little") + changed + data[8 + header_len :]
    )
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        list(iterate_weights(tmp_path))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinity_are_counted(tmp_path: Path, bad: float, dtype: torch.dtype) -> None:
    weights = {name: w.to(dtype) for name, w in dummy_weights(parse_config(CONFIGS[MOE]))}
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    weights[name][2, 5] = weights[name][4, 0] = bad
    config = save(tmp_path, MOE, weights)
    stream = iterate_weights(tmp_path, config)
    with pytest.raises(ValueError, match=f"2 of the 2,560 values of {name} are NaN or infinite"):
        list(stream)


def test_large_finite_weights_pass(tmp_path: Path) -> None:
    """Their sum overflows, they do not."""
    weights = dict(dummy_weights(parse_config(CONFIGS[MOE])))
    weights[NORM] = torch.full_like(weights[NORM], 3e38)
    save(tmp_path, MOE, weights)
    assert torch.equal(dict(iterate_weights(tmp_path))[NORM], weights[NORM])


def test_no_weights(tmp_path: Path) -> None:
    config = parse_config(CONFIGS[MOE])
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        iterate_weights(tmp_path / "nowhere", config)
    with pytest.raises(ValueError, match=r"no weights at all; weights must be model\.safetensors"):
        iterate_weights(tmp_path, config)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"found pytorch_model\.bin; weights must be model.safetensors"):
        iterate_weights(tmp_path, config)


def test_a_missing_shard(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"1 of the 3 files that .* not there: model-00002-of-00003\.safetensors"
    ):
        iterate_weights(tmp_path)


def test_a_shard_that_is_cut_off(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    path = tmp_path / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model-00003-of-00003\.safetensors is cut off"):
        iterate_weights(tmp_path)


def test_an_index_of_another_checkpoint(tmp_path: Path) -> None:
    weight_map = save_sharded(tmp_path)
    first, second = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
    write_index(tmp_path, weight_map | {NORM: first, "extra": first})
    with pytest.raises(ValueError, match=f"{first} lacks extra, .*not of one checkpoint"):
        iterate_weights(tmp_path)
    del weight_map[next(name for name, file in weight_map.items() if file == second)]
    write_index(tmp_path, weight_map)
    with pytest.raises(ValueError, match=f"{second} also has model.layers.0.self_attn.q_proj.weight"):
        iterate_weights(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not an index"),
        ("[]", "is not an index"),
        ('{"metadata": {}}', "is not an index"),
        ('{"weight_map": ["a"]}', "must map names of tensors to names of files"),
        ('{"weight_map": {"a": 1}}', "must map names of tensors to names of files"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "'../model.safetensors' is not a file name"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        iterate_weights(tmp_path, parse_config(CONFIGS[MOE]))


def test_dummy_weights_depend_on_seed_and_name_only() -> None:
    config = parse_config(CONFIGS["llama-biases"])
    torch.manual_seed(1)
    weights = dict(dummy_weights(config, seed=5))
    torch.manual_seed(2)
    assert_same_weights(dict(dummy_weights(config, seed=5)), weights)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected_shapes(config)
    other = dict(dummy_weights(config, seed=6))
    assert not any(torch.equal(other[name], tensor) for name, tensor in weights.items())
    # One layer more leaves the others as they were.
    deeper = replace(config, num_hidden_layers=3, sliding_windows=())
    deeper_weights = dict(dummy_weights(deeper, seed=5))
    assert_same_weights({name: deeper_weights[name] for name in weights}, weights)


def test_dummy_weights_keep_activations_of_one_size() -> None:
    config = parse_config(CONFIGS["llama-biases"])
    for name, tensor in dummy_weights(config):
        std, mean = float(tensor.std()), float(tensor.mean())
        # Of n values, the mean is off by std / sqrt(n), the spread by 1 / sqrt(2n) of itself: 5 sigmas.
        sigma = 5 / tensor.numel() ** 0.5
        expected_std = tensor.shape[1] ** -0.5 if tensor.dim() == 2 else 0.1
        assert abs(std / expected_std - 1) < sigma, name
        assert abs(mean - (1.0 if "norm" in name else 0.0)) < sigma * expected_std, name


def test_dummy_weights_have_the_dtype_of_the_checkpoint() -> None:
    config = replace(parse_config(CONFIGS[MOE]), dtype=torch.bfloat16)
    assert {tensor.dtype for _, tensor in dummy_weights(config)} == {torch.bfloat16}


def test_dummy_weights_can_be_saved_and_read_back(tmp_path: Path) -> None:
    config = save(tmp_path)
    assert_same_weights(load_file(tmp_path / "model.safetensors"), dict(dummy_weights(config)))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_loading_bar_is_shown_on_a_terminal_only(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    bar = LoadingBar()
    for num_read in (MIN_BYTES // 2, MIN_BYTES):
        bar.update(num_read, MIN_BYTES)
    assert ("load weights" in capsys.readouterr().err) == is_terminal


@pytest.mark.parametrize("name", CONFIGS)
def test_a_canonical_name_is_read_as_itself(name: str) -> None:
    """So a weight may be sent back by the name that it was got by. GLM-4's checkpoints have a name of ours
    for another norm."""
    config = parse_config(CONFIGS[name])
    shapes = expected_shapes(config)
    assert [canonical_parts(n, shape, config)[0].name for n, shape in shapes.items()] == list(shapes)
