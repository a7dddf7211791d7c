"""User-defined Triton kernels for the tests marked `gpu`; importing this needs triton.

At module level, as users have them: Triton and Inductor both look a kernel's names up in its
module.
"""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, total, mask=mask)


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 64}, num_warps=2),
        triton.Config({"BLOCK": 256}, num_warps=4, num_stages=3),
    ],
    key=["n"],
)
@triton.jit
def autotuned_add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, total, mask=mask)


@triton.autotune(
    configs=[
        triton.Config({"ROWS": 1, "COLUMNS": 64}, num_warps=2),
        triton.Config({"ROWS": 4, "COLUMNS": 32}, num_warps=4),
    ],
    key=["rows", "columns"],
)
@triton.jit
def autotuned_scale_2d_kernel(
    x_ptr, out_ptr, rows, columns, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    offsets = row * columns + column
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) * scale, mask=mask)


@triton.jit
def optional_scaled_add_kernel(
    x_ptr, y_ptr, out_ptr, n, stride, scale, HAS_Y: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = tl.load(x_ptr + offsets * stride, mask=mask) * scale
    if HAS_Y:
        total += tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, total, mask=mask)


@triton.jit
def sum_and_difference_kernel(x_ptr, y_ptr, sum_ptr, difference_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x, y = tl.load(x_ptr + offsets, mask=mask), tl.load(y_ptr + offsets, mask=mask)
    tl.store(sum_ptr + offsets, x + y, mask=mask)
    tl.store(difference_ptr + offsets, x - y, mask=mask)


@triton.jit
def double_in_place_kernel(x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) * 2, mask=mask)


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, k, N: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr):
    """One block of `[BLOCK, k] @ [k, BLOCK]`; with several stages it needs much shared memory."""
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, k, K):
        inner = start + tl.arange(0, K)
        a = tl.load(a_ptr + rows * k + inner[None, :])
        b = tl.load(b_ptr + inner[:, None] * N + columns)
        total += tl.dot(a, b)
    tl.store(c_ptr + rows * N + columns, total)
