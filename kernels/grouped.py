"""Grouped matrix products over tokens sorted by expert: torch's own fast path, and the plain loop beside it.

Rows of expert i are `ends[i - 1]` to `ends[i]`; an expert may have none. The last end must be the number of rows,
because torch leaves rows past it uninitialised.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_ALIGNMENT = 16
"""`grouped_mm` refuses matrices whose rows do not start at multiples of this many bytes."""


def grouped_matmul(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix.

    `rows` is [R, K], `matrices` [E, K, N] with any strides (a transposed view is as fast as a plain one), `ends` int32
    [E]. Returns [R, N] in the dtype of `rows`.
    """
    if _is_aligned(rows) and _is_aligned(matrices):
        return F.grouped_mm(rows, matrices, offs=ends)
    return grouped_matmul_reference(rows, matrices, ends)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Sum outer products of rows, expert by expert: the weight gradient of `grouped_matmul`.

    `left` is [R, M], `right` [R, N], `ends` int32 [E]. Returns [E, M, N]; zero for an expert without rows.
    """
    if _is_aligned(left) and _is_aligned(right):
        return F.grouped_mm(left.mT, right, offs=ends)
    return grouped_outer_reference(left, right, ends)


def grouped_matmul_reference(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """The plain loop that `grouped_matmul` must equal. Synchronises with the device."""
    parts = torch.split(rows, _counts(ends))
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def grouped_outer_reference(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """The plain loop that `grouped_outer` must equal. Synchronises with the device."""
    counts = _counts(ends)
    return torch.stack([a.mT @ b for a, b in zip(torch.split(left, counts), torch.split(right, counts), strict=True)])


def _counts(ends: Tensor) -> list[int]:
    return torch.diff(ends, prepend=ends.new_zeros(1)).tolist()


def _is_aligned(matrix: Tensor) -> bool:
    """Whether one of the last two dimensions is dense and every other step is a multiple of the alignment."""
    size = matrix.element_size()
    steps = [stride * size for stride in matrix.stride()]
    dense = steps.pop(-1) if steps[-1] == size else steps.pop(-2)
    return dense == size and matrix.data_ptr() % ROW_ALIGNMENT == 0 and all(s % ROW_ALIGNMENT == 0 for s in steps)
