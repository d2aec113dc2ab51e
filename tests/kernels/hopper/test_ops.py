# SPDX-License-Identifier: Apache-2.0
"""The sm90 ops without a GPU: shapes under meta tensors, refusals, the table, digests, switches."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from isoexec.kernels.domain import DomainError
from isoexec.kernels.linear.hopper import cublaslt, table, tuning
from isoexec.kernels.linear.hopper.ops import linear
from isoexec.kernels.linear_logprobs.hopper.ops import linear_logprobs, linear_logprobs_and_entropy
from isoexec.kernels.logprobs.hopper.ops import token_logprobs, token_logprobs_and_entropy
from isoexec.kernels.rms_norm.hopper.ops import add_rms_norm, rms_norm
from isoexec.kernels.rope.hopper.ops import rope
from isoexec.kernels.silu_mul.hopper.ops import silu_mul

BF16 = torch.bfloat16


def test_fake_outputs_have_the_shapes_and_dtypes_of_real_ones() -> None:
    x = torch.empty(5, 1024, dtype=BF16, device="meta")
    w = torch.empty(1024, dtype=BF16, device="meta")
    heads = torch.empty(5, 9, 128, dtype=BF16, device="meta")[:, :8]
    logits = torch.empty(5, 151936, dtype=BF16, device="meta")
    ids = torch.empty(5, dtype=torch.int64, device="meta")
    half = torch.empty(8192, 64, device="meta")
    head = torch.empty(4096, 1024, dtype=BF16, device="meta")
    found = [
        rms_norm(x, w, 1e-6),
        *add_rms_norm(x, x, w, 1e-6),
        rope(heads, ids, half, half),
        silu_mul(*x.chunk(2, -1)),
        *(
            token_logprobs(logits, ids, vocab_leaves=8),
            *token_logprobs_and_entropy(logits, ids, vocab_leaves=8),
        ),
        linear_logprobs(x, head, ids, vocab_leaves=8),
        *linear_logprobs_and_entropy(x, head, ids, vocab_leaves=8),
        *(linear(x, torch.empty(4096, 1024, dtype=BF16, device="meta"), fp32_out=up) for up in (False, True)),
    ]
    assert [(tuple(t.shape), t.dtype) for t in found] == [
        *([((5, 1024), BF16)] * 3),
        ((5, 8, 128), BF16),
        ((5, 512), BF16),
        *([((5,), torch.float32)] * 6),
        ((5, 4096), BF16),
        ((5, 4096), torch.float32),
    ]
    assert all(t.is_contiguous() and t.device.type == "meta" for t in found)


def test_a_gradient_is_refused_instead_of_missing() -> None:
    x = torch.empty(5, 64, device="meta", requires_grad=True)
    y, _ = torch.ops.isoexec.sm90_silu_mul_grad(x, x, x)  # a gradient has none of its own
    assert y.requires_grad
    with pytest.raises(DomainError, match="sm90_silu_mul_grad refuses a backward pass"):
        y.sum().backward()


def test_a_tensor_elsewhere_is_an_error_not_another_function() -> None:
    with pytest.raises(NotImplementedError, match="CPU"):
        silu_mul(torch.ones(2, 4), torch.ones(2, 4))


def test_every_listed_weight_has_a_chain_for_one_row_and_a_library_for_many() -> None:
    assert set(table.shapes()) == {(N, K) for _, N, K in tuning.WEIGHTS}
    for N, K in table.shapes():
        assert table.tile_for(N, K, 1) is not None
        assert table.tile_for(N, K, 8192) is None
    with pytest.raises(DomainError, match=r"refuses weight \[4096, 999\]"):
        table.tile_for(4096, 999, 1)


def test_the_tables_choices_follow_its_own_measurements() -> None:
    for entry in json.loads(table.PATH.read_text())["weights"]:
        for step in entry["few_rows"]:
            faster = step["us"] < 0.99 * step["library_us"]
            assert (step["tile"] is not None) == (faster or step["up_to"] == 1), (entry["name"], step)


def test_a_tuned_tile_fits_the_shared_memory() -> None:
    tiles = [t for M in tuning.BUCKETS for t in tuning.candidates(M)]
    assert {t.kind for t in tiles} == {"pointers", "maps", "swapped"}
    assert max((t.rows + t.columns) * t.depth * 2 * t.stages for t in tiles) <= 227 * 1024


def test_switches_that_another_library_flipped_are_named() -> None:
    found = cublaslt.Switches(library="cublas", reduced_precision=False, split_k=True)
    text = str(cublaslt.SwitchError(found))
    assert "library is 'cublas', wanted 'cublaslt'; split_k is True, wanted False" in text
    assert "reduced_precision" not in text


def test_unclaimed_switches_are_refused() -> None:
    assert cublaslt.switches() != cublaslt.WANTED
    with pytest.raises(cublaslt.SwitchError):
        cublaslt.linear(torch.ones(2, 16, dtype=BF16), torch.ones(2, 16, dtype=BF16))
