# SPDX-License-Identifier: Apache-2.0
"""A handle is the tensor's memory, whole and in its dtype, and a tensor of the trainer's stays where it is."""

from __future__ import annotations

import json

import pytest
import torch

from isoexec.adapters.handles import Offer, handle_of, opened


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_opened_handle_has_the_bits_and_the_memory_of_what_was_offered(dtype: torch.dtype) -> None:
    whole = torch.arange(60, dtype=torch.float32).view(6, 10).to(dtype)
    part = whole[1:5, 2:7]  # strided, as query, key and value are in a trainer's fused weight
    kept, handle = handle_of(part)
    found = opened(handle)
    assert found.dtype == dtype
    assert torch.equal(found, part)
    kept[0, 0] = -1.0
    assert found[0, 0] == -1.0
    assert whole[1, 2] == 12.0


def test_a_handle_is_made_of_plain_builtins() -> None:
    _, handle = handle_of(torch.ones(3, 4))
    assert {type(part) for part in handle} <= {str, int, bytes, list, bool}
    assert json.loads(json.dumps(handle[:4])) == ["cpu", "float32", [3, 4], 0]


def test_an_offer_holds_its_tensors_until_it_is_withdrawn() -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    offer = Offer(weights)
    found = {name: opened(handle) for name, handle in offer.handles}
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], t) for name, t in weights.items())
    offer.withdraw()
    offer.withdraw()
    assert not offer._held
