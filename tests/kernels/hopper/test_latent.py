# SPDX-License-Identifier: Apache-2.0
"""The sm90 latent attention without a GPU: in Triton's interpreter, compiled, and its specification against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from isoexec.kernels.latent_attention.hopper import naive

SCALE = 192**-0.5


@pytest.fixture(scope="module")
def built(script: Callable[..., Any]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = script("compiled_latent.py")
    return found


def test_its_kernels_have_their_specifications_bits_in_the_interpreter(script: Callable[..., Any]) -> None:
    found = script("interpreted_latent.py", interpreted=True)
    assert len(found) >= 5
    assert {name: trouble for name, trouble in found.items() if trouble} == {}


def test_nothing_spills(built: dict[str, dict[str, int]]) -> None:
    assert len(built) == 5
    assert {name: b for name, b in built.items() if b["stack"] or b["local"]} == {}


def test_gradients_are_exact_arithmetic_beside_the_tensor_cores(built: dict[str, dict[str, int]]) -> None:
    gradients = {name: b for name, b in built.items() if name != "segment"}
    assert {name: b for name, b in gradients.items() if b["approximate"] or b["flushing"]} == {}
    assert min(b["matrix"] for name, b in built.items() if name != "delta") > 0


def _operands(s: int, heads: int) -> Any:
    generator = torch.Generator().manual_seed(7)
    shapes = ((s, heads, naive.ROPE), (s, heads, naive.LATENT), (s, naive.ROPE), (s, naive.LATENT))
    return tuple(torch.randn(shape, generator=generator).bfloat16() for shape in shapes)


def test_the_specification_is_attention_over_one_latent_row_a_key() -> None:
    s = 40
    x = _operands(s, 2)
    q_rope, q_latent, k_rope, latent = (t.double().requires_grad_() for t in x)
    scores = torch.einsum("ihd,jd->hij", q_rope, k_rope) + torch.einsum("ihd,jd->hij", q_latent, latent)
    scores = (scores * SCALE).masked_fill(~torch.ones(s, s).tril().bool(), -torch.inf)
    exact = torch.einsum("hij,jd->ihd", scores.softmax(-1), latent)
    got = naive.attention(x[0], x[1], x[2], x[3], SCALE, kv_segment=16)
    assert float((got.double() - exact.detach()).abs().max()) < 2**-7 * float(exact.detach().abs().max())

    dout = torch.randn(s, 2, naive.LATENT, generator=torch.Generator().manual_seed(8)).bfloat16()
    exact.backward(dout.double())
    lse = scores.logsumexp(-1).float().detach()
    found = naive.gradients(x[0], x[1], x[2], x[3], got, lse, dout, SCALE)
    for gradient, leaf in zip(found, (q_rope, q_latent, k_rope, latent), strict=True):
        assert leaf.grad is not None
        assert float((gradient.double() - leaf.grad).norm()) < 2**-6 * float(leaf.grad.norm())
