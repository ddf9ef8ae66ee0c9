"""Sides of a product: what tiles cover, and what is copied before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bigbrain_fx.core import Ref, TensorSpec
from estimators.calls import GraphScope, PricedCall
from estimators.matrices import MatrixShape, copied_numbers, matrix_shape
from tests.support.synthetic import graph_of, op, tensor


def test_tiles_cover_more_than_a_small_product() -> None:
    window = MatrixShape(49, 32, 49, 1)
    assert window.covered(backward=False) == pytest.approx((128 / 49) ** 2)
    assert MatrixShape(4096, 1024, 1024, 8).covered(backward=True) == 1.0


def call_of(first: TensorSpec, target: str, out: TensorSpec, flops: int = 0) -> PricedCall:
    before = op("a", "aten.neg.default", out=first)
    last = op("v", target, Ref("a"), Ref("a"), out=out, flops=flops)
    return PricedCall(last, GraphScope(graph_of((before, last))))


def test_rows_of_a_linear_layer_are_all_leading_sides() -> None:
    out = tensor(4, 6, 100)
    call = call_of(tensor(4, 6, 24), "aten.linear.default", out, flops=2 * 4 * 6 * 24 * 100)
    assert matrix_shape(call, "linear") == MatrixShape(24, 24, 100, 4)
    assert matrix_shape(call, "matmul") == MatrixShape(6, 24, 100, 4)


def test_what_does_not_lie_as_a_product_reads_it_is_copied() -> None:
    """Heads that were split off a width and turned to the front; a tensor that was turned."""
    batch, length, heads, wide = 2, 16, 4, 8
    split = tensor(batch, heads, length, wide)
    split = replace(split, strides=(heads * length * wide, length * wide, wide, 1))
    turned = replace(split, strides=(length * heads * wide, wide, heads * wide, 1))
    assert copied_numbers(call_of(split, "aten.matmul.default", split), "matmul") == 0
    assert copied_numbers(call_of(turned, "aten.matmul.default", split), "matmul") > 0
    plain = replace(tensor(2, 16, 8), strides=(128, 8, 1))
    back = replace(plain, strides=(128, 1, 16))
    assert copied_numbers(call_of(plain, "aten.linear.default", plain), "linear") == 0
    assert copied_numbers(call_of(back, "aten.linear.default", plain), "linear") > 0
    assert copied_numbers(call_of(back, "aten.bmm.default", plain), "bmm") == 0
