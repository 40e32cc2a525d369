"""The grouped products against their plain loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spesd_kernels.grouped import (
    grouped_matmul,
    grouped_matmul_reference,
    grouped_outer,
    grouped_outer_reference,
)


@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    inner=st.sampled_from([4, 6, 8, 12]),
    outer=st.sampled_from([4, 5, 16]),
    transposed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_products_equal_the_loop(counts, inner, outer, transposed, dtype):
    """Also with empty experts, one token, transposed matrices, and rows that the fast path cannot take."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), inner, generator=generator).to(dtype)
    shape = (len(counts), outer, inner) if transposed else (len(counts), inner, outer)
    matrices = torch.randn(shape, generator=generator).to(dtype)
    matrices = matrices.mT if transposed else matrices
    other = torch.randn(sum(counts), outer, generator=generator).to(dtype)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.06, "rtol": 0.02}

    product = grouped_matmul(rows, matrices, ends)
    torch.testing.assert_close(product, grouped_matmul_reference(rows, matrices, ends), **tolerance)
    weight_gradient = grouped_outer(rows, other, ends)
    torch.testing.assert_close(weight_gradient, grouped_outer_reference(rows, other, ends), **tolerance)
    assert not weight_gradient[[i for i, count in enumerate(counts) if count == 0]].any()


def test_strided_matrices_take_the_fast_path(monkeypatch):
    """One layer's matrices lie far apart in the flat vector; that must not cost the loop."""
    monkeypatch.setattr("spesd_kernels.grouped.grouped_matmul_reference", lambda *_: pytest.fail("took the loop"))
    flat = torch.randn(3 * 4 * 24 * 8)
    matrices = flat.view(3, 4, 24, 8)[:, 1, :16]
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    rows = torch.randn(5, 8)
    expected = torch.cat([rows[:2] @ matrices[0].mT, rows[2:] @ matrices[2].mT])
    torch.testing.assert_close(grouped_matmul(rows, matrices.mT, ends), expected)
