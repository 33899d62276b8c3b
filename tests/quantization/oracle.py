"""Checkpoints of compressed-tensors, written by its own library, and what its linear layers compute."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

IDS = torch.tensor([[5, 9, 200, 31, 77, 5, 18, 2]])
SIZES = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # k and v: half a block of 128 outputs each
    "max_position_embeddings": 64,
}


def tiny_model(**changes: object) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **changes}, tie_word_embeddings=False)).eval()
    for parameter in model.parameters():  # large enough that layers differ
        parameter.data.mul_(3.0) if parameter.dim() == 2 else None
    return model


Recorded = dict[str, tuple[torch.Tensor, torch.Tensor]]


def write_checkpoint(folder: Path, preset: str) -> tuple[Recorded, torch.Tensor]:
    """Quantize a tiny model by a preset of compressed-tensors and save it. Returns input and output of each
    linear layer, and the logits of IDS."""
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    model = tiny_model()
    scheme = preset_name_to_scheme(preset, ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    for layer in layers.values():
        _set_scales(layer)
    recorded: Recorded = {}
    hooks = [
        layer.register_forward_hook(
            lambda _, args, y, name=name: recorded.update({name: (args[0][0].clone(), y[0].clone())})
        )
        for name, layer in layers.items()
    ]
    with torch.no_grad():
        logits = model(IDS).logits[0]
    for hook in hooks:
        hook.remove()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return recorded, logits


def _set_scales(layer: nn.Linear) -> None:
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    scheme = layer.quantization_scheme
    args, weight = scheme.weights, layer.weight.data
    if args.strategy == "tensor":
        parts, dims = weight, None
    elif args.strategy == "channel":
        parts, dims = weight, (1,)
    elif args.strategy == "tensor_group":
        parts, dims = weight.unflatten(1, (-1, args.group_size)), (2,)
        divisor = 448.0 * 6.0 / weight.abs().max()
        layer.weight_global_scale.data.copy_(divisor.reshape(layer.weight_global_scale.shape))
        if scheme.input_activations is not None:
            layer.input_global_scale.data.fill_(100.0)
        scale = (divisor * parts.abs().amax(dims) / 6.0).to(torch.float8_e4m3fn)
        layer.weight_scale.data.copy_(scale.to(layer.weight_scale.dtype))
        return
    elif args.strategy == "group":
        parts, dims = weight.unflatten(1, (-1, args.group_size)), (2,)
    else:
        rows, columns = args.block_structure
        padded = nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        parts, dims = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)), (1, 3)
    smallest, largest = (parts.amin(dims), parts.amax(dims)) if dims else (parts.min(), parts.max())
    scale, zero = calculate_qparams(smallest, largest, args)
    layer.weight_scale.data.copy_(scale.reshape(layer.weight_scale.shape))
    if not args.symmetric:
        layer.weight_zero_point.data.copy_(zero.reshape(layer.weight_zero_point.shape))
    if scheme.input_activations is not None and not scheme.input_activations.dynamic:
        limit = torch.tensor(2.0)  # smaller than some inputs, which are clamped
        layer.input_scale.data.copy_(calculate_qparams(-limit, limit, scheme.input_activations)[0])
