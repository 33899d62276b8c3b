# mypy: ignore-errors
# ruff: noqa: F821
class QuantizedLinear:
    def dequantized_weight(self) -> torch.Tensor:
        if not self.scheme.is_packed:
            size = self.weight.shape[-1]
            scale = self.weight_scale.repeat_interleave(self.scheme.group_size or size, dim=-1)
            return self.weight.to(torch.float32) * scale[..., :size]
        groups = self.weight.unflatten(-1, (self.weight_scale.shape[-1], -1))
        q = torch.cat((groups & 15, groups >> 4), dim=-1).to(torch.float32)
        zero = INT4_ZERO if self.weight_zero is None else self.weight_zero[..., None].to(torch.float32)
        return ((q - zero) * self.weight_scale[..., None]).flatten(-2)

    def dequantized_input(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32)
        if self.scheme.inputs == "none":
            return x
        size = x.shape[-1]
        group_size = (self.scheme.inputs == "group" and self.scheme.group_size) or size
        groups = F.pad(x, (0, -size % group_size)).unflatten(-1, (-1, group_size))
        scale = self._scale(groups) if self.input_scale is None else self.input_scale
        q = self._rounded(groups / scale)
        return (q * scale).flatten(-2)[..., :size]

    def _scale(self, groups: torch.Tensor) -> torch.Tensor:
        largest = groups.abs().amax(-1, keepdim=True)
        if self.tp is not None and self.scheme.inputs == "token":
            largest = self.tp.all_gather(largest[None]).amax(0)
        scale = largest / (FP8_MAX if self.scheme.weight_type == "fp8" else INT8_STEPS)
        return torch.where(scale == 0, 1.0, scale)

    def _rounded(self, q: torch.Tensor) -> torch.Tensor:
        if self.scheme.weight_type == "fp8":
            return q.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(torch.float32)
        return q.round().clamp(-128, 127)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(self.dequantized_input(x), self.dequantized_weight())
        return (y if self.bias is None else y + self.bias).to(x.dtype)
