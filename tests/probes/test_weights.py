# SPDX-License-Identifier: Apache-2.0
"""A tensor's digest is the sum of its shards' digests, whatever the layout, and sees every accident."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isoexec.probes.weights import (
    Block,
    add_partials,
    is_zero,
    tensor_partial,
    tensor_partials,
    weight_partials,
)


def whole(t: torch.Tensor) -> tuple[int, int]:
    return tensor_partial(t, t.shape, [0] * t.dim())


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def tensor(request: pytest.FixtureRequest) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(12, 20, generator=generator).to(request.param)


@pytest.mark.parametrize(("dim", "parts"), [(0, 2), (0, 4), (1, 2), (1, 5)])
def test_shards_add_up_to_the_whole(tensor: torch.Tensor, dim: int, parts: int) -> None:
    pieces = tensor.chunk(parts, dim)
    offsets = [[i * pieces[0].shape[d] if d == dim else 0 for d in (0, 1)] for i in range(parts)]
    found = [tensor_partial(p, tensor.shape, o) for p, o in zip(pieces, offsets, strict=True)]
    assert add_partials(found) == whole(tensor)


def test_every_single_bit_of_every_element_counts(tensor: torch.Tensor) -> None:
    before = whole(tensor)
    view = torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32
    for i in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(-1).view(view)[i] ^= 1
        assert whole(changed) != before


def test_swapped_elements_missing_shards_and_repeated_shards_differ(tensor: torch.Tensor) -> None:
    swapped = tensor.flip(0)
    assert whole(swapped) != whole(tensor)
    half = tensor_partial(tensor[:6], tensor.shape, [0, 0])
    assert half != whole(tensor)
    assert add_partials([half, half]) != whole(tensor)


def test_the_same_values_in_another_dtype_have_another_digest(tensor: torch.Tensor) -> None:
    other = tensor.to(torch.bfloat16 if tensor.dtype is torch.float32 else torch.float32)
    assert whole(other) != whole(tensor)


def test_lanes_are_unsigned_64_bit_and_independent(tensor: torch.Tensor) -> None:
    lo, hi = whole(tensor)
    assert 0 <= lo < 2**64
    assert 0 <= hi < 2**64
    assert lo != hi


def test_an_empty_tensor_is_never_evidence() -> None:
    with pytest.raises(ValueError, match="empty tensor"):
        tensor_partial(torch.empty(0), [0], [0])


@pytest.mark.parametrize(("shape", "offsets"), [((12, 20), (1, 0)), ((10, 20), (0, 0)), ((12, 20), (0,))])
def test_a_shard_outside_its_tensor_is_refused(
    tensor: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="shard"):
        tensor_partial(tensor, shape, offsets)


def test_named_blocks_say_what_they_cover_and_which_are_zero() -> None:
    held, zeros = torch.ones(2, 3), torch.zeros(4)
    blocks = [("held", Block(held, (4, 3), (2, 0))), ("zeros", Block(zeros, (4,), (0,)))]
    found = weight_partials(iter(blocks))
    assert found.tensors == {
        "held": tensor_partial(held, (4, 3), (2, 0)),
        "zeros": tensor_partial(zeros, (4,), (0,)),
    }
    assert found.numel == {"held": 6, "zeros": 4}
    assert found.total == {"held": 12, "zeros": 4}
    assert found.zero == ["zeros"]


def test_zero_of_either_sign_is_zero() -> None:
    assert is_zero(torch.tensor([0.0, -0.0]))
    assert not is_zero(torch.tensor([0.0, 1e-38]))


def test_many_blocks_keep_their_order_and_say_which_are_zero(tensor: torch.Tensor) -> None:
    several = [tensor[:6], torch.zeros(6, 20), tensor[6:]]
    found = tensor_partials(Block(t, (12, 20), (at, 0)) for t, at in zip(several, (0, 0, 6), strict=True))
    assert [one.zero for one in found] == [False, True, False]
    assert add_partials([found[0].lanes, found[2].lanes]) == whole(tensor)


def test_the_kernel_of_a_gpu_has_the_same_digests() -> None:
    script = Path(__file__).with_name("weights_interpreted.py")
    done = subprocess.run([sys.executable, "-P", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kernel"] == found["torch"]
    assert found["apart"] == found["torch"]
    assert found["zeros"] == found["torch zeros"]
    assert all(zero for _, zero in found["zeros"].values())
    assert not any(zero for _, zero in found["kernel"].values())
    assert [zero for _, zero in found["single"].values()] == [False]
    for name, (lanes, _) in found["changed"].items():
        assert lanes != found["kernel"][name][0], name
