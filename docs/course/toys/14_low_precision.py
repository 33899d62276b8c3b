# --8<-- [start:toy-quantize]
import torch


def quantize(x, bits=8):
    """[rows, n] -> (integers, scales [rows, 1]): the largest value is the largest q."""
    scale = x.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    scale = torch.where(scale == 0, 1.0, scale)
    return (x / scale).round().to(torch.int8), scale


def linear(x, q, scale):
    """x [num_tokens, in]; q, scale of a weight [out, in]. Each token gets a scale."""
    q_x, scale_x = quantize(x)
    return (q_x.int() @ q.int().T) * scale_x * scale.T
    # --8<-- [end:toy-quantize]


# --8<-- [start:toy-pack]
def pack(weight, group):
    """[out, in] -> (bytes [out, in / 2], scales [out, in / group])"""
    q, scale = quantize(weight.reshape(-1, group), bits=4)
    low, high = (q + 8).to(torch.uint8).chunk(2, dim=1)  # -7 to 7 becomes 1 to 15
    return (low + 16 * high).view(len(weight), -1), scale.view(len(weight), -1)


def unpack(packed, scale):
    """-> [out, in]: the values that the bytes and scales stand for."""
    halves = packed.view(scale.numel(), -1)
    q = torch.cat([halves % 16, halves // 16], dim=1).float() - 8
    return (q * scale.view(-1, 1)).view(len(packed), -1)
    # --8<-- [end:toy-pack]
