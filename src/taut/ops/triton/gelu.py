"""Triton kernels of ops/gelu.py, and the arithmetic of GELU for all kernels.

Everything here is to be compiled without contraction of a * b + c: what is one instruction is
written tl.fma, so that two kernels that compute a value get the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gelu import MINIMA

NUM_WARPS = 4
BLOCK = 8 * 32 * NUM_WARPS  # eight elements a thread, whose bits are the byte that it stores


@triton.jit
def ratio(x, y):
    """x / y as accurate as a division and in half its instructions, for 1 <= y <= 2^100."""
    r = tl.rsqrt(y)
    r *= r
    q = x * r
    return tl.fma(tl.fma(-y, q, x), r, q)


@triton.jit
def normal(x):
    """Distribution and density of the standard normal, the lower tail without cancellation.

    Phi(-|x|) = exp(-x^2 / 2) p(u), u = (|x| - 0.75) / (|x| + 3): p is fitted on [0, 14.5] with a
    relative error of 1e-8, and u is 0 at the minimum of GELU, where its inverse needs all digits.
    """
    magnitude = tl.minimum(tl.abs(x), 15.0)  # from where on exp(-x^2 / 2) is 0 in fp32
    u = ratio(magnitude - 0.75, magnitude + 3.0)
    p = tl.fma(u, 0.0036532594822347164, -0.007389952428638935)
    p = tl.fma(p, u, -0.005425076466053724)
    p = tl.fma(p, u, 0.010659126564860344)
    p = tl.fma(p, u, 0.03521323204040527)
    p = tl.fma(p, u, -0.03149334341287613)
    p = tl.fma(p, u, -0.19683973491191864)
    p = tl.fma(p, u, 0.5430251359939575)
    p = tl.fma(p, u, -0.6516298055648804)
    p = tl.fma(p, u, 0.300232470035553)
    exponential = tl.exp2(x * x * -0.7213475204444817)  # log2(e) / 2
    tail = p * exponential
    return tl.where(x < 0, tail, 1.0 - tail), exponential * 0.3989422804014327


@triton.jit
def sigmoid(x):
    """s = 1 / (1 + 2^-x) and s (1 - s), both tails without cancellation or overflow."""
    e = tl.exp2(-tl.abs(x))
    r = tl.rsqrt(1.0 + e)
    r *= r
    q = e * r
    small = tl.fma(tl.fma(-q, e, e - q), r, q)  # free of the rounding of 1 + e, for e - q is exact
    large = 1.0 - small
    return tl.where(x < 0, small, large), small * large


@triton.jit
def gelu_parts(x, TANH: tl.constexpr):
    """s(x) with gelu = x s, and its first two derivatives."""
    if TANH:
        square = x * x
        s, slope = sigmoid(tl.fma(x, 2.302208198144325, square * (x * 0.1029432395800235)))
        dv = tl.fma(square, 0.21406444881780076, 1.5957691216057308)
        ds = slope * dv
        bend = tl.fma(slope, x * 0.4281288976356015, ds * dv * tl.fma(s, -2.0, 1.0))
        return s, ds, bend
    else:
        cdf, density = normal(x)
        return cdf, density, -(x * density)


@triton.jit
def gelu_value_and_slope(x, TANH: tl.constexpr):
    s, ds, _ = gelu_parts(x, TANH)
    return x * s, tl.fma(x, ds, s)


@triton.jit
def _fwd_kernel(
    x_ptr,
    y_ptr,
    side_ptr,
    size,
    LOW_X: tl.constexpr,
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    byte = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    bit = tl.arange(0, 8)[None, :]
    offs = byte[:, None] * 8 + bit
    mask = offs < size
    x = tl.load(x_ptr + offs, mask=mask, other=-1.0).to(tl.float32)  # left of the minimum: bit 0
    y, _ = gelu_value_and_slope(x, TANH)
    tl.store(y_ptr + offs, y, mask=mask)
    bits = tl.sum(tl.where(x >= LOW_X, 1 << bit, 0), 1)
    tl.store(side_ptr + byte, bits.to(tl.uint8), mask=byte * 8 < size)


@triton.jit
def _inverse(y, right, LOW_X, LOW_Y, CURVATURE: tl.constexpr, TANH: tl.constexpr):
    """The x at which GELU is y, on the given side of its minimum."""
    # starts: the parabola at the minimum, the tail of the density on the left, x = y on the right
    near = tl.maximum(y - LOW_Y, 0.0) * (2 / CURVATURE)
    # -2 ln(-y sqrt(2 pi)) to 0.06: the bits of a number are its logarithm, nearly
    bits = tl.maximum(y * -2.5066282746310002, 1e-37).to(tl.int32, bitcast=True)
    tail = tl.fma(bits.to(tl.float32), -1.6525916112899655e-07, 175.99977)
    is_tail = (y > -0.1) & (right == 0)
    root = tl.sqrt(tl.where(is_tail, tail, near))
    x = tl.where(right, LOW_X + root, LOW_X - root)
    x = tl.where(is_tail, -root, x)
    x = tl.where(y > 0.5, y, x)
    for _ in tl.static_range(2):
        s, ds, bend = gelu_parts(x, TANH)
        f = tl.fma(x, s, -y)
        dg = tl.fma(x, ds, s)
        ddg = tl.fma(x, bend, 2.0 * ds)
        scale = tl.fma(2.0 * dg, dg, -(f * ddg))
        usable = tl.abs(scale) > 1e-30
        x -= tl.where(usable, 2.0 * f * dg, 0.0) / tl.where(usable, scale, 1.0)
        x = tl.where(right, tl.maximum(x, LOW_X), tl.minimum(x, LOW_X))
    return x


@triton.jit
def _bwd_kernel(
    dy_ptr,
    y_ptr,
    side_ptr,
    dx_ptr,
    size,
    LOW_X: tl.constexpr,
    LOW_Y: tl.constexpr,
    CURVATURE: tl.constexpr,
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    byte = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    bit = tl.arange(0, 8)[None, :]
    offs = byte[:, None] * 8 + bit
    mask = offs < size
    dy = tl.load(dy_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    bits = tl.load(side_ptr + byte, mask=byte * 8 < size, other=0).to(tl.int32)
    right = ((bits[:, None] >> bit) & 1) != 0
    _, slope = gelu_value_and_slope(_inverse(y, right, LOW_X, LOW_Y, CURVATURE, TANH), TANH)
    slope = tl.where(right | (y < 0), slope, y)  # y is 0 or NaN: far left
    slope = tl.where(y > 10, 1.0, slope)
    tl.store(dx_ptr + offs, dy * slope, mask=mask)


def gelu_fwd(x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x)
    side = x.new_empty(triton.cdiv(x.numel(), 8), dtype=torch.uint8)
    if x.numel():
        with torch.cuda.device_of(x):
            _fwd_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                x,
                y,
                side,
                x.numel(),
                MINIMA[tanh].x,
                tanh,
                BLOCK,
                num_warps=NUM_WARPS,
                enable_fp_fusion=False,
            )
    return y, side


def gelu_bwd(dy: Tensor, y: Tensor, side: Tensor, tanh: bool) -> Tensor:
    dx = torch.empty_like(dy)
    if dy.numel():
        with torch.cuda.device_of(dy):
            _bwd_kernel[(triton.cdiv(dy.numel(), BLOCK),)](
                dy,
                y,
                side,
                dx,
                dy.numel(),
                *MINIMA[tanh],
                tanh,
                BLOCK,
                num_warps=NUM_WARPS,
                enable_fp_fusion=False,
            )
    return dx
