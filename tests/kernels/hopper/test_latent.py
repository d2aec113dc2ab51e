# SPDX-License-Identifier: Apache-2.0
"""The sm90 latent attention without a GPU: in Triton's interpreter, compiled, its shapes, its ranks, and float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from isoexec.contracts.evidence import Store, shipped
from isoexec.kernels.attention.hopper import fa3
from isoexec.kernels.domain import DomainError
from isoexec.kernels.gates.checking import subject
from isoexec.kernels.gates.found import gate_for
from isoexec.kernels.latent_attention.hopper import naive, ops, tiles
from isoexec.kernels.latent_attention.hopper.ops import latent_attention, plan
from isoexec.kernels.latent_attention.hopper.split import groups_of

INTERPRETED = "interpreted_latent.py"
FUNCTION = "attention.latent_segments/1"
SCALE = 192**-0.5
# the others take the same kernels through more batches, a minute each; `gated_latent.py FAMILY` runs one of them
SHORT = ("backward", "conformance", "degenerate_shapes", "resume_exactness")
WHOLE = ("packed prefill of 16 heads", "prefill of 128 heads", "decode of 128 heads")  # tiles of 64 rows


@pytest.fixture(scope="module")
def built(script: Callable[..., Any]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = script("compiled_latent.py")
    return found


# one process each: its start is as long as a check
@pytest.fixture(scope="module")
def interpreted(script: Callable[..., Any]) -> dict[str, str]:
    found: dict[str, str] = script(INTERPRETED, interpreted=True)
    return found


@pytest.fixture(scope="module")
def gated(script: Callable[..., Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = script("gated_latent.py", *SHORT, interpreted=True)
    return found


def test_in_the_interpreter(check: str, interpreted: dict[str, str]) -> None:
    assert interpreted[check] == ""


@pytest.mark.parametrize("family", SHORT)
def test_a_check_of_the_gate_holds_in_the_interpreter(family: str, gated: dict[str, list[str]]) -> None:
    assert family in gate_for(FUNCTION, "sm90").families
    lines = gated[family]
    assert len(lines) == 1, lines
    assert int(lines[0].removesuffix(" elements")) > 1000


def test_ranks_that_share_the_heads_have_the_bits_of_one(script: Callable[..., Any]) -> None:
    found: dict[str, int] = script("latent_ranks.py", imported=True)
    assert len(found) == 19
    assert found.pop("control: gradients of two ranks added up") > 0
    assert {name: count for name, count in found.items() if count} == {}


def test_nothing_spills_but_whole_tiles(built: dict[str, dict[str, int]]) -> None:
    assert len(built) == 12
    spilled = {name: b["stack"] for name, b in built.items() if b["stack"] or b["local"]}
    # 64 rows of 512 sums are half of all registers; what goes to the stack is read back once a block
    assert spilled.keys() <= set(WHOLE)
    assert max(spilled.values(), default=0) <= 272
    assert max(b["shared"] for b in built.values()) <= 227 * 1024


def test_gradients_are_exact_arithmetic_beside_the_tensor_cores(built: dict[str, dict[str, int]]) -> None:
    gradients = {n: b for n, b in built.items() if n.startswith(("delta", "queries", "keys"))}
    assert len(gradients) == 4
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
    got, lse = naive.attention(x[0], x[1], x[2], x[3], SCALE, kv_segment=16)
    assert float((got.double() - exact.detach()).abs().max()) < 2**-7 * float(exact.detach().abs().max())
    assert float((lse.double() - scores.detach().logsumexp(-1)).abs().max()) < 1e-5

    dout = torch.randn(s, 2, naive.LATENT, generator=torch.Generator().manual_seed(8)).bfloat16()
    exact.backward(dout.double())
    dq_rope, dq_latent, keys = naive.gradients(x[0], x[1], x[2], x[3], got, lse, dout, SCALE)
    found = (dq_rope, dq_latent, keys[:, : naive.ROPE], keys[:, naive.ROPE :])
    for gradient, leaf in zip(found, (q_rope, q_latent, k_rope, latent), strict=True):
        assert leaf.grad is not None
        assert float((gradient.double() - leaf.grad).norm()) < 2**-6 * float(leaf.grad.norm())


def _meta(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=grad)


def _places(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32, device="meta")


def test_a_fake_output_has_the_shape_and_dtype_of_a_real_one() -> None:
    cache = _meta(99, 16, naive.HEAD)
    k_rope, latent = cache[..., naive.LATENT :], cache[..., : naive.LATENT]
    for rows in (1, 4):
        step = plan(
            requests=5, tokens=5, most_rows=rows, most_keys=9000, kv_segment=4096, page=16, device="meta"
        )
        assert step.single == (rows == 1)
        out = latent_attention(
            _meta(5, 3, 64), _meta(5, 3, 512), k_rope, latent, _places(5), step, scale=SCALE
        )
        assert (out.shape, out.dtype, out.is_contiguous()) == ((5, 3, 512), torch.bfloat16, True)


def test_a_plan_with_gradients_returns_gradients_of_the_inputs_shapes() -> None:
    sizes = {"requests": 1, "tokens": 5, "most_rows": 5, "most_keys": 5, "kv_segment": 4096, "device": "meta"}
    inputs = [_meta(*shape, grad=True) for shape in ((5, 3, 64), (5, 3, 512), (5, 64), (5, 512))]
    step = plan(**sizes, gradients=True)  # type: ignore[arg-type]
    q_rope, q_latent, k_rope, latent = inputs
    latent_attention(q_rope, q_latent, k_rope, latent, _places(5), step, scale=SCALE).sum().backward()
    for x in inputs:
        assert x.grad is not None
        assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)
    step = plan(**sizes)  # type: ignore[arg-type]
    out = latent_attention(q_rope, q_latent, k_rope, latent, _places(5), step, scale=SCALE)
    with pytest.raises(DomainError, match="sm90_latent_attention refuses a backward pass"):
        out.sum().backward()


def test_a_library_that_nothing_certified_for_latent_attention_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: dict[str, Any] = {"requests": 1, "tokens": 5, "most_rows": 5, "most_keys": 5, "kv_segment": 4096}
    monkeypatch.setattr(fa3, "identity", lambda: SimpleNamespace(build="sha256:of another"))
    with pytest.raises(DomainError, match=r"whose latent form nothing has certified.*the provider triton"):
        plan(**sizes, provider="fa3", device="meta")
    monkeypatch.setattr(ops, "_admitted", set())
    ops.admit("sha256:of another")
    assert plan(**sizes, provider="fa3", device="meta").maker == "fa3"


def test_a_shape_of_tiles_holds_every_head() -> None:
    for heads in (1, 5, 16, 20, 40, 64, 65, 128):
        for tile in (tiles.decode_tile(heads), tiles.PREFILL):
            held = tiles.heads_of(tile, heads)
            assert held * -(-heads // held) >= heads
            assert tiles.rows_of(tiles.tokens_of(tile, heads) * held) <= tile.rows
        assert heads % groups_of(heads) == 0
        assert heads // groups_of(heads) <= 16


def test_shipped_evidence_is_of_this_source_and_this_gate() -> None:
    gate = gate_for(FUNCTION, "sm90")
    ours = subject(FUNCTION, "sm90")
    for record in Store([shipped()]).find(function=FUNCTION, provider=ours.name, arch="sm90"):
        assert record.provider == ours, "the source changed: run the gate again on a GPU"
        assert record.gate == gate.digest(), "the gate changed: run it again on a GPU"
        assert {check.family for check in record.checks} == set(gate.families)
        for check in record.checks:
            assert set(check.domain.get("library", ())) <= ops.BUILDS
