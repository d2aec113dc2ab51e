# SPDX-License-Identifier: Apache-2.0
"""Layers of experts on CPU, as the adapters make them of the ops: what their gates leave to a test."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from isoexec.kernels import registry
from isoexec.kernels.canaries import fill
from isoexec.kernels.combine import combine
from isoexec.kernels.dispatch import by_slot, dispatch, plan
from isoexec.kernels.domain import DomainError
from isoexec.kernels.gates.ranks import close, launch
from isoexec.kernels.grouped_linear import chain as grouped_chain
from isoexec.kernels.grouped_linear import grouped_linear, pack_weights, row_grouped_linear
from isoexec.kernels.linear import column_linear
from isoexec.kernels.router import sigmoid_topk, softmax_topk
from isoexec.kernels.router.sigmoid.gate import GATE as SIGMOID
from isoexec.kernels.silu_mul import silu_mul

T, E, K, H, F = 24, 16, 4, 64, 128
DTYPES = (torch.float32, torch.bfloat16)


def parameters(dtype: torch.dtype) -> list[Tensor]:
    """Tokens, the router's weight, the experts' two weights."""
    return [
        fill(T, H, salt=1, dtype=dtype),
        fill(E, H, salt=2, dtype=dtype),
        fill(E, 2 * F, H, salt=3, dtype=dtype, scale=0.3),
        fill(E, H, F, salt=4, dtype=dtype, scale=0.3),
    ]


def layer(
    x: Tensor, router: Tensor, w_in: Tensor, w_out: Tensor, *, first: int = 0, ep: Any = None, etp: Any = None
) -> Tensor:
    """A layer of experts; `first` is the first that this rank has, of as many as its weights are of."""
    logits = column_linear(x, router, k_block=64, out_dtype=torch.float32)
    weights, experts = softmax_topk(logits, K)
    made = plan(experts, first, len(w_in))
    rows = dispatch(x, made, ep)
    h = grouped_linear(rows, w_in, made.offsets, k_block=64, group=etp, interleave=2)
    half = h.shape[1] // 2
    y = row_grouped_linear(silu_mul(h[:, :half], h[:, half:]), w_out, made.offsets, k_block=64, group=etp)
    return combine(by_slot(y, made, ep), weights)


def run(inputs: list[Tensor], grad: Tensor, first: int = 0, ep: Any = None, etp: Any = None) -> list[Tensor]:
    """Output and all gradients."""
    grown = [t.clone().requires_grad_() for t in inputs]
    out = layer(*grown, first=first, ep=ep, etp=etp)
    return [out.detach(), *torch.autograd.grad(out, grown, grad)]


def on_rank(rank: int, size: int, group: Any, dtype: torch.dtype, kind: str) -> list[Tensor]:
    x, router, w_in, w_out = parameters(dtype)
    grad = fill(T, H, salt=5, dtype=dtype)
    if kind == "EP":
        share = E // size
        cut = slice(rank * share, (rank + 1) * share)
        return run([x, router, w_in[cut], w_out[cut]], grad, first=rank * share, ep=group)
    gate, up = (part.chunk(size, 1)[rank] for part in w_in.chunk(2, 1))
    return run([x, router, torch.cat([gate, up], 1), w_out.chunk(size, 2)[rank]], grad, etp=group)


def joined(found: list[list[Tensor]], kind: str) -> list[Tensor]:
    """The weights' gradients of all ranks as one rank has them, after what each rank has alike."""
    first = found[0][:3]
    d_in, d_out = zip(*((one[3], one[4]) for one in found), strict=True)
    if kind == "EP":
        return [*first, torch.cat(d_in), torch.cat(d_out)]
    halves = [part.chunk(2, 1) for part in d_in]
    return [*first, torch.cat([h[0] for h in halves] + [h[1] for h in halves], 1), torch.cat(d_out, 2)]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(*(t.contiguous().view(torch.uint8) for t in (a, b)))


@pytest.fixture(scope="module")
def worker() -> Iterator[Callable[..., Any]]:
    """`on_rank` by a name that other processes find."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        close()  # ranks take the path of the moment they start
        yield importlib.import_module(Path(__file__).stem).on_rank
        close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["EP", "ETP"])
def test_a_layer_and_all_its_gradients_have_the_same_bits_on_two_ranks(
    worker: Callable[..., Any], kind: str, dtype: torch.dtype
) -> None:
    found = launch(2, worker, (dtype, kind))
    for one in found:
        same(one[:3], found[0][:3])
    whole = run(parameters(dtype), fill(T, H, salt=5, dtype=dtype))
    same(joined(found, kind), whole)
    assert all(bool((t != 0).any()) for t in whole)


def test_a_token_has_the_bits_it_has_alone() -> None:
    x, *weights = parameters(torch.bfloat16)
    whole = layer(x, *weights)
    same([torch.cat([layer(row, *weights) for row in x.split(1)])], [whole])


def test_a_row_of_an_expert_is_a_row_of_the_dense_linear() -> None:
    x, w = fill(9, H, salt=1), fill(3, 48, H, salt=2)
    offsets = torch.tensor([0, 4, 4, 9])
    got = grouped_chain(x, pack_weights(w, k_block=64), offsets)
    want = torch.cat([column_linear(x[:4], w[0], k_block=64), column_linear(x[4:], w[2], k_block=64)])
    same([got], [want])


def test_padding_at_the_end_moves_no_gradient_of_an_experts_weight() -> None:
    x, router, w_in, w_out = parameters(torch.float32)
    grad = fill(T, H, salt=5)
    more = [torch.cat([t, torch.zeros(30, H)]) for t in (x, grad)]
    same(run([more[0], router, w_in, w_out], more[1])[3:], run([x, router, w_in, w_out], grad)[3:])


def test_experts_without_a_token_get_a_gradient_of_zeros() -> None:
    x, router, w_in, w_out = parameters(torch.float32)
    _, _, _, d_in, d_out = run([x[:1], router, w_in, w_out], fill(1, H, salt=5))
    assert int((d_in.flatten(1) != 0).any(1).sum()) == K
    assert int((d_out.flatten(1) != 0).any(1).sum()) == K


def test_a_tie_goes_to_the_lowest_expert_whatever_its_place() -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, 0.0, 1.0]])
    weights, experts = softmax_topk(logits, 5)
    assert experts.tolist() == [[1, 3, 5, 0, 2]]
    assert weights[0, 0] == weights[0, 1]
    assert weights[0, 3] == weights[0, 4]


def test_a_groups_score_is_the_sum_of_its_two_best() -> None:
    logits = torch.logit(torch.tensor([[0.9, 0.1, 0.1, 0.6, 0.6, 0.1, 0.5, 0.55]]))
    groups = {"groups": 4, "groups_chosen": 1}
    assert sigmoid_topk(logits, torch.zeros(8), 2, **groups)[1].tolist() == [[7, 6]]
    bias = torch.tensor([0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    weights, experts = sigmoid_topk(logits, bias, 2, **groups)
    assert experts.tolist() == [[0, 1]]  # the bias moves the choice
    assert float(weights[0, 1]) == pytest.approx(0.1)  # and no weight


@pytest.mark.parametrize("family", SIGMOID.families)
def test_the_sigmoid_router_holds_its_gate_though_no_contract_of_the_arch_binds_it(family: str) -> None:
    constants = dict(registry.FUNCTIONS[SIGMOID.function].fixed)
    check = SIGMOID.run(family, constants, full=False)
    assert check.failures() == []
    assert check.elements > 100


def test_a_token_that_chose_an_expert_twice_is_refused() -> None:
    with pytest.raises(DomainError, match="one expert at two places"):
        plan(torch.tensor([[3, 1, 3]]), 0, 4)


def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones() -> None:
    x, router, w_in, _ = parameters(torch.bfloat16)
    logits = fill(T, E, salt=9)
    weights, experts = softmax_topk(logits, K)
    made = plan(experts, 4, 8)
    rows = dispatch(x, made)
    real = {
        "softmax": softmax_topk(logits, K),
        "sigmoid": sigmoid_topk(logits, router[:, 0].float(), K),
        "rows": (rows,),
        "grouped": (grouped_linear(rows, w_in[4:12], made.offsets, k_block=64),),
        "slots": (by_slot(rows, made),),
        "combine": (combine(by_slot(rows, made), weights, x),),
    }
    with FakeTensorMode() as mode:
        x, w_in, logits, weights, rows = (mode.from_tensor(t) for t in (x, w_in, logits, weights, rows))
        slots, offsets = mode.from_tensor(made.slots), mode.from_tensor(made.offsets)
        fake_made = type(made)(**{**vars(made), "slots": slots, "offsets": offsets})
        fake = {
            "softmax": softmax_topk(logits, K),
            "sigmoid": sigmoid_topk(logits, logits.new_empty(E), K),
            "rows": (dispatch(x, fake_made),),
            "grouped": (grouped_linear(rows, w_in[4:12], offsets, k_block=64),),
            "slots": (by_slot(rows, fake_made),),
            "combine": (combine(by_slot(rows, fake_made), weights, x),),
        }
    for name, outs in real.items():
        assert [(t.shape, t.dtype) for t in outs] == [(t.shape, t.dtype) for t in fake[name]], name
