"""Scaled logits and Gumbel noise, the same in every sampling kernel (`diptych.shared.sampling.noise` defines
the noise).

The noise of a token is exact in two steps, because float64 logarithms of a whole vocabulary would cost more
than reading it: float32 noise, off by less than MARGIN / 2 together with its logit, finds the best token, and
where a second one comes within MARGIN of it, float64 decides.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

MARGIN = tl.constexpr(6e-5)
"""Twice the error of a float32 score of a token that can win. Scores are at least -3.2 for the likeliest
token, and noise is at most 22.9 (v has 33 bits), so only scaled logits above -27 matter: these are off by at
most 4 roundings of 27 (7e-6), noise by a relative error of 2^-22 of up to 23 and the 3e-7 of w (6e-6)."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _mix(h):
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def token_hash(h, word):
    return _mix((h ^ word.to(tl.uint32)) + 0x9E3779B9)


@triton.jit
def tile_hash(state, first_id, DEPTH: tl.constexpr, WIDTH: tl.constexpr):
    """`token_hash` of the tokens from first_id on, as a tile [DEPTH, WIDTH]. Both are powers of two, and
    first_id a multiple of both: then a row of the tile changes bits of its own, by what no column matters to,
    and each token costs an addition instead of an id, xor and addition."""
    columns = (first_id + tl.arange(0, WIDTH)).to(tl.uint32)
    rows = (tl.arange(0, DEPTH) * WIDTH).to(tl.uint32)
    return _mix(((state ^ columns) + 0x9E3779B9)[None, :] + ((state ^ rows) - state)[:, None])


@triton.jit
def noise_state(seeds, positions):
    """The three rounds of the hash that all tokens of a row share -> uint32."""
    h = token_hash((seeds ^ seeds).to(tl.uint32), seeds)
    h = token_hash(h, seeds >> 32)
    return token_hash(h, positions)


@triton.jit
def gumbel64(state, token_ids):
    """-log(-log1p(-v)), v = (hash + 0.5) / 2^32. 1 - v has 33 bits: it is exact, and log1p is not needed."""
    return gumbel64_of(token_hash(state, token_ids))


@triton.jit
def gumbel64_of(h):
    v = (h.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return -tl.log(-tl.log(1.0 - v))


@triton.jit
def _log2(x):
    """The hardware's, within 2^-22 of it (relative to it, or absolutely where x is between 1/2 and 2); the
    library's takes three times as long as all the rest of the noise."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


@triton.jit
def gumbel32(state, token_ids):
    """The same in float32, accurate at both ends: w = -log1p(-v) is v times a polynomial for v < 1/2 (within
    3e-7), else the logarithm of 1 - v, which comes from the complement of the hash without cancellation."""
    return gumbel32_of(token_hash(state, token_ids))


@triton.jit
def gumbel32_of(h):
    w = tl.where(h < 0x80000000, exponential_of(h), -0.6931471805599453 * _log2(_uniform(h ^ 0xFFFFFFFF)))
    return -0.6931471805599453 * _log2(w)


@triton.jit
def _uniform(h):
    return h.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # 2^-32, 2^-33


@triton.jit
def log2_of_hash(h):
    """log2(v) + 32 without the half: never more than log2(w) + 32, but for 8e-6."""
    return _log2(h.to(tl.float32))


@triton.jit
def exponential_of(h):
    """w = -log1p(-v), of which the noise is -log w, for v < 1/2; some positive number for others."""
    v = _uniform(h)
    p = 1.1586140394210815
    p = p * v - 1.0360389947891235
    p = p * v + 0.7545884251594543
    p = p * v + 0.04835805669426918
    p = p * v + 0.2704770267009735
    p = p * v + 0.3320068418979645
    p = p * v + 0.5000321865081787
    p = p * v + 0.9999998807907104
    return p * v


@triton.jit
def scaled_logits(logits, largest, temperatures):
    """(logits - largest) / temperature with the reference's roundings; 0 where a logit is the largest, +inf
    included."""
    return tl.where(logits == largest, 0.0, tl.div_rn(logits - largest, temperatures))


@triton.jit
def lowest_id(is_chosen, token_ids, axis: tl.constexpr):
    return tl.min(tl.where(is_chosen, token_ids, 0x7FFFFFFF), axis=axis)
