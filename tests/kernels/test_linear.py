# SPDX-License-Identifier: Apache-2.0
"""linear.chain: the same row has the same bits alone, in company, at any place, for any shard of N."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from isoexec.kernels.canaries import fill
from isoexec.kernels.domain import DomainError
from isoexec.kernels.linear import chain, column_linear, naive, ops, pack_weight, row_linear

Differing = Callable[[Tensor, Tensor], int]

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 3, 17, 63, 100]


def _inputs(rows: int, K: int, N: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return fill(rows, K, salt=1, dtype=dtype), fill(N, K, salt=2, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("K", "N"), [(128, 256), (256, 128), (64, 100), (1024, 48)])
def test_the_fast_chain_has_the_bits_of_the_specification(
    differing: Differing, rows: int, K: int, N: int, dtype: torch.dtype
) -> None:
    x, w = _inputs(rows, K, N, dtype)
    packed = pack_weight(w, k_block=64)
    assert differing(packed, naive.pack_weight(w, k_block=64)) == 0
    assert differing(chain(x, packed), naive.chain(x, packed)) == 0
    acc = fill(rows, N, salt=3)
    kept = acc.clone()
    assert differing(chain(x, packed, acc), naive.chain(x, packed, acc)) == 0
    assert differing(acc, kept) == 0, "the accumulator handed over is not written to"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_has_the_bits_it_has_in_company(differing: Differing, dtype: torch.dtype) -> None:
    x, w = _inputs(100, 256, 128, dtype)
    packed = pack_weight(w, k_block=64)
    whole = chain(x, packed)
    assert differing(torch.cat([chain(x[i : i + 1], packed) for i in range(100)]), whole) == 0
    order = torch.arange(100) * 37 % 100
    assert differing(chain(x[order], packed), whole[order]) == 0
    for cut in ROWS:
        assert differing(torch.cat([chain(x[:cut], packed), chain(x[cut:], packed)]), whole) == 0
    assert differing(chain(x.view(4, 25, 256), packed).view(100, 128), whole) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [64, 128, 256])
def test_bits_do_not_depend_on_the_shard_of_n(differing: Differing, K: int, dtype: torch.dtype) -> None:
    x, w = _inputs(33, K, 1024, dtype)
    whole = chain(x, pack_weight(w, k_block=64))
    for width in (512, 256, 192, 128, 100, 64, 48, 32, 16, 7, 3, 2):
        for start in (0, 64, 1024 - width):
            shard = chain(x, pack_weight(w[start : start + width], k_block=64))
            assert differing(shard, whole[:, start : start + width]) == 0, (width, start)


def test_bits_do_not_depend_on_how_x_lies_in_memory(differing: Differing) -> None:
    x, w = _inputs(40, 128, 64, torch.float32)
    packed = pack_weight(w, k_block=64)
    wide = torch.cat([fill(40, 3, salt=9), x, fill(40, 2, salt=8)], 1)
    assert differing(chain(wide[:, 3:131], packed), chain(x, packed)) == 0
    assert differing(chain(x.t().contiguous().t(), packed), chain(x, packed)) == 0


def test_k_shards_in_a_chain_have_the_bits_of_the_whole(differing: Differing) -> None:
    x, w = _inputs(35, 256, 128, torch.bfloat16)
    whole = chain(x, pack_weight(w, k_block=64))
    for ranks in (2, 4):
        acc: Tensor | None = None
        for xs, ws in zip(x.chunk(ranks, 1), w.chunk(ranks, 1), strict=True):
            acc = chain(xs, pack_weight(ws, k_block=64), acc)
        assert acc is not None
        assert differing(acc, whole) == 0


def test_another_block_another_order_and_one_unit_in_the_last_place_are_all_seen(
    differing: Differing,
) -> None:
    x, w = _inputs(64, 256, 128, torch.float32)
    whole = chain(x, pack_weight(w, k_block=64))
    assert differing(chain(x, pack_weight(w, k_block=32)), whole) > 100
    assert differing(chain(x, pack_weight(w, k_block=128)), whole) > 100
    halves = [
        chain(x[:, i : i + 128].contiguous(), pack_weight(w[:, i : i + 128], k_block=64)) for i in (0, 128)
    ]
    assert differing(halves[0] + halves[1], whole) > 100, "rounding per rank before a sum is another function"
    nudged = w.clone()
    nudged[5, 7] = torch.nextafter(nudged[5, 7], torch.tensor(9.0))
    seen = chain(x, pack_weight(nudged, k_block=64))
    assert differing(seen, whole) > 0
    assert differing(seen[:, :5], whole[:, :5]) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_have_the_bits_of_the_specification(differing: Differing, dtype: torch.dtype) -> None:
    x, w = _inputs(100, 128, 256, dtype)
    x, w = x.view(50, 2, 128).requires_grad_(), w.requires_grad_()
    g = fill(50, 2, 256, salt=4, dtype=dtype)
    for interleave in (1, 2):
        dx, dw = torch.autograd.grad(column_linear(x, w, k_block=64, interleave=interleave), (x, w), g)
        assert differing(dx, naive.dgrad(g, w, n_block=64, interleave=interleave).to(dtype)) == 0
        assert differing(dw, naive.wgrad(g, x, m_block=64).to(dtype)) == 0
    dx, dw = torch.autograd.grad(row_linear(x, w, k_block=64), (x, w), g)
    assert differing(dx, naive.dgrad(g, w, n_block=64).to(dtype)) == 0
    assert differing(dw, naive.wgrad(x, g, m_block=64).t().to(dtype)) == 0


def test_interleaved_blocks_are_another_order_than_plain_ones(differing: Differing) -> None:
    g, w = fill(33, 256, salt=5), fill(256, 128, salt=6)
    plain, turns = naive.dgrad(g, w, n_block=64), naive.dgrad(g, w, n_block=64, interleave=2)
    assert differing(plain, turns) > 100


def test_weight_gradient_bits_do_not_depend_on_padding_or_shard(differing: Differing) -> None:
    g, x = fill(70, 2, 256, salt=7), fill(70, 2, 128, salt=8)
    whole = ops._wgrad(g, x)
    padded = [torch.cat([t, torch.zeros(30, 2, t.shape[-1])]) for t in (g, x)]
    assert differing(ops._wgrad(*padded), whole) == 0
    for ranks in (2, 4):
        assert differing(torch.cat([ops._wgrad(part, x) for part in g.chunk(ranks, -1)]), whole) == 0


def test_a_head_keeps_fp32_logits_of_a_bf16_model() -> None:
    x, w = _inputs(5, 128, 64, torch.bfloat16)
    assert column_linear(x, w, k_block=64, out_dtype=torch.float32).dtype == torch.float32
    assert column_linear(x, w, k_block=64).dtype == torch.bfloat16


def test_no_rows_give_no_rows() -> None:
    w = fill(64, 128, salt=2)
    assert chain(torch.zeros(0, 128), pack_weight(w, k_block=64)).shape == (0, 64)


@pytest.mark.parametrize(
    ("shape", "k_block"), [((64, 100), 64), ((1, 128), 64), ((64, 128), 8), ((64, 32), 64)]
)
def test_a_weight_outside_the_domain_is_refused_with_its_shape(shape: tuple[int, ...], k_block: int) -> None:
    with pytest.raises(DomainError, match=rf"\[{shape[0]}, {shape[1]}\]"):
        pack_weight(torch.zeros(shape), k_block=k_block)


def test_an_x_of_another_width_and_a_half_precision_weight_are_refused() -> None:
    with pytest.raises(DomainError, match=r"\[3, 64\]"):
        chain(torch.zeros(3, 64), pack_weight(torch.zeros(64, 128), k_block=64))
    with pytest.raises(DomainError, match="float16"):
        pack_weight(torch.zeros(64, 128, dtype=torch.float16), k_block=64)
    w = torch.zeros(24, 64, requires_grad=True)
    x = torch.zeros(2, 1, 64, requires_grad=True)
    with pytest.raises(DomainError, match="24"):
        column_linear(x, w, k_block=64).sum().backward()


@pytest.mark.parametrize("k_block", [16, 32, 64])
def test_a_product_does_not_depend_on_its_number_of_tiles_or_on_a_transposed_operand(
    differing: Differing, k_block: int
) -> None:
    a, b = fill(256, k_block, salt=1), fill(k_block, 96, salt=2)
    tiles = torch.cat([tile @ b for tile in a.split(16)])
    for rows in (16, 32, 48, 64, 112, 256):
        assert differing(a[:rows] @ b, tiles[:rows]) == 0
        batch = a[:rows].expand(3, rows, k_block)
        assert differing(torch.bmm(batch, b.expand(3, k_block, 96))[1], tiles[:rows]) == 0
    assert differing(a.t().contiguous().t() @ b, tiles) == 0
    assert differing(a @ b.t().contiguous().t(), tiles) == 0
    assert differing((b.t() @ a.t()).t(), tiles) == 0
    start = fill(256, 96, salt=3)
    assert differing(torch.addmm(start, a, b), start + tiles) == 0, (
        "an accumulator is added after the product"
    )
