# SPDX-License-Identifier: Apache-2.0
"""Weights by name: shards add up, copies are compared one by one, and each kind of difference has its name."""

from __future__ import annotations

from typing import Any

import pytest

from isoexec.contracts.wire import Weights
from isoexec.daemon.weights import WeightLedger

TOP = (1 << 64) - 1


def report(
    role: str, version: int, tensors: dict[str, tuple[int, int]], source: str = "0", **changes: Any
) -> Weights:
    counts = dict.fromkeys(tensors, 8)
    fields: dict[str, Any] = {"numel": counts, "total": counts, **changes}
    return Weights(
        run="r", role=role, source=source, weight_version=version, step=version, tensors=tensors, **fields
    )


def kinds(ledger: WeightLedger, version: int) -> dict[str, tuple[str, int | None]]:
    return {one.name: (one.kind, one.engine_version) for one in ledger.breaks(version)}


def ledger_of(*reports: Weights) -> WeightLedger:
    ledger = WeightLedger()
    for one in reports:
        ledger.add(one)
    return ledger


def test_equal_weights_break_nothing() -> None:
    assert not ledger_of(report("engine", 1, {"w": (1, 2)}), report("trainer", 1, {"w": (1, 2)})).breaks(1)


def test_shards_add_up_modulo_two_to_the_64() -> None:
    half: dict[str, Any] = {"numel": {"w": 4}, "total": {"w": 8}}
    ledger = ledger_of(
        report("trainer", 1, {"w": (TOP, 5)}, "0", **half),
        report("trainer", 1, {"w": (3, TOP)}, "1", **half),
        report("engine", 1, {"w": (2, 4)}),
    )
    assert not ledger.breaks(1)
    ledger.add(report("trainer", 1, {"w": (4, TOP)}, "1", **half))
    assert kinds(ledger, 1) == {"w": ("unequal", 1)}


def test_a_shard_that_is_missing_is_unknown() -> None:
    half: dict[str, Any] = {"numel": {"w": 4}, "total": {"w": 8}}
    ledger = ledger_of(report("trainer", 1, {"w": (1, 2)}), report("engine", 1, {"w": (1, 2)}, **half))
    assert kinds(ledger, 1) == {"w": ("unknown", 1)}


def test_each_replica_is_a_copy_of_its_own() -> None:
    half: dict[str, Any] = {"numel": {"w": 4}, "total": {"w": 8}}
    ledger = ledger_of(report("trainer", 1, {"w": (3, 3)}))
    for replica, extra in (("a", 0), ("b", 1)):
        ledger.add(report("engine", 1, {"w": (1, 1)}, f"{replica}0", **half), replica)
        ledger.add(report("engine", 1, {"w": (2 + extra, 2)}, f"{replica}1", **half), replica)
    assert kinds(ledger, 1) == {"w": ("unequal", 1)}
    # two whole copies are not added up
    whole = ledger_of(
        *(report("engine", 1, {"w": (3, 3)}, s) for s in "ab"), report("trainer", 1, {"w": (3, 3)})
    )
    assert not whole.breaks(1)


@pytest.mark.parametrize(
    ("engine", "wanted"),
    [
        ({"tensors": {"w": (1, 1), "v": (9, 9)}}, {"w": ("stale", 1)}),
        ({"tensors": {"w": (7, 7), "v": (9, 9)}}, {"w": ("unequal", 3)}),
        ({"tensors": {"w": (7, 7), "v": (9, 9)}, "zero": ("w",)}, {"w": ("zero", 3)}),
        ({"tensors": {"v": (9, 9)}}, {"w": ("missing", None)}),
        ({"tensors": {"v": (9, 9)}, "unknown": ("w",)}, {"w": ("unknown", 3)}),
        ({"tensors": {"w": (3, 3), "v": (9, 9), "u": (0, 0)}}, {"u": ("missing", 3)}),
    ],
)
def test_each_difference_has_its_name(
    engine: dict[str, Any], wanted: dict[str, tuple[str, int | None]]
) -> None:
    ledger = ledger_of(*(report("trainer", v, {"w": (v, v), "v": (9, 9)}) for v in (1, 2, 3)))
    ledger.add(report("engine", 3, **engine))
    assert kinds(ledger, 3) == wanted


def test_a_sync_that_moves_nothing_at_all_is_seen_and_a_single_still_tensor_is_not() -> None:
    ledger = ledger_of(
        *(
            report(role, v, {"w": (1, 1), "v": (v // 2, 0)})
            for role in ("engine", "trainer")
            for v in (2, 3, 4)
        )
    )
    assert kinds(ledger, 3) == {"*": ("unchanged", 3)}
    assert not ledger.breaks(4)


def test_one_sided_reports_are_no_comparison() -> None:
    ledger = ledger_of(report("trainer", 1, {"w": (1, 1)}))
    assert not ledger.breaks(1)
    assert ledger.has("trainer", 1)
    assert not ledger.has("engine", 1)
    assert ledger.latest("engine") is None
