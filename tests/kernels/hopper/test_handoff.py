# SPDX-License-Identifier: Apache-2.0
"""The hand-off without a GPU: real processes in the interpreter, sm_90 compiles, choices, refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from isoexec.kernels.domain import DomainError
from isoexec.kernels.linear.hopper.handoff import buffers, gather, ops, protocol, schedule
from isoexec.kernels.linear.hopper.handoff.kernel import Cut, tiles_of

BF16 = torch.bfloat16
INTERPRETED = "handoff_interpreted.py"


@pytest.fixture(scope="module")
def results(script: Callable[..., Any]) -> dict[str, str]:
    found: dict[str, str] = script(INTERPRETED)
    return found


def test_ranks_in_the_interpreter(check: str, results: dict[str, str]) -> None:
    assert results[check] == ""


@pytest.fixture(scope="module")
def built(script: Callable[..., Any]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = script("compiled_handoff.py")
    return found


def test_nothing_spills_and_two_programs_fit_where_two_are_meant(built: dict[str, dict[str, int]]) -> None:
    assert len(built) >= 12
    assert {n: b for n, b in built.items() if b["stack"] or b["local"] or b["registers"] > 248} == {}
    pairs = {n: b for n, b in built.items() if n.startswith("chain 128x128")}
    assert len(pairs) == 2
    for name, one in pairs.items():
        assert 2 * one["registers"] * 32 * one["warps"] <= 65536, name
        assert 2 * one["shared"] <= 227 * 1024, name


def test_a_tile_travels_in_wide_accesses_and_without_rearrangement(built: dict[str, dict[str, int]]) -> None:
    # 128 x 256 of fp32 by 256 threads, 16 bytes each; and as many again for 16-bit results
    assert built["chain 128x256 first"]["wide_stores"] == 32 + 16
    assert built["chain 128x256 last, rows"]["wide_loads"] == 32
    # no scratch beyond the operands' stages
    stages = 4 * 2 * (128 + 256) * 64
    assert built["chain 128x256 first"]["shared"] <= stages + 64


def test_waiting_acquires_and_telling_releases_for_all_gpus(built: dict[str, dict[str, int]]) -> None:
    for name, one in built.items():
        if name.startswith("chain") or name == "spread":
            assert one["acquire"] >= 2, name
            assert one["release"] >= 2, name
    assert built["mark open"]["acquire"] > 0
    assert built["mark open"]["release"] == 0
    # of three ranks: to or from two peers, or one of them
    assert built["mark close"]["release"] == built["mark raise_came"]["release"] == 2
    assert built["mark await"]["acquire"] == 2 * built["mark await of one"]["acquire"] > 0


def test_chains_use_the_tensor_cores_and_the_copy_engine_of_the_sm(built: dict[str, dict[str, int]]) -> None:
    for name, one in built.items():
        if name.startswith("chain"):
            assert one["matrix"] > 0, name
            assert one["map_loads"] > 0, name
        assert one["fused"] == 0, name
    assert built["chain few rows"]["prefetch"] == 1


def test_fault_words_say_what_did_not_come_and_from_whom() -> None:
    codes = {protocol.code_of(kind, peer) for kind in range(4) for peer in range(protocol.MOST_RANKS)}
    assert len(codes) == 4 * protocol.MOST_RANKS
    assert 0 not in codes
    assert protocol.meaning_of(protocol.code_of(2, 5)) == ("a result", 5)
    text = str(buffers.PeerLostError("tp", 1, 0, "an accumulator", 20.0))
    assert "rank 1 of group tp waited 20 s for an accumulator from rank 0" in text


def test_launches_cover_all_rows_and_fit() -> None:
    cut = Cut(rows=64, columns=64, depth=64, warps=4, stages=3)
    for per, N, owners, elements in ((1, 80, 1, 8192), (777, 96, 2, 40960), (8192, 4096, 1, 1 << 22)):
        found = ops.launches(cut, per, N, owners, elements, BF16)
        assert [first for first, _ in found] == [sum(n for _, n in found[:i]) for i in range(len(found))]
        assert sum(count for _, count in found) == per
        for _, count in found:
            tiles = tiles_of(cut, count, N, owners)
            assert tiles * 64 * 64 <= elements
            assert tiles <= protocol.SLOTS
            assert count * N * 2 <= 2 * elements
    with pytest.raises(buffers.RoomError, match="max_elements of at least"):
        ops.launches(cut, 64, 4096, 2, 8192, BF16)


def test_every_rank_chooses_by_sizes_alone_and_every_size_has_a_choice() -> None:
    for product in ("row", "gradient", "columns"):
        for form in ("all", "rows"):
            for M in (1, 2, 16, 17, 64, 256, 1000, 8192, 1 << 20):
                one = schedule.choose(M, 4096, 12288, 2, form, product)
                assert (one.kind == "columns") == (product == "columns")
                assert (one.cut is not None) == (one.kind == "chain")
    assert (
        schedule.choose(1, 4096, 4096, 2, "all", "columns").tile is not None
    )  # one row is never the library's


def test_rows_are_chosen_only_where_the_room_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = schedule.Schedule(kind="rows", blocks=2)
    held = dict(schedule._steps())
    held["row", "all", 4096, 4096, 2] = ((1 << 30, exchange),)
    monkeypatch.setattr(schedule, "_steps", lambda: held)
    M, N, K = 8192, 4096, 4096
    enough = max(2 * K * (N + M // 2) // 4, M * N)
    assert schedule.choose(M, N, K, 2) == exchange
    assert schedule.choose(M, N, K, 2, elements=enough) == exchange
    for itemsize, elements in ((2, enough - 1), (4, enough)):
        assert schedule.choose(M, N, K, 2, "all", "row", elements, itemsize).kind == "chain"


def test_a_cut_fits_its_shared_memory() -> None:
    for entry in json.loads(schedule.PATH.read_text())["products"]:
        for step in entry["steps"]:
            cut = step["schedule"].get("cut")
            if cut:
                used = 2 * (cut["rows"] + cut["columns"]) * cut["depth"] * cut["stages"]
                assert used * cut.get("per_sm", 1) <= 225_000, cut


def test_depths_divide_a_laps_share() -> None:
    cut = Cut(rows=64, columns=64, depth=128, warps=4, stages=3)
    assert [schedule.fitted(cut, part) for part in (512, 192, 96, 48)] == [128, 64, 32, 16]
    with pytest.raises(DomainError, match="a multiple of 16"):
        schedule.fitted(cut, 40)


def test_fake_results_have_the_shapes_and_dtypes_of_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "size_of", lambda _: 2)
    x = torch.empty(6, 64, dtype=BF16, device="meta")
    w = torch.empty(32, 64, dtype=BF16, device="meta")
    found = [
        ops._row_op(x, w, "g", form, dtype) for form in ("all", "rows") for dtype in (BF16, torch.float32)
    ]
    assert [(tuple(t.shape), t.dtype) for t in found] == [
        ((6, 32), BF16),
        ((6, 32), torch.float32),
        ((3, 32), BF16),
        ((3, 32), torch.float32),
    ]
    found = [ops._gradient_op(x, w.t().contiguous(), "g", [32, 32], form) for form in ("all", "rows")]
    assert [(tuple(t.shape), t.dtype) for t in found] == [((6, 32), BF16), ((3, 32), BF16)]
    whole = torch.empty(32, 128, dtype=BF16, device="meta")
    assert ops._columns_op(x, whole, "g", "rows", BF16).shape == (3, 64)


def test_what_is_outside_the_domain_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.ones(6, 64, dtype=BF16), torch.ones(32, 64, dtype=BF16)
    with pytest.raises(DomainError, match="a group of one rank"):
        ops._row(x, w, "", "all", BF16)
    monkeypatch.setattr(ops, "size_of", lambda _: 2)
    for wrong, match in (
        ((x.float(), w, "g", "all", BF16), "contiguous bfloat16"),
        ((x, w.t().contiguous().t(), "g", "all", BF16), "contiguous bfloat16"),
        ((x, w[:, :32].contiguous(), "g", "all", BF16), "share this rank's part"),
        ((x, w[:24], "g", "all", BF16), "a multiple of 16"),
        ((x[:5], w, "g", "rows", BF16), "equal row blocks"),
        ((x, w, "g", "some", BF16), "all and rows"),
        ((x, w, "g", "all", torch.float16), "bfloat16 and float32"),
        ((x[:, :40].contiguous(), w[:, :40].contiguous(), "g", "all", BF16), "parts of whole 16s"),
    ):
        with pytest.raises(DomainError, match=match):
            ops._row(*wrong)
    for parts in ([20, 20, 24], [32], [80, -16], []):
        with pytest.raises(DomainError, match=f"64 rows in parts of {re.escape(str(parts))}"):
            ops._gradient(x, w.t().contiguous(), "g", parts, "all")
    with pytest.raises(DomainError, match="one row for the library"):
        gather.product(x[:1], w, x, turned=False)
    assert ops._row(x[:0], w, "g", "all", BF16).shape == (0, 32)


def test_a_product_before_setup_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two:
        def size(self) -> int:
            return 2

    monkeypatch.setattr(buffers, "resolve", lambda _: Two())
    with pytest.raises(buffers.RoomError, match=r"call handoff.ops.setup\(group, max_elements\)"):
        buffers.room_of("nobody")
