# SPDX-License-Identifier: Apache-2.0
"""The sm90 linear's gradients and continued chains without a GPU: interpreted, compiled, their shapes, tables and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from isoexec.kernels.domain import DomainError
from isoexec.kernels.linear.hopper import chains, naive, table, tuning
from isoexec.kernels.linear.hopper.kernel import Tile
from isoexec.kernels.linear.hopper.ops import (
    chain,
    column_linear,
    input_gradient,
    linear,
    row_linear,
    weight_gradient,
)

INTERPRETED = "interpreted_linear.py"
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def interpreted(script: Callable[..., Any]) -> dict[str, str]:
    found: dict[str, str] = script(INTERPRETED, interpreted=True)
    return found


def test_in_the_interpreter(check: str, interpreted: dict[str, str]) -> None:
    assert interpreted[check] == ""


def test_every_layout_compiles_on_the_tensor_cores_without_spills(script: Callable[..., Any]) -> None:
    built: dict[str, dict[str, int]] = script("compiled_linear.py")
    assert len(built) >= 60
    bad = ("stack", "local", "fused", "approximate", "flushing")
    assert {n: b for n, b in built.items() if b["registers"] > 192 or any(b[x] for x in bad)} == {}
    assert min(b["matrix"] for b in built.values()) > 0
    assert max(b["shared"] for b in built.values()) <= 227 * 1024


def _meta(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def test_fake_outputs_have_the_shapes_and_dtypes_of_real_ones() -> None:
    x, w, dy = _meta(5, 1024), _meta(4096, 1024), _meta(5, 4096, dtype=FP32)
    found = [
        chain(x, w),
        chain(x, w, _meta(5, 4096, dtype=FP32), out_dtype=BF16),
        input_gradient(dy, w),
        input_gradient(dy, w, _meta(5, 1024, dtype=FP32), out_dtype=FP32),
        weight_gradient(dy, x),
        weight_gradient(dy, x, out_dtype=FP32),
        column_linear(x.view(5, 1, 1024), w),
        column_linear(x, w, out_dtype=FP32),
        row_linear(x.view(5, 1, 1024), w),
    ]
    assert [(tuple(t.shape), t.dtype) for t in found] == [
        ((5, 4096), FP32),
        ((5, 4096), BF16),
        ((5, 1024), BF16),
        ((5, 1024), FP32),
        ((4096, 1024), BF16),
        ((4096, 1024), FP32),
        ((5, 1, 4096), BF16),
        ((5, 4096), FP32),
        ((5, 1, 4096), BF16),
    ]
    assert all(t.device.type == "meta" for t in found)


def test_gradients_are_connected_and_in_the_weights_dtype() -> None:
    for call in (
        linear,
        lambda x, w: linear(x, w, fp32_out=True),
        lambda x, w: column_linear(x, w, laps=2),
        lambda x, w: column_linear(x.view(5, 1, 1024), w, out_dtype=FP32),
        row_linear,
    ):
        x, w = _meta(5, 1024, grad=True), _meta(4096, 1024, grad=True)
        call(x, w).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        assert (x.grad.shape, x.grad.dtype) == ((5, 1024), BF16)
        assert (w.grad.shape, w.grad.dtype) == ((4096, 1024), BF16)


def test_a_continued_chain_refuses_a_gradient() -> None:
    with pytest.raises(DomainError, match="sm90_linear_chain refuses a backward pass"):
        chain(_meta(5, 1024, grad=True), _meta(4096, 1024)).sum().backward()


def test_shards_of_listed_weights_are_known_and_others_refused() -> None:
    assert table.known(4096, 12288) == (4096, 12288)
    assert table.known(4096, 12288 // 8) == (4096, 12288)
    assert table.known(22016 // 16, 4096) == (22016, 4096)  # a rank's gate rows at 8 ranks
    for N, K in ((4096, 999), (24, 4096), (4097, 4096), (151936 // 16, 4096)):
        with pytest.raises(DomainError, match=r"refuses weight \[.*shards of whole 16s"):
            table.known(N, K)


def test_a_shards_tile_divides_its_k() -> None:
    for N, K in table.shapes():
        for parts in table.DEGREES:
            if K % (16 * parts) == 0:
                tile = table.tile_for(N, K // parts, 1)
                assert tile is not None
                assert K // parts % tile.depth == 0


def test_a_product_that_goes_on_is_never_a_librarys_and_few_rows_of_a_gradient_neither() -> None:
    for N, K in table.shapes():
        for rows in (1, 16, 17, 64, 65, 8192, 10**7):
            assert table.chain_tile("continue", N, K, rows) is not None
        assert table.chain_tile("input", N, K, 1) is not None
        assert table.chain_tile("weight", N, K, 1) is not None


def test_input_gradients_admit_parts_of_a_merged_shard_by_own_chains_alone() -> None:
    # queries and their gates of [9216, 2048], and the fewest there may be
    for N, K in ((8192, 2048), (16, 4096), (96, 4096), (48, 2048)):
        for rows in (1, 16, 17, 8192, 10**7):
            assert table.chain_tile("input", N, K, rows) is not None
            assert table.chain_tile("continue", N, K, rows) is not None
        with pytest.raises(DomainError, match="refuses weight"):
            table.tile_for(N, K, 1)
        with pytest.raises(DomainError, match="refuses weight"):
            table.chain_tile("weight", N, K, 1)
    for N, K in ((24, 4096), (16, 999), (2**20, 4096)):
        with pytest.raises(DomainError, match="refuses weight"):
            table.chain_tile("input", N, K, 64)


def test_every_tile_to_be_tuned_fits_the_shared_memory() -> None:
    def shared(tile: Tile, out: int) -> int:
        operands = (tile.rows + tile.columns) * tile.depth * 2 * tile.stages
        return operands + tile.rows * min(tile.columns, chains._CHUNK) * out

    assert len(set(tuning.CHAIN_TILES)) == len(tuning.CHAIN_TILES)
    assert max(shared(tile, 4) for tile in tuning.CHAIN_TILES) <= 226 * 1024


@pytest.mark.parametrize(("size", "laps"), [(1, 2), (2, 1), (4, 2), (8, 3), (2, 6)])
def test_ranks_hold_every_row_of_a_merged_weight_once_and_laps_visit_them_in_order(
    size: int, laps: int
) -> None:
    for parts in ([16 * 24 // laps] * laps, [16 * size * (lap + 1) for lap in range(laps)]):
        shards = [naive.shard_rows(parts, rank, size) for rank in range(size)]
        pieces = [shard.split([part // size for part in parts]) for shard in shards]
        visited = torch.cat([piece[lap] for lap in range(laps) for piece in pieces])
        assert visited.tolist() == list(range(sum(parts)))
