# SPDX-License-Identifier: Apache-2.0
"""One byte string for one value, and no byte string for what has none."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isoexec.contracts.canonical import encode
from isoexec.contracts.digests import ZERO, digest_bytes, digest_of, is_digest
from isoexec.contracts.errors import ContractError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abcdé", max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(PLAIN, st.randoms(use_true_random=False))
def test_key_order_never_changes_the_bytes_and_json_reads_them_back(
    value: object, rng: random.Random
) -> None:
    def shuffled(one: object) -> object:
        if isinstance(one, dict):
            items = [(key, shuffled(entry)) for key, entry in one.items()]
            rng.shuffle(items)
            return dict(items)
        return [shuffled(entry) for entry in one] if isinstance(one, list) else one

    data = encode(value)
    assert encode(shuffled(value)) == data
    assert encode(json.loads(data)) == data


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        {"a": [float("nan")]},
        2**63,
        -(2**63) - 1,
        {1: "a"},
        b"x",
        {"a": {1, 2}},
        "\ud800",
        {"é": 1, "e\u0301": 2},
    ],
    ids=repr,
)
def test_what_has_no_canonical_form_is_refused(value: object) -> None:
    with pytest.raises(ContractError):
        encode(value)


def test_nesting_is_bounded() -> None:
    value: object = 1
    for _ in range(70):
        value = [value]
    with pytest.raises(ContractError, match="nested"):
        encode(value)


def test_a_refusal_names_the_field() -> None:
    with pytest.raises(ContractError) as caught:
        encode({"a": {"b": [1, 0.5]}})
    assert caught.value.field == "a.b[1]"


def test_true_and_one_have_different_digests() -> None:
    assert digest_of(True) != digest_of(1)
    assert digest_of("é") == digest_of("e\u0301")


@pytest.mark.parametrize(("text", "fine"), [
    (ZERO, True), (digest_bytes(b""), True), ("sha256:" + "A" * 64, False), ("sha256:" + "a" * 63, False),
    ("md5:" + "a" * 64, False), (None, False), ("sha256:" + "a" * 64 + "\n", False),
])  # fmt: skip
def test_the_form_of_a_digest(text: object, fine: bool) -> None:
    assert is_digest(text) is fine
