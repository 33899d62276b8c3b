import pytest
import torch

from reference.layers import MLP, Linear, RMSNorm, RotaryEmbedding, SiluAndMul
from shared.config import RopeConfig
from shared.rope import rope_frequencies

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def make_norm(hidden_size: int, dtype: torch.dtype, eps: float = 1e-5) -> RMSNorm:
    norm = RMSNorm(hidden_size, eps)
    norm.weight.data = torch.randn(hidden_size).to(dtype)
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 63), (3, 4, 80), (0, 16)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    before = x.clone()
    norm = make_norm(shape[-1], dtype)
    y = norm(x)
    x64 = x.double()
    expected = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    # Two roundings to the dtype (after the division, after the product), and a few float32 ones.
    rtol = max(2 * torch.finfo(dtype).eps, 1e-6 if dtype != torch.float64 else 0.0)
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=0.0)
    assert y.dtype == dtype
    assert torch.equal(x, before)


def test_rms_norm_of_large_and_small_halves() -> None:
    """Squares of float16 overflow at 256: the mean must be taken in float32. eps matters at 1e-3."""
    norm = make_norm(8, torch.float16)
    large = torch.full((1, 8), 3e4, dtype=torch.float16)
    torch.testing.assert_close(norm(large)[0], norm.weight.data, rtol=2e-3, atol=0.0)  # 2 roundings of 5e-4
    small = torch.full((1, 8), 1e-3, dtype=torch.float16)
    expected = norm.weight.data * (1e-3 / (1e-6 + 1e-5) ** 0.5)
    torch.testing.assert_close(norm(small)[0], expected, rtol=3e-3, atol=0.0)  # 3 roundings of 5e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_and_norm(dtype: torch.dtype) -> None:
    x, residual = torch.randn(7, 48).to(dtype), torch.randn(7, 48).to(dtype)
    norm = make_norm(48, dtype)
    total = x + residual
    expected = norm(total)
    y, new_residual = norm.add_and_norm(x.clone(), residual.clone())
    assert torch.equal(new_residual, total)
    assert torch.equal(y, expected)


@pytest.mark.parametrize("rotary_dim", [80, 20, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_rotates_pairs(rotary_dim: int, dtype: torch.dtype) -> None:
    rope = RopeConfig("default", 10000.0, rotary_dim)
    rotary_emb = RotaryEmbedding(rope, 80, 512)
    positions = torch.tensor([0, 3, 511, 3, 100])
    q, k = torch.randn(5, 6, 80).to(dtype), torch.randn(5, 2, 80).to(dtype)
    rotated_q, rotated_k = rotary_emb(positions, q.clone(), k.clone())
    inv_freq, _ = rope_frequencies(rope)
    for x, rotated in ((q, rotated_q), (k, rotated_k)):
        # Each pair (i, i + rotary_dim / 2) as a complex number, times e^(i angle).
        half = rotary_dim // 2
        pairs = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double())
        angles = (positions[:, None].float() * inv_freq).double()[:, None]
        turned = pairs * torch.polar(torch.ones_like(angles), angles)
        expected = torch.cat((turned.real, turned.imag, x[..., rotary_dim:].double()), -1)
        # cos and sin are float32 (1e-7, on values up to 4), then one rounding to the dtype.
        tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(dtype, 1e-6)
        torch.testing.assert_close(rotated.double(), expected, rtol=tolerance, atol=1e-6)
        assert rotated.dtype == dtype
        assert torch.equal(rotated[..., rotary_dim:], x[..., rotary_dim:])
        assert torch.equal(rotated[0], x[0])  # position 0 stays


def test_scores_depend_on_the_distance_only() -> None:
    rotary_emb = RotaryEmbedding(RopeConfig("default", 10000.0, 32), 32, 1024)
    q, k = torch.randn(1, 1, 32).expand(2, -1, -1), torch.randn(1, 1, 32).expand(2, -1, -1)
    rotated_q, _ = rotary_emb(torch.tensor([17, 917]), q, k)
    _, rotated_k = rotary_emb(torch.tensor([5, 905]), q, k)
    scores = (rotated_q * rotated_k).sum(-1)
    # The angle at position 917 carries a float32 rounding of 3e-5.
    torch.testing.assert_close(scores[0], scores[1], rtol=0.0, atol=1e-3)
    assert not torch.allclose(scores[0], (q[0] * k[0]).sum(), atol=1e-1)


def test_dynamic_scaling_follows_each_tokens_own_position() -> None:
    rope = RopeConfig("dynamic", 10000.0, 16, factor=4.0, original_max_position_embeddings=32)
    rotary_emb = RotaryEmbedding(rope, 16, 128)

    def angles(positions: list[int]) -> torch.Tensor:
        return rotary_emb.cos_sin(torch.tensor(positions, dtype=torch.int64))[:, 0, 0, :8]

    def cos(position: int, seq_len: int) -> torch.Tensor:
        return (position * rope_frequencies(rope, seq_len)[0]).cos()

    # 1e-6: a cosine's last bit depends on where in a vector register it was computed.
    mixed = angles([10, 31, 32, 99])
    for row, position in enumerate((10, 31, 32, 99)):
        torch.testing.assert_close(mixed[row], cos(position, position + 1), rtol=0.0, atol=1e-6)
    assert not torch.allclose(cos(99, 0), cos(99, 100), atol=1e-3)
    assert torch.equal(angles([10])[0], mixed[0])  # its mates in the step change nothing
    assert angles([]).shape == (0, 8)


def test_the_attention_factor_of_yarn_scales_q_and_k() -> None:
    rope = RopeConfig("yarn", 1e4, 16, 4.0, 64, attention_factor=1.5)
    rotary_emb = RotaryEmbedding(rope, 16, 256)
    q = torch.randn(1, 3, 16)
    rotated, _ = rotary_emb(torch.tensor([200]), q, q)
    # A rotation keeps lengths; 1e-5: sums of 16 float32 squares.
    torch.testing.assert_close(rotated.norm(dim=-1), 1.5 * q.norm(dim=-1), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (5, 126), (2, 3, 16), (0, 8)])
def test_silu_and_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up = (4 * torch.randn(shape)).to(dtype)
    y = SiluAndMul()(gate_up)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-gate)) * up
    # One rounding to the dtype, a few in float32.
    rtol = max(torch.finfo(dtype).eps, 1e-6 if dtype != torch.float64 else 0.0)
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=1e-7)
    assert y.dtype == dtype
    assert y.shape == (*shape[:-1], shape[-1] // 2)


@pytest.mark.parametrize("bias", [False, True])
def test_mlp(bias: bool) -> None:
    mlp = MLP(10, 14, bias).double()
    for parameter in mlp.parameters():
        parameter.data.normal_()
    assert [linear.bias is not None for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)] == [bias] * 3
    x = torch.randn(3, 10, dtype=torch.float64)

    def linear(layer: Linear, x: torch.Tensor) -> torch.Tensor:
        y = x @ layer.weight.T
        return y if layer.bias is None else y + layer.bias

    gate = linear(mlp.gate_proj, x)
    expected = linear(mlp.down_proj, gate * gate.sigmoid() * linear(mlp.up_proj, x))
    torch.testing.assert_close(mlp(x), expected)


def test_parameters_take_no_gradient() -> None:
    modules = (Linear(3, 4, bias=True), RMSNorm(5, 1e-6), MLP(3, 4))
    assert not any(parameter.requires_grad for module in modules for parameter in module.parameters())
