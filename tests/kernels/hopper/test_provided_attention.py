# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 in the catalogue of providers, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from isoexec.contracts.errors import IsoExecError
from isoexec.kernels.attention.hopper import fa3
from isoexec.kernels.providers import flash_attention
from isoexec.kernels.providers.catalogue import provider_for
from isoexec.kernels.providers.certify import constants_for, gate_digest

FUNCTIONS = ("attention.mma_segments/1", "attention.latent_segments/1")


def test_its_bits_are_compared_packed_and_in_pages_and_other_bits_are_refused(
    script: Callable[..., Any],
) -> None:
    found: dict[str, list[str]] = script("provided_attention.py", interpreted=True)
    for name in ("segments", "latent segments"):
        (elements,) = found[name]
        assert int(elements.removesuffix(" elements")) > 10_000
    assert "elements differ" in found["other bits"][0]
    assert any("the last 1 rows through pages at [0, 0, 0]" in line for line in found["other bits"])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_it_is_a_provider_of_both_kinds_of_segments(function: str) -> None:
    one = provider_for("vllm.flash_attn3", function, "sm90")
    assert one.kind == "library"
    assert constants_for(function, "sm90") == [{"kv_segment": 4096}]
    assert gate_digest(one).startswith("sha256:")
    assert one.make is not None
    assert callable(one.make({"kv_segment": 4096}))


def test_a_build_that_nothing_certifies_can_be_compared_and_is_named_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "_vllm_fa3_C.abi3.so"
    file.write_bytes(b"another build")
    monkeypatch.setenv(fa3.WHERE, str(file))
    monkeypatch.setattr(fa3, "_admitted", set())
    fa3.load.cache_clear()
    fa3.identity.cache_clear()
    with pytest.raises(fa3.UncertifiedLibraryError):
        flash_attention.version()
    with pytest.raises(IsoExecError, match="does not load"), flash_attention.held():
        raise AssertionError("it is no library")
    assert len(fa3._admitted) == 1
    fa3.load.cache_clear()
    fa3.identity.cache_clear()
