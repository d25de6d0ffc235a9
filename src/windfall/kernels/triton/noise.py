"""`sampling.gumbel` inside a kernel; the bits are the same."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # splitmix64
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)
QUICK_ERROR = tl.constexpr(1e-3)  # scores closer than this need exact noise; includes a wide margin


@triton.jit
def mix(x):
    """The finalizer of splitmix64."""
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)


@triton.jit
def noise_key(seed, position):
    """The key of a position's noise, uint64."""
    return mix(mix(seed.to(tl.uint64)) + (position.to(tl.uint64) + 1) * GOLDEN)


@triton.jit
def gumbel(key, tokens):
    """Noise of these tokens in fp32; it is computed in fp64."""
    bits = mix(key + (tokens.to(tl.uint64) + 1) * GOLDEN) >> 12
    uniform = (bits.to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def quick_gumbel(key, tokens):
    """`gumbel` in fp32, without fp64; at most QUICK_ERROR / 4 from the true noise.

    Where the uniform number u is close to 1, -log(u) is computed from 1 - u, which is known exactly.
    """
    bits = mix(key + (tokens.to(tl.uint64) + 1) * GOLDEN) >> 12
    below = (bits.to(tl.int64).to(tl.float32) + 0.5) * 2.220446049250313e-16  # u
    above = ((bits ^ 0xFFFFFFFFFFFFF).to(tl.int64).to(tl.float32) + 0.5) * 2.220446049250313e-16  # 1 - u
    near = above * (1.0 + above * (0.5 + above * (0.3333333333 + above * 0.25)))  # -log(1 - above)
    waited = tl.where(above < 0.015625, near, -tl.log(below))
    return -tl.log(waited)
