"""Quantized checkpoints of every kind: weights as other libraries read them, a rank's parts, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diptych.shared import registry
from diptych.shared.config import EngineConfig, read_config, read_draft_config
from diptych.shared.interfaces import QuantizedLinear
from diptych.shared.loading.draft_weights import iterate_draft_weights
from diptych.shared.loading.load_model import load_model
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.loading.quantize import quantize_weight
from diptych.shared.loading.shards import Shards
from diptych.shared.loading.weights import iterate_weights
from diptych.shared.types.quant_scheme import QuantScheme
from tests.quantization.oracle import tiny_model, write_checkpoint

SOME, LINEAR = "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.k_proj"
Tensors = dict[str, torch.Tensor]


def load(folder: Path) -> torch.nn.Module:
    config = read_config(folder)
    flags = EngineConfig(model=str(folder))
    component = lambda name: registry.load(name, "reference")  # noqa: E731
    return load_model(folder, config, flags, component, torch.device("cpu"), torch.float32)


def quantized_layers(model: torch.nn.Module) -> dict[str, QuantizedLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLinear)}


@pytest.mark.parametrize(
    "preset",
    [
        "FP8_BLOCK",
        "W4A16_ASYM",
        "FP8_DYNAMIC",
        "FP8",  # static scales of inputs
        "W8A8",
        "W4A16",
    ],
)
def test_layers_equal_those_of_compressed_tensors(preset: str, tmp_path: Path) -> None:
    recorded, logits = write_checkpoint(tmp_path, preset)
    model = load(tmp_path)
    layers = quantized_layers(model)
    assert layers.keys() == recorded.keys()
    for name, (x, y) in recorded.items():
        assert torch.equal(layers[name](x), y), name
    assert logits.isfinite().all()


def write(
    folder: Path, quantization: dict[str, object], pack: Callable[[str, torch.Tensor], Tensors]
) -> Tensors:
    """A checkpoint whose linear layers are what `pack` makes of their weight. Returns the plain weights."""
    model = tiny_model()
    model.config.quantization_config = None
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    stored: Tensors = {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            stored |= pack(name.removesuffix(".weight"), weight)
        else:
            stored[name] = weight
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return weights


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}


def pack_blocks(module: str, weight: torch.Tensor) -> Tensors:
    out, size = weight.shape
    scale = 0.001 + 0.01 * torch.rand(-(-out // 128), -(-size // 128))
    by_value = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:out, :size]
    q = (weight / by_value).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {f"{module}.weight": q, f"{module}.weight_scale_inv": scale}


def test_blocks_equal_those_of_fine_grained_fp8(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    write(tmp_path, FP8, pack_blocks)
    progress: list[tuple[int, int]] = []
    list(iterate_weights(tmp_path, on_progress=lambda *bytes_read: progress.append(bytes_read)))
    assert progress == sorted(progress)
    assert (
        progress[-1][0]
        == progress[-1][1]
        == sum(
            tensor.numel() * tensor.element_size()
            for tensor in load_file(tmp_path / "model.safetensors").values()
        )
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    expected = dict(theirs.named_parameters())
    for name, layer in quantized_layers(load(tmp_path)).items():
        assert torch.equal(layer.dequantized_weight(), expected[f"{name}.weight"].data.float()), name


def nibbles(weight: torch.Tensor, group_size: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """q and zero of 0 to 15, and scale, float16, of a weight [out, in]: lists of Python's integers."""
    groups = weight.unflatten(1, (-1, group_size))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale = ((high - low) / 15).to(torch.float16)
    zero = torch.full_like(low, 8) if symmetric else (-low / scale.float()).round().clamp(1, 15)
    q = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    return q.flatten(1).to(torch.int64), zero.to(torch.int64), scale


def packed(values: torch.Tensor, positions: tuple[int, ...]) -> torch.Tensor:
    """int64 [rows, 8 * n] -> int32 [rows, n]: value i of 8 in the nibble positions[i]."""
    rows = []
    for row in values.tolist():
        words = [
            sum(value << 4 * positions[i] for i, value in enumerate(row[k : k + 8]))
            for k in range(0, len(row), 8)
        ]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # column 1 of 8 is in nibble 4


def expected_of(weights: Tensors, group_size: int, symmetric: bool) -> Tensors:
    expected = {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            q, zero, scale = nibbles(weight, group_size, symmetric)
            by_input = (tensor.float().repeat_interleave(group_size, 1) for tensor in (zero, scale))
            zeros, scales = by_input
            expected[name.removesuffix(".weight")] = (q - zeros) * scales
    return expected


@pytest.mark.parametrize(
    ("version", "symmetric"),
    [("gptq", False), ("gptq_v2", False), ("gptq", True)],
)
def test_gptq(version: str, symmetric: bool, tmp_path: Path) -> None:
    def pack(module: str, weight: torch.Tensor) -> Tensors:
        q, zero, scale = nibbles(weight, 64, symmetric)
        stored_zero = zero.T - (1 if version == "gptq" else 0)
        return {
            f"{module}.qweight": packed(q, IN_ORDER).T,
            f"{module}.qzeros": packed(stored_zero, IN_ORDER),
            f"{module}.scales": scale.T,
            f"{module}.g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // 64,
        }

    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": symmetric, "desc_act": False}
    weights = write(tmp_path, {**config, "checkpoint_format": version}, pack)
    expected = expected_of(weights, 64, symmetric)
    layers = quantized_layers(load(tmp_path))
    assert layers.keys() == expected.keys()
    for name, layer in layers.items():
        assert torch.equal(layer.dequantized_weight(), expected[name]), name


def pack_awq(module: str, weight: torch.Tensor) -> Tensors:
    q, zero, scale = nibbles(weight, 128, False)
    return {
        f"{module}.qweight": packed(q.T, AWQ),
        f"{module}.qzeros": packed(zero.T, AWQ),
        f"{module}.scales": scale.T,
    }


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def test_awq_and_parts_of_ranks(tmp_path: Path) -> None:
    expected = expected_of(write(tmp_path, AWQ_CONFIG, pack_awq), 128, False)
    for name, layer in quantized_layers(load(tmp_path)).items():
        assert torch.equal(layer.dequantized_weight(), expected[name]), name
    with pytest.raises(ValueError, match=r"tp=2: .*o_proj is cut into 2 parts of 64 inputs.* group of 128"):
        parts(tmp_path, 2)


def test_awq_equals_the_converter_of_compressed_tensors(tmp_path: Path) -> None:
    """Random bits as qweight and qzeros, which compressed-tensors unpacks, reorders and dequantizes."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs(num_bits=4, strategy="group", group_size=128, symmetric=False)

    def pack(module: str, weight: torch.Tensor) -> Tensors:
        out, size = weight.shape
        bits = torch.iinfo(torch.int32)
        shapes = {"qweight": (size, out // 8), "qzeros": (size // 128, out // 8)}
        stored = {f"{module}.{name}": torch.randint(bits.min, bits.max, shape, dtype=torch.int32)
                  for name, shape in shapes.items()}  # fmt: skip
        return {**stored, f"{module}.scales": (0.001 + 0.01 * torch.rand(size // 128, out)).half()}

    write(tmp_path, AWQ_CONFIG, pack)
    theirs = AutoAWQConverter.from_autoawq_config(AWQ_CONFIG).process(
        load_file(tmp_path / "model.safetensors")
    )
    layers = quantized_layers(load(tmp_path))
    assert len(layers) == 14
    for name, layer in layers.items():
        shape = theirs[f"{name}.weight_shape"]
        scale = theirs[f"{name}.weight_scale"].float()
        q = unpack_from_int32(theirs[f"{name}.weight_packed"], 4, shape)
        zero_shape = torch.Size((layer.out_features, layer.in_features // 128))
        zero = unpack_from_int32(theirs[f"{name}.weight_zero_point"], 4, zero_shape, packed_dim=0)
        assert torch.equal(layer.dequantized_weight(), dequantize(q, scale, zero, args)), name


def test_one_scale_for_a_layer(tmp_path: Path) -> None:
    """quant_method fp8 without blocks: scalars, for the weight and for the input."""

    def pack(module: str, weight: torch.Tensor) -> Tensors:
        scale = weight.abs().amax() / 448
        q = (weight / scale).to(torch.float8_e4m3fn)
        expected[module] = q.float() * scale
        return {f"{module}.weight": q, f"{module}.weight_scale": scale, f"{module}.input_scale": scale * 9}

    expected: Tensors = {}
    write(tmp_path, {"quant_method": "fp8", "activation_scheme": "static"}, pack)
    for name, layer in quantized_layers(load(tmp_path)).items():
        assert torch.equal(layer.dequantized_weight(), expected[name]), name
        assert layer.input_scale is not None
        assert torch.equal(layer.input_scale, 9 * layer.weight_scale[0]), name


def test_torchao(tmp_path: Path) -> None:
    """Names and shapes as torchao 0.17 writes them."""

    def pack(module: str, weight: torch.Tensor) -> Tensors:
        scale = weight.abs().amax(1, keepdim=True) / 448
        q = (weight / scale).to(torch.float8_e4m3fn)
        expected[module] = q.float() * scale
        return {f"{module}._weight_qdata": q, f"{module}._weight_scale": scale}

    expected: Tensors = {}
    kind = {
        "_type": "Float8DynamicActivationFloat8WeightConfig",
        "_data": {"granularity": [{"_type": "PerRow"}]},
    }
    write(tmp_path, {"quant_method": "torchao", "quant_type": {"default": kind}}, pack)
    for name, layer in quantized_layers(load(tmp_path)).items():
        assert torch.equal(layer.dequantized_weight(), expected[name]), name
        assert layer.scheme.inputs == "token"


def test_a_head_of_eagle_is_dequantized(tmp_path: Path) -> None:
    """Its layer is called midlayer, and fc before it is not quantized."""
    target = read_config(ASSETS / "tiny-dense")
    plain = dict(iterate_draft_weights(ASSETS / "tiny-dense-eagle3"))
    stored, expected = dict(plain), dict(plain)
    for name, weight in plain.items():
        if name.endswith("_proj.weight"):
            q, scale = quantize_weight(weight, QuantScheme("fp8", 128, 128, "group")).values()
            stored |= {name: q, f"{name}_scale_inv": scale[::128].contiguous()}
            by_value = scale.repeat_interleave(128, 1)[:, : weight.shape[1]]
            expected[name] = q.float() * by_value
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((ASSETS / "tiny-dense-eagle3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    draft_config = read_draft_config(tmp_path, target, "eagle3")
    found = dict(iterate_draft_weights(tmp_path, draft_config))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def parts(folder: Path, size: int) -> list[Tensors]:
    config = read_config(folder)
    return [dict(iterate_weights(folder, config, shards=Shards(config, rank, size))) for rank in range(size)]


def test_ranks_read_parts_of_blocks(tmp_path: Path) -> None:
    """Outputs of a block may be cut: q_proj has 128 outputs in one block. Inputs may not: down_proj's 384 are
    3 blocks."""
    config = FP8 | {"modules_to_not_convert": ["down_proj", "o_proj"]}

    def pack(module: str, weight: torch.Tensor) -> Tensors:
        is_plain = module.endswith(("down_proj", "o_proj"))
        return {f"{module}.weight": weight} if is_plain else pack_blocks(module, weight)

    write(tmp_path, config, pack)
    whole = dict(iterate_weights(tmp_path))
    by_rank = parts(tmp_path, 2)
    for name, tensor in whole.items():
        if ".layers." not in name or "norm" in name:
            continue
        dim = 1 if name.endswith(("down_proj.weight", "o_proj.weight")) else 0
        assert torch.equal(torch.cat([part[name].float() for part in by_rank], dim), tensor.float()), name
    scales = by_rank[1]["model.layers.0.self_attn.q_proj.weight_scale"]
    assert scales.shape == (64, 2), "a row for each output of the rank"


def changed(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_wrong_tensors_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, FP8, pack_blocks)
    original = load_file(tmp_path / "model.safetensors")
    scale = f"{SOME}.weight_scale_inv"
    infinite = original[scale].clone()
    infinite[0, 0] = torch.inf
    nan = original[f"{SOME}.weight"].clone()
    nan.view(torch.uint8)[3, 3] = 0x7F
    for changes, message in (
        ({scale: None}, rf"{SOME}.weight_scale_inv is missing"),
        ({scale: original[scale].T}, rf"{SOME}.weight_scale_inv has shape \[3, 2\], not \[2, 3\]"),
        ({scale: original[scale][:1]}, r"has shape \[1, 3\], not \[2, 3\]"),
        ({f"{SOME}.weight_scale": original[scale].clone()}, rf"{SOME}.weight_scale is unknown"),
        ({f"{SOME}.weight": torch.zeros(256, 384)}, rf"{SOME}.weight is of type F32, not F8_E4M3"),
        ({scale: -original[scale]}, rf"{SOME}.weight_scale_inv has scales that are negative"),
        ({scale: infinite}, r"NaN or infinite"),
        ({f"{SOME}.weight": nan}, rf"{SOME}.weight has NaN values"),
    ):
        tensors = {name: tensor for name, tensor in (original | changes).items() if tensor is not None}
        save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            list(iterate_weights(tmp_path))


def test_orders_and_zeros_of_gptq_are_checked(tmp_path: Path) -> None:
    def pack(module: str, weight: torch.Tensor) -> Tensors:
        q, zero, scale = nibbles(weight, 128, True)
        return {
            f"{module}.qweight": packed(q, IN_ORDER).T,
            f"{module}.qzeros": packed(zero.T - 3 * (module == SOME), IN_ORDER),
            f"{module}.scales": scale.T,
            f"{module}.g_idx": torch.arange(weight.shape[1] - 1, -1, -1, dtype=torch.int32) // 128,
        }

    write(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, pack)
    with pytest.raises(ValueError, match=r"g_idx: the inputs are not in the order of their groups, but"):
        list(iterate_weights(tmp_path))

    def in_order(tensors: Tensors) -> None:
        tensors.update({n: t.flip(0) for n, t in tensors.items() if n.endswith("g_idx")})

    changed(tmp_path, in_order)
    with pytest.raises(ValueError, match=rf"{SOME}.qzeros has zero points other than 8"):
        list(iterate_weights(tmp_path))


def test_ignored_layers_stay_as_they_are(tmp_path: Path) -> None:
    """Names are of layers before merging; the ignored ones have no scales."""
    config = FP8 | {"modules_to_not_convert": ["lm_head", LINEAR]}
    write(tmp_path, config, lambda m, w: {f"{m}.weight": w} if m == LINEAR else pack_blocks(m, w))
    layers = quantized_layers(load(tmp_path))
    assert LINEAR not in layers
    assert len(layers) == 13
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]["modules_to_not_convert"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"{LINEAR}.weight is of type F32, not F8_E4M3"):
        list(iterate_weights(tmp_path))
