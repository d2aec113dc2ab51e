# SPDX-License-Identifier: Apache-2.0
"""The experts' sm90 kernels without a GPU: in Triton's interpreter, compiled, on meta tensors, and over ranks of gloo."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from isoexec.kernels.combine.hopper.ops import combine, combine_rows
from isoexec.kernels.dispatch.hopper.ops import by_slot, dispatch, plan
from isoexec.kernels.domain import DomainError
from isoexec.kernels.gates import ranks
from isoexec.kernels.grouped_linear.hopper import table
from isoexec.kernels.grouped_linear.hopper.candidates import TILES
from isoexec.kernels.grouped_linear.hopper.ops import grouped_linear, row_grouped_linear
from isoexec.kernels.router.hopper.ops import softmax_topk
from isoexec.kernels.router.sigmoid.hopper.ops import sigmoid_topk
from isoexec.kernels.shared_gate.hopper.ops import shared_gate

HERE = Path(__file__).parent
INTERPRETED = "interpreted_experts.py"
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def interpreted(script: Callable[..., Any]) -> dict[str, str]:
    found: dict[str, str] = script(INTERPRETED, interpreted=True)
    return found


@pytest.fixture(scope="module")
def built(script: Callable[..., Any]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = script("compiled_experts.py")
    return found


def test_in_the_interpreter(check: str, interpreted: dict[str, str]) -> None:
    assert interpreted[check] == ""


def test_nothing_spills_is_approximate_or_flushes_subnormals(built: dict[str, dict[str, int]]) -> None:
    assert len(built) >= 20
    assert {n: b for n, b in built.items() if b["stack"] or b["local"] or b["registers"] > 192} == {}
    assert {n: b for n, b in built.items() if b["approximate"] or b["flushing"]} == {}


def test_only_exp_is_written_with_fused_multiply_adds(built: dict[str, dict[str, int]]) -> None:
    fused = {n: b["fused"] for n, b in built.items() if b["fused"]}
    assert fused
    assert {n for n in fused if not n.startswith(("softmax", "sigmoid", "gradient", "shared gate"))} == set()
    assert {n: count for n, count in fused.items() if count % 9} == {}  # exp is written with 9 of them


def test_grouped_products_use_the_tensor_cores(built: dict[str, dict[str, int]]) -> None:
    products = {n: b["matrix"] for n, b in built.items() if n.startswith(("grouped", "shared gate logit"))}
    assert len(products) >= 9
    assert min(products.values()) > 0


def meta(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def test_a_layer_has_the_shapes_and_all_gradients_on_meta_tensors() -> None:
    T, E, k, H, F = 5, 128, 8, 2048, 768
    logits, x = meta(T, E, dtype=torch.float32, grad=True), meta(T, H, grad=True)
    up, down = meta(E, 2 * F, H, grad=True), meta(E, H, F, grad=True)
    shared, gate = meta(T, H, grad=True), meta(1, H, grad=True)
    weights, experts = softmax_topk(logits, k)
    assert (weights.shape, weights.dtype, experts.dtype) == ((T, k), torch.float32, torch.int64)
    assert sigmoid_topk(logits, meta(E, dtype=torch.float32), k)[0].shape == (T, k)
    made = plan(experts, 0, E)
    assert (made.slots.shape, made.rows.dtype, made.offsets.shape) == ((T * k,), torch.int32, (E + 1,))
    h = grouped_linear(dispatch(x, made), up, made.offsets, laps=2)
    assert (h.shape, h.dtype) == ((T * k, 2 * F), BF16)
    y = row_grouped_linear(h[:, :F] * h[:, F:], down, made.offsets)
    out = combine(by_slot(y, made), weights, shared_gate(shared, x, gate))
    assert combine_rows(y, made.rows, weights).shape == out.shape == (T, H)
    out.sum().backward()
    for one in (logits, x, up, down, shared, gate):
        assert one.grad is not None
        assert (one.grad.shape, one.grad.dtype) == (one.shape, one.dtype)


def test_a_tensor_elsewhere_is_an_error_not_another_function() -> None:
    with pytest.raises(NotImplementedError, match="CPU"):
        softmax_topk(torch.zeros(2, 16), 4)
    with pytest.raises(NotImplementedError, match="CPU"):
        combine(torch.zeros(8, 4), torch.zeros(4, 2))


def test_shares_of_listed_weights_are_served_and_others_refused() -> None:
    for N, K in table.weights():
        for share in (1, 2, 4, 8):
            table.require_listed(N // share, K)
            table.require_listed(N, K // share)
    for N, K in ((1536, 2047), (999, 2048), (2048, 48)):
        with pytest.raises(DomainError, match="weights certified on this arch"):
            table.require_listed(N, K)


def test_a_candidate_fits_the_shared_memory_and_the_tensor_core() -> None:
    assert len(set(TILES)) == len(TILES)
    for tile in TILES:
        assert (tile.rows + tile.columns) * tile.depth * 2 * tile.stages <= 227 * 1024
        assert tile.rows % 16 == tile.columns % 16 == tile.depth % 16 == 0


@pytest.mark.parametrize("axis", ["EP", "ETP"])
def test_experts_over_ranks_have_the_bits_of_one(axis: str) -> None:
    from isoexec.kernels.grouped_linear.hopper.gate import _whole

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        ranks.close()  # ranks take the path of the moment they start
        try:
            on_rank = importlib.import_module("experts_ranks").on_rank
            found = {size: ranks.launch(size, on_rank, (axis,)) for size in (2, 4)}
            alike = ranks.launch(2, on_rank, ("TP",))
        finally:
            ranks.close()
    for size, parts in found.items():
        for got, want in zip(_whole(parts, axis), alike[0], strict=True):
            assert torch.equal(got.view(torch.int16), want.view(torch.int16)), (axis, size)
        if axis == "ETP":
            for one in parts:
                assert torch.equal(one[1].view(torch.int16), alike[0][1].view(torch.int16))
    assert all(bool((t != 0).any()) for t in alike[0])
