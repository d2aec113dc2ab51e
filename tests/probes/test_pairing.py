# SPDX-License-Identifier: Apache-2.0
"""Sequences are named by content, and both sides pick the same ones."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from isoexec.probes.pairing import sampled, sequence_digest


def test_the_digest_is_xxh3_128_of_int32_little_endian() -> None:
    ids = [1, 2, 70000]
    raw = b"".join(i.to_bytes(4, "little") for i in ids)
    assert sequence_digest(ids) == xxhash.xxh3_128_digest(raw)


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<i8", "<u2"])
def test_the_digest_does_not_depend_on_how_the_ids_are_held(dtype: str) -> None:
    ids = [5, 4, 3, 2]
    assert sequence_digest(np.array(ids, dtype)) == sequence_digest(ids)


def test_one_other_token_or_order_gives_another_digest() -> None:
    assert len({sequence_digest(s) for s in ([1, 2, 3], [1, 3, 2], [1, 2], [1, 2, 3, 0], [])}) == 5


@pytest.mark.parametrize("ids", [[-1], [2**31], [[1, 2]], [0.5]])
def test_what_is_no_token_id_is_refused(ids: list[object]) -> None:
    with pytest.raises(ValueError, match="token ids"):
        sequence_digest(ids)  # type: ignore[arg-type]


def test_sampling_is_a_function_of_the_digest_and_takes_about_its_share() -> None:
    digests = [sequence_digest([i]) for i in range(4000)]
    taken = [d for d in digests if sampled(d, 8)]
    assert 400 < len(taken) < 600
    assert all(sampled(d, 1) for d in digests)
    with pytest.raises(ValueError, match="at least 1"):
        sampled(digests[0], 0)
