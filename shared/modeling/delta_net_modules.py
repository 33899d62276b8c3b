"""The modules of a layer of gated DeltaNet or of KDA, with the names of Hugging Face's weights."""

from __future__ import annotations

import torch
from torch import nn

from diptych.shared.config import ModelConfig
from diptych.shared.interfaces import layers as interface
from diptych.shared.interfaces.linear_attention import LinearLayer


def _empty(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Weight(nn.Module):
    """A module that is only the name of its weight."""

    def __init__(self, *shape: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = _empty(*shape, dtype=dtype)


class Convolutions(interface.MergedLinear, Weight):
    """The weight of the convolution, whose parts checkpoints may hold one by one."""

    def __init__(self, parts: dict[str, int], num_taps: int) -> None:
        super().__init__(sum(parts.values()), 1, num_taps)
        self.parts = parts

    def weight_views(self) -> dict[str, torch.Tensor]:
        views = self.weight.split(list(self.parts.values()))
        return {f"{part}.weight": view for part, view in zip(self.parts, views)}

    def split(self, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(self.parts, y.split(list(self.parts.values()), dim=-1)))


class GatedDeltaNetModules(nn.Module):
    """Four projections of a token, the convolution, the decay of each value head, the norm of its output, and
    the projection back. Decay and norm are float32, as checkpoints have them."""

    linear_class: type[nn.Module]
    in_proj_qkv: nn.Module  # and the others, where a panel does not merge them
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        linear = config.linear_attention
        assert linear is not None
        self.config, self.layer_id = linear, config.layer_of_kind(layer_id)
        self.eps = config.rms_norm_eps
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.make_projections(config.hidden_size, linear.projections)
        self.conv1d = Convolutions(linear.convolutions, linear.conv_kernel)
        self.A_log = _empty(linear.num_v_heads, dtype=wide)
        self.dt_bias = _empty(linear.num_v_heads * linear.num_decays, dtype=wide)
        self.norm = Weight(linear.v_head_dim, dtype=wide)
        self.out_proj = self.linear_class(linear.v_size, config.hidden_size)

    def make_projections(self, hidden_size: int, sizes: dict[str, int]) -> None:
        """Modules for the projections of the input, by name."""
        for name, size in sizes.items():
            self.add_module(name, self.linear_class(hidden_size, size))

    @property
    def layer(self) -> LinearLayer:
        return LinearLayer(self.layer_id, self.config, self.conv1d.weight.squeeze(1))


class KimiDeltaModules(GatedDeltaNetModules):
    """KDA: decay and output gate come from matrices of low rank."""

    f_a_proj: nn.Module  # and the others, where a panel does not merge them
    g_a_proj: nn.Module
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__(config, layer_id)
        linear = self.config
        self.f_b_proj = self.linear_class(linear.k_head_dim, linear.k_size)
        self.g_b_proj = self.linear_class(linear.v_head_dim, linear.v_size)
