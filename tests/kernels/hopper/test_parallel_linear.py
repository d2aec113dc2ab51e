# SPDX-License-Identifier: Apache-2.0
"""The sm90 linear over two and four real processes of gloo has the bits of one rank: both forms, gradients, both schedules.

Products are the specification's chain here; what is checked is who goes on from what, which rows and parts travel where, and what
happens when a peer is lost. The tensor core's bits need GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup
from torch.multiprocessing.spawn import start_processes

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from isoexec.kernels.canaries import fill
from isoexec.kernels.domain import DomainError
from isoexec.kernels.hopper import library
from isoexec.kernels.linear.hopper import naive, ops, parallel, plain, products, transport

Differing = Callable[[Tensor, Tensor], int]
Results = dict[str, list[Tensor]]

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = [2, 4]
S, B, K, N = 20, 3, 128, 256
UNEQUAL = (64, 64, 128, 256)  # as q, k, v and z of a linear attention, in one weight
ROWS = 52  # not a multiple of what it is cut into


def _product(
    layout: str, a: Tensor, b: Tensor, acc: Tensor | None, out_dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    left, right = (a.t(), b.t()) if layout == "weight" else (a, b.t() if layout == "input" else b)
    y = naive.chain(left, right, acc).to(out_dtype)
    return y if out is None else out.copy_(y)


def _bf16(*shape: int, salt: int) -> Tensor:
    return fill(*shape, salt=salt, dtype=BF16)


def _operands() -> dict[str, Tensor]:
    return {
        "x": _bf16(S, B, K, salt=1),
        "w_in": _bf16(2 * N, K, salt=2),
        "dy": _bf16(S, B, 2 * N, salt=3),
        "dy_head": fill(S, B, 2 * N, salt=4),
        "h": _bf16(S, B, N, salt=5),
        "w_out": _bf16(K, N, salt=6),
        "g": _bf16(S, B, K, salt=7),
        "many": _bf16(ROWS, N, salt=8),
    }


def _with_grads(call: Callable[..., Tensor], inputs: Sequence[Tensor], g: Tensor) -> list[Tensor]:
    grown = [t.clone().requires_grad_() for t in inputs]
    out = call(*grown)
    return [out.detach(), *torch.autograd.grad(out, grown, g)]


def _sharded(rank: int, size: int, group: ProcessGroup) -> Results:
    t = _operands()

    def own(x: Tensor, dim: int) -> Tensor:
        return x.chunk(size, dim)[rank].contiguous()

    merged = {"merged": (N, N), "unequal": UNEQUAL}
    by_outputs = plain.outputs_shard(own(t["w_out"], 1), group)
    done: Results = {"by_outputs": [by_outputs]}
    for sp in (False, True):
        tag = "/sp" if sp else ""
        x, g = (own(t[name], 0) if sp else t[name] for name in ("x", "g"))

        def column(x: Tensor, w: Tensor, sp: bool = sp, **more: Any) -> Tensor:
            return ops.column_linear(x, w, group=group, sequence_parallel=sp, **more)

        def row(x: Tensor, w: Tensor, sp: bool = sp, **more: Any) -> Tensor:
            return ops.row_linear(x, w, group=group, sequence_parallel=sp, **more)

        done["column" + tag] = _with_grads(column, [x, own(t["w_in"], 0)], own(t["dy"], 2))
        for name, parts in merged.items():
            own_rows = naive.shard_rows(parts, rank, size)
            laps = 2 if name == "merged" else [part // size for part in parts]
            done[name + tag] = _with_grads(
                lambda x, w, c=column, laps=laps: c(x, w, laps=laps),
                [x, t["w_in"][own_rows]],
                t["dy"][..., own_rows],
            )
        done["head" + tag] = _with_grads(
            lambda x, w, c=column: c(x, w, out_dtype=FP32), [x, own(t["w_in"], 0)], own(t["dy_head"], 2)
        )
        done["row" + tag] = _with_grads(row, [own(t["h"], 2), own(t["w_out"], 1)], g)
        done["gathered" + tag] = [
            plain.gathered_product(own(t["many"], 1), by_outputs, group, "rows" if sp else "all", dtype)
            for dtype in (BF16, FP32)
        ]
    for name, parts in merged.items():
        own_rows = naive.shard_rows(parts, rank, size)
        dy, w = t["dy"][..., own_rows].reshape(S * B, -1), t["w_in"][own_rows]
        local = [part // size for part in parts]
        wrong = ([2 * N // size], local[::-1] if name == "unequal" else [16, 2 * N // size - 16])
        done["laps of " + name] = [
            plain.column_gradient(dy, w, group, widths, "all", FP32) for widths in (local, *wrong)
        ]
    for count in (1, 3, 8, 100):
        for form in ("all", "rows"):

            def make(
                stage: int, rows: slice, acc: Tensor | None, dtype: torch.dtype, out: Tensor | None
            ) -> Tensor:
                return _product("forward", own(t["many"], 1)[rows], own(t["w_out"], 1), acc, dtype, out)

            done[f"blocks {count} {form}"] = [
                plain.hand_off(
                    make,
                    rows=ROWS,
                    width=K,
                    device=torch.device("cpu"),
                    group=group,
                    stages=size,
                    form=form,
                    out_dtype=FP32,
                    name="rows in blocks",
                    blocks=count,
                )
            ]
    done["empty"] = [ops.row_linear(own(t["h"], 2)[:0], own(t["w_out"], 1), group=group)]
    done["one row"] = [ops.row_linear(own(t["h"], 2)[:1, :1], own(t["w_out"], 1), group=group)]
    done["summed"] = [_product("forward", own(t["many"], 1), own(t["w_out"], 1), None, FP32)]
    return done


def _refusals(rank: int, group: ProcessGroup) -> list[str]:
    said = []
    for call in (
        lambda: ops.row_linear(
            _bf16(3, 1, 64, salt=1), _bf16(32, 64, salt=2), group=group, sequence_parallel=True
        ),
        lambda: plain.column_gradient(
            _bf16(4, 48, salt=1), _bf16(48, 64, salt=2), group, [24, 24], "all", BF16
        ),
    ):
        try:
            call()
        except DomainError as error:
            said.append(str(error))
    transport.use("plain" if rank == 0 else None)
    try:
        transport.prepare(group, torch.device("cpu"))
    except transport.TransportError as error:
        said.append(str(error))
    transport.use("plain")
    said.append(transport.prepare(group, torch.device("cpu")).name)
    transport.use(None)
    return said


def _joined(rank: int, size: int, folder: str) -> ProcessGroup:
    torch.set_num_threads(1)
    for name, kernel in {
        "column_linear": parallel._column,
        "column_input_gradient": parallel._column_gradient,
        "parallel_weight_gradient": parallel._weight_gradient,
        "row_linear": parallel._row,
        "row_input_gradient": parallel._row_gradient,
    }.items():
        library._LIBRARY.impl(f"sm90_{name}", kernel, "CPU")
    products.product = _product
    store = FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    world = dist.group.WORLD
    assert world is not None
    return world


def _rank(rank: int, size: int, folder: str) -> None:
    group = _joined(rank, size, folder)
    chosen = transport.prepare(group, torch.device("cpu"))
    _fakes(group)
    torch.save(
        (_sharded(rank, size, group), _refusals(rank, group), chosen.name, chosen.reason),
        f"{folder}/{rank}.pt",
    )
    dist.destroy_process_group()


def _as_faked(op: Any, *given: Any) -> None:
    """What ranks get has the shape, dtype and strides that the fake kernel says."""
    real = op(*given)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(one) if isinstance(one, Tensor) else one for one in given))
    found = [(t.shape, t.dtype, t.stride(), t.storage_offset()) for t in (real, fake)]
    assert found[0] == found[1], (op, found)


def _fakes(group: ProcessGroup) -> None:
    name, size = group.group_name, group.size()
    x, dy = _bf16(size * 2, 3, 64, salt=1), _bf16(size * 2, 3, 32, salt=2)
    w, out = _bf16(32, 64, salt=3), _bf16(64, 32, salt=4)
    for sp in (False, True):
        for dtype in (BF16, FP32):
            _as_faked(parallel._column_op, x, w, name, sp, [16, 16], dtype)
        _as_faked(parallel._column_gradient_op, dy, w, name, sp, [16, 16])
        _as_faked(parallel._row_op, dy, out, None, name, sp)
    _as_faked(parallel._row_gradient_op, x, out, name)
    _as_faked(parallel._weight_gradient_op, dy, x, "", "")
    _as_faked(parallel._weight_gradient_op, _bf16(size * 4, 32, salt=5), _bf16(4, 64, salt=6), name, "")


def _lost(rank: int, size: int, folder: str) -> None:
    group = _joined(rank, size, folder)
    transport.prepare(group, torch.device("cpu"))
    transport.PATIENCE = 1.0
    began = time.monotonic()
    if rank == 0:
        time.sleep(4)  # alive, and elsewhere
        return
    try:
        plain.row_product(_bf16(8, 64, salt=1), _bf16(32, 64, salt=2), group, "all", BF16)
        said = ""
    except transport.LostPeerError as error:
        said = str(error)
    torch.save((said, time.monotonic() - began), f"{folder}/{rank}.pt")


def _launch(worker: Callable[[int, int, str], None], size: int, folder: Path) -> list[Any]:
    start_processes(worker, (size, str(folder)), nprocs=size, start_method="fork")
    return [torch.load(folder / f"{r}.pt") if (folder / f"{r}.pt").exists() else None for r in range(size)]


@pytest.fixture(scope="module")
def one() -> Results:
    t = _operands()
    x, dy, h, g = (t[name].view(S * B, -1) for name in ("x", "dy", "h", "g"))
    head = t["dy_head"].view(S * B, -1)
    column = [
        naive.linear(x, t["w_in"]),
        naive.input_gradient(dy, t["w_in"]),
        naive.weight_gradient(dy, x),
    ]
    return {
        "column": column,
        "merged": column,
        "unequal": column,
        "head": [
            naive.linear(x, t["w_in"], out_dtype=FP32),
            naive.input_gradient(head, t["w_in"]),
            naive.weight_gradient(head, x),
        ],
        "row": [
            naive.linear(h, t["w_out"]),
            naive.input_gradient(g, t["w_out"]),
            naive.weight_gradient(g, h),
        ],
        "many": [naive.linear(t["many"], t["w_out"], out_dtype=dtype) for dtype in (BF16, FP32)],
    }


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return _launch(_rank, request.param, tmp_path_factory.mktemp(f"ranks{request.param}"))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _whole(shards: Sequence[Tensor], parts: Sequence[int], dim: int) -> Tensor:
    """Shards of a weight merged of parts along a dimension, as one rank holds them."""
    pieces = [one.split([part // len(shards) for part in parts], dim) for one in shards]
    return torch.cat([piece[lap] for lap in range(len(parts)) for piece in pieces], dim)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(
    ("name", "parts"),
    [("column", (2 * N,)), ("merged", (N, N)), ("unequal", UNEQUAL), ("head", (2 * N,))],
)
def test_a_column_parallel_linear_has_the_bits_of_one_rank(
    differing: Differing, one: Results, ranks: list[Any], name: str, parts: tuple[int, ...], sp: bool
) -> None:
    y, dx, dw = zip(*(r[0][name + "/sp" * sp] for r in ranks), strict=True)
    assert differing(_rows(_whole(y, parts, 2)), one[name][0]) == 0
    for got in [torch.cat(dx)] if sp else dx:
        assert differing(_rows(got), one[name][1]) == 0
    assert differing(_whole(dw, parts, 0), one[name][2]) == 0


def test_a_merged_weight_whose_chain_makes_other_laps_has_other_bits(
    differing: Differing, ranks: list[Any]
) -> None:
    t = _operands()
    want = naive.input_gradient(t["dy"].view(S * B, -1), t["w_in"], out_dtype=FP32)
    for r in ranks:
        for name in ("merged", "unequal"):
            right, one_lap, other_widths = r[0]["laps of " + name]
            assert differing(right, want) == 0
            assert differing(one_lap, want) > 1000
            assert differing(other_widths, want) > 1000


@pytest.mark.parametrize("sp", [False, True])
def test_a_row_parallel_linear_has_the_bits_of_one_rank(
    differing: Differing, one: Results, ranks: list[Any], sp: bool
) -> None:
    y, dx, dw = zip(*(r[0]["row" + "/sp" * sp] for r in ranks), strict=True)
    for got in [torch.cat(y)] if sp else y:
        assert differing(_rows(got), one["row"][0]) == 0
    assert differing(_rows(torch.cat(dx, 2)), one["row"][1]) == 0
    assert differing(torch.cat(dw, 1), one["row"][2]) == 0
    assert all(r[0]["empty"][0].shape == (0, B, K) for r in ranks)
    assert all(differing(_rows(r[0]["one row"][0]), one["row"][0][:1]) == 0 for r in ranks)


def test_gathered_inputs_and_a_weight_cut_by_outputs_give_the_same_bits(
    differing: Differing, one: Results, ranks: list[Any]
) -> None:
    assert differing(torch.cat([r[0]["by_outputs"][0] for r in ranks]), _operands()["w_out"]) == 0
    for i in range(2):
        for r in ranks:
            assert differing(r[0]["gathered"][i], one["many"][i]) == 0
        assert differing(torch.cat([r[0]["gathered/sp"][i] for r in ranks]), one["many"][i]) == 0


@pytest.mark.parametrize("count", [1, 3, 8, 100])
def test_any_number_of_row_blocks_gives_the_same_bits(
    differing: Differing, one: Results, ranks: list[Any], count: int
) -> None:
    for r in ranks:
        assert differing(r[0][f"blocks {count} all"][0], one["many"][1]) == 0
    assert differing(torch.cat([r[0][f"blocks {count} rows"][0] for r in ranks]), one["many"][1]) == 0


def test_an_all_reduce_of_the_ranks_own_sums_would_not_have_these_bits(
    differing: Differing, one: Results, ranks: list[Any]
) -> None:
    sums = torch.stack([r[0]["summed"][0] for r in ranks]).sum(0)
    assert differing(sums, one["many"][1]) > 1000


def test_ranks_agree_on_a_transport_and_say_why(ranks: list[Any]) -> None:
    for _, said, name, reason in ranks:
        assert name == "plain"
        assert reason.startswith("symmetric: ")
        assert f"scattered over {len(ranks)} ranks" in said[0]
        assert "a shard of 48 rows in parts of [24, 24]" in said[1]
        assert "one transport on every rank, found several" in said[2]
        assert said[3] == "plain"


def test_a_lost_peer_is_an_error_that_names_rank_and_step(tmp_path: Path) -> None:
    said, seconds = _launch(_lost, 2, tmp_path)[1]
    assert "rank 1 of 2 lost a peer in row product, tick 1 of 3 (patience 1 s)" in said
    assert "restart the job" in said
    assert seconds < 3


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(transport.TransportError, match="'carrier pigeon'; register it first"):
        transport.use("carrier pigeon")
    with pytest.raises(DomainError, match=r"transport pigeon over 2 ranks.*schedules\.json"):
        transport.schedule_for("pigeon", 2, 8)


def test_schedules_cover_every_number_of_rows() -> None:
    for name in transport.TRANSPORTS:
        for ranks in (2, 4, 8, 16):
            found = [transport.schedule_for(name, ranks, rows) for rows in (1, 512, 513, 10**6)]
            assert [one.blocks for one in found] == sorted(one.blocks for one in found)
