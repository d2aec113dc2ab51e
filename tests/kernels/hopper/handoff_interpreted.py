# SPDX-License-Identifier: Apache-2.0
"""Runs the hand-off's ops in Triton's interpreter, a process a rank, and prints `{check: what went wrong}` as JSON.

Symmetric memory is a file a rank, mapped by all of them: words, waiting and signalling are as between GPUs. The library's
products are the specification's.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import on_cpu  # type: ignore[import-not-found]  # noqa: F401 - before any op is defined
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime import interpreter

from isoexec.kernels.groups import name_of

_atomic = interpreter.InterpreterBuilder.create_atomic_rmw


def _yielding(self: Any, *given: Any) -> Any:
    """A poll, which adds nothing, gives way to the rank that it waits for: here ranks share cores."""
    if not given[2].data.any():
        time.sleep(2e-4)
    return _atomic(self, *given)


interpreter.InterpreterBuilder.create_atomic_rmw = _yielding

from isoexec.kernels.grouped_linear.hopper import kernel as grouped_kernel  # noqa: E402
from isoexec.kernels.grouped_linear.hopper import naive as grouped_naive  # noqa: E402
from isoexec.kernels.grouped_linear.hopper import ops as grouped  # noqa: E402
from isoexec.kernels.grouped_linear.hopper import table as grouped_table  # noqa: E402
from isoexec.kernels.linear.hopper import naive, symmetric, transport  # noqa: E402
from isoexec.kernels.linear.hopper.handoff import buffers, gather, ops, protocol, schedule  # noqa: E402
from isoexec.kernels.linear.hopper.handoff.kernel import Cut  # noqa: E402
from isoexec.kernels.linear.hopper.handoff.schedule import Schedule  # noqa: E402
from isoexec.kernels.linear.hopper.kernel import Tile  # noqa: E402

ELEMENTS = 20480
BF16 = torch.bfloat16
VIEW = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
CHECKS: dict[str, Callable[[], None]] = {}
PATIENCE = 60.0
EXPERTS_TILE = grouped_kernel.Tile(rows=32, columns=64, depth=64, warps=4, stages=2)
WITH_THREE = (
    "gradients_go_round_once_a_lap",
    "experts_are_handed_on_through_it",
    "experts_whose_peer_never_comes_get_nan",
    "columns_have_them_too",
    "a_peer_that_never_comes_is_named",
)


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


class Files:
    """`buffers.Memory` over a file a rank."""

    def __init__(self, folder: Path, rank: int, ranks: int, nbytes: int) -> None:
        self.rank = rank
        self._bytes = [
            torch.from_file(str(folder / str(peer)), shared=True, size=nbytes, dtype=torch.uint8)
            for peer in range(ranks)
        ]
        self.bases: Sequence[int] = [b.data_ptr() for b in self._bytes]

    def view(self, rank: int, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        return self._bytes[rank][offset : offset + count * dtype.itemsize].view(dtype)


def product(x: Tensor, w: Tensor, out: Tensor, *, turned: bool, tile: Tile | None = None) -> None:
    out.copy_(naive.linear(x, w.t().contiguous() if turned else w, out_dtype=out.dtype))


def chain(rows: int, columns: int, depth: int, **free: Any) -> Schedule:
    cut = Cut(rows=rows, columns=columns, depth=depth, warps=4, stages=2, **free)
    return Schedule(kind="chain", cut=cut)


CHAINS = (
    chain(16, 32, 32),
    chain(32, 16, 64, group=1),
    chain(16, 64, 16, swapped=True, group=2),
    chain(64, 32, 32, per_sm=2),
)
GATHERED = (Schedule(kind="rows", mover="kernel"), Schedule(kind="rows", blocks=3))


def chosen(one: Schedule) -> None:
    setattr(ops, "choose", lambda *_: one)  # noqa: B010 - the table's place


def operands(M: int, N: int, K: int, seed: int) -> tuple[Tensor, Tensor]:
    """The first terms are large and the last take them away again, so another order of the rest shows after rounding too."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(M, K, generator=generator).to(BF16)
    w = (torch.randn(N, K, generator=generator) / K**0.5).to(BF16)
    x[:, :16] *= 2.0**16
    x[:, -16:], w[:, -16:] = -x[:, :16], w[:, :16]
    return x, w


def part(x: Tensor, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].contiguous()


def same(got: Tensor, want: Tensor, what: object) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype), (what, got.shape, want.shape, got.dtype)
    count = int((got.view(VIEW[got.dtype]) != want.contiguous().view(VIEW[got.dtype])).sum())
    assert count == 0, f"{what}: {count} of {got.numel()} elements differ"


def group() -> Any:
    return dist.group.WORLD


def row_products(
    schedules: Sequence[Schedule], rows: Sequence[int], dtypes: Sequence[torch.dtype] = (BF16,)
) -> None:
    ranks = dist.get_world_size()
    for seed, M in enumerate(rows):
        x, w = operands(M, 80, 64 * ranks, seed)
        for dtype in dtypes:
            want = naive.linear(x, w, out_dtype=dtype)
            for one in schedules:
                chosen(one)
                what = (M, dtype, one)
                same(ops.row_product(part(x, 1), part(w, 1), group(), "all", dtype), want, what)
                if M % ranks == 0:
                    got = ops.row_product(part(x, 1), part(w, 1), group(), "rows", dtype)
                    same(got, part(want, 0), ("rows", *what))


@check
def every_cut_of_the_chain_has_the_bits_of_one_rank() -> None:
    row_products(CHAINS, (6 * dist.get_world_size(),))
    row_products(CHAINS[:1], (37,))


@check
def the_accumulator_itself_can_be_asked_for() -> None:
    row_products((CHAINS[0], GATHERED[1]), (2 * dist.get_world_size(),), (torch.float32,))


@check
def ranks_that_exchange_rows_and_weights_have_them_too() -> None:
    row_products(GATHERED, (8 * dist.get_world_size(),))
    row_products(GATHERED[1:], (9,))


@check
def rows_in_several_launches_have_the_same_bits() -> None:
    room = buffers.room_of(name_of(group()))
    one = chain(16, 32, 32)
    assert one.cut is not None
    owners = dist.get_world_size()
    per = 150
    assert len(ops.launches(one.cut, per, 80, owners, room.elements, BF16)) > 1
    row_products((one,), (per * owners,))


@check
def a_hand_off_that_is_added_up_instead_has_other_bits() -> None:
    x, w = operands(24, 80, 64 * dist.get_world_size(), 7)
    parts = zip(x.chunk(2, 1), w.chunk(2, 1), strict=True)
    first, second = (naive.linear(a, b, out_dtype=torch.float32) for a, b in parts)
    assert int((first + second != naive.linear(x, w, out_dtype=torch.float32)).sum()) > 0


@check
def gradients_go_round_once_a_lap() -> None:
    ranks = dist.get_world_size()
    cuts = (chain(16, 32, 32), chain(16, 64, 16, swapped=True))
    for parts, schedules in (
        ([16], cuts),
        ([16, 16], (cuts[0], *GATHERED[1:])),
        ([16, 16, 16], cuts[1:]),
        ([16, 16, 48], (cuts[0], *GATHERED[1:])),
        ([64, 32], cuts[1:]),
    ):
        whole = [ranks * one for one in parts]
        dy, w = operands(2 * ranks, 32, sum(whole), sum(parts))  # w is [K, N]: the chain is over N
        # each lap is a run of N that the ranks share
        mine = naive.shard_rows(whole, dist.get_rank(), ranks)
        mine_dy, mine_w = dy[:, mine].contiguous(), w[:, mine].t().contiguous()
        want = naive.linear(dy, w)
        for one in schedules:
            chosen(one)
            same(ops.column_gradient(mine_dy, mine_w, group(), parts, "all"), want, (parts, one))
            same(
                ops.column_gradient(mine_dy, mine_w, group(), parts, "rows"),
                part(want, 0),
                (parts, "rows", one),
            )


def experts(rows: int, K: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of four experts, of which the second has none, behind them rows of nobody, and the experts' weights."""
    x, w = operands(rows, 4 * 48, K, seed)
    offsets = torch.tensor([0, rows // 3, rows // 3, rows // 2, rows - 2], dtype=torch.int32)
    return x, w.view(4, 48, K), offsets


@check
def experts_are_handed_on_through_it() -> None:
    """The experts' ops over ranks, by their transport, in row blocks and in launches that the room holds."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for rows, blocks in ((11, 1), (40, 3), (430, 2)):
        x, w, offsets = experts(rows, 64 * ranks, rows)
        real = int(offsets[-1])
        if rows == 430:
            assert rows * w.shape[1] > buffers.room_of(name_of(group())).elements, "several launches"
        setattr(symmetric, "schedule_for", lambda *_, b=blocks: transport.Schedule(blocks=b, gather_rows=0))  # noqa: B010
        got = grouped.row_grouped_linear(part(x, 1), part(w, 2), offsets, group=group())
        same(got[:real], grouped_naive.forward(x, w, offsets)[:real], (rows, blocks))
        dy, down, _ = experts(rows, 32 * ranks, rows)
        lap = slice(
            16 * (ranks - 1), 16 * ranks
        )  # its end takes away what its first terms were, so what it goes on with shows
        dy[:, lap], down[..., lap] = -dy[:, :16], down[..., :16]
        dy[:, -16:] *= 2.0**-16
        up = down.transpose(1, 2)
        mine = naive.shard_rows([16 * ranks] * 2, rank, ranks)
        own = up[:, mine].contiguous().requires_grad_()
        fed = torch.zeros(rows, 48, dtype=BF16, requires_grad=True)
        grouped.grouped_linear(fed, own, offsets, group=group(), laps=2).backward(dy[:, mine].contiguous())
        assert fed.grad is not None
        want = grouped_naive.input_gradient(dy, up, offsets)
        same(fed.grad[:real], want[:real], ("gradient", rows, blocks))
        one_lap = grouped._column_gradient_op(dy[:, mine].contiguous(), own, offsets, name_of(group()), 1)
        assert int((one_lap[:real] != want[:real]).sum()) > 0, "one lap for two parts has other bits"


def alone(what: str, peer: int, call: Callable[[], Tensor]) -> None:
    """A product that the other ranks do not make."""
    room = buffers.room_of(name_of(group()))
    patience = room.patience
    object.__setattr__(room, "patience", 2000)
    assert bool(call().isnan().all()), "what never came must not look like a result"
    object.__setattr__(room, "patience", patience)
    lost = None
    try:
        transport.finish(group())
    except buffers.PeerLostError as error:
        lost = error
    assert lost is not None, "a lost peer must be reported"
    assert (lost.what, lost.peer) == (what, peer), lost


def start_again() -> None:
    room = buffers._ROOMS[name_of(group())]
    dist.barrier()
    for words in (room.memory.view(room.rank, torch.int32, 0, protocol.WORDS), room.state, room.mirror):
        words.zero_()
    dist.barrier()


@check
def experts_whose_peer_never_comes_get_nan() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x, w, offsets = experts(9, 64 * ranks, 1)
    real = int(offsets[-1])
    call = partial(grouped.row_grouped_linear, part(x, 1), part(w, 2), offsets, group=group())
    start_again()
    if rank == 0:
        alone("a result", ranks - 1, call)
    start_again()
    if rank == ranks - 1:
        alone("an accumulator", ranks - 2, call)
    start_again()
    same(call()[:real], grouped_naive.forward(x, w, offsets)[:real], "again")


@check
def columns_have_them_too() -> None:
    ranks = dist.get_world_size()
    tile = Tile(kind="pointers", rows=16, columns=32, depth=32, warps=4, stages=2)
    chosen(Schedule(kind="columns", tile=tile))
    for M in (6 * ranks, 21):
        x, w = operands(M, 16 * ranks, 64 * ranks, M)
        want = naive.linear(x, w)
        same(ops.columns_product(part(x, 1), part(w, 0), group(), "all"), want, M)
        if M % ranks == 0:
            same(ops.columns_product(part(x, 1), part(w, 0), group(), "rows"), part(want, 0), ("rows", M))


def as_faked(op: Any, *given: Any) -> None:
    real = op(*given)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(one) if isinstance(one, Tensor) else one for one in given))
    found = [(t.shape, t.dtype, t.stride(), t.storage_offset()) for t in (real, fake)]
    assert found[0] == found[1], (op, found)


@check
def fakes_are_as_what_ranks_get() -> None:
    ranks, name = dist.get_world_size(), name_of(group())
    x, w = operands(2 * ranks, 48, 64 * ranks, 1)
    chosen(CHAINS[0])
    for form in ("all", "rows"):
        for dtype in (BF16, torch.float32):
            as_faked(ops._row_op, part(x, 1), part(w, 1), name, form, dtype)
        as_faked(ops._gradient_op, part(x, 1), part(w, 1).t().contiguous(), name, [16, 48], form)
    chosen(
        Schedule(kind="columns", tile=Tile(kind="pointers", rows=16, columns=32, depth=32, warps=4, stages=2))
    )
    for form in ("all", "rows"):
        as_faked(ops._columns_op, part(x, 1), w[:16].contiguous(), name, form, BF16)
    x, w, offsets = experts(9, 64 * ranks, 1)
    as_faked(grouped._row_op, part(x, 1), part(w, 2), offsets, name)
    as_faked(
        grouped._column_gradient_op, x[:, :32].contiguous(), w[:, :32, :48].contiguous(), offsets, name, 2
    )


@check
def nothing_of_an_earlier_product_is_left_behind() -> None:
    """Ranks run apart by design; each next product reuses all words and buffers."""
    for turn in range(4):
        time.sleep(0.02 * ((turn + dist.get_rank()) % 3))
        row_products(((CHAINS[0], GATHERED[1], CHAINS[2], CHAINS[1])[turn],), (2 * dist.get_world_size(),))


@check
def the_count_of_launches_may_wrap() -> None:
    room = buffers.room_of(name_of(group()))
    dist.barrier()
    room.state[0] = 2**31 - 2
    # words that are ahead of the count by less than half its range would be taken for the future
    room.memory.view(room.rank, torch.int32, 0, protocol.WORDS).fill_(2**31 - 2)
    dist.barrier()
    row_products((CHAINS[0], GATHERED[1], CHAINS[1]), (2 * dist.get_world_size(),))
    assert int(room.state[0]) < 0


@check
def nothing_is_written_into_a_peer_that_has_not_finished() -> None:
    """Ranks that wait for room give up, one after the other; the group starts again afterwards."""
    room, rank = buffers.room_of(name_of(group())), dist.get_rank()
    x, w = operands(4, 48, 64 * dist.get_world_size(), 3)
    for one in (CHAINS[0], CHAINS[2]):
        chosen(one)
        room.inbox(rank).fill_(7.0)
        dist.barrier()
        if rank == 0:
            patience = room.patience
            object.__setattr__(room, "patience", 2000)
            room.memory.view(rank, torch.int32, 0, protocol.MOST_RANKS).sub_(1)
            ops.row_product(part(x, 1), part(w, 1), group())
            lost = None
            try:
                ops.check()
            except buffers.PeerLostError as error:
                lost = error
            assert lost is not None, "a rank that wrote without room went unnoticed"
            assert lost.what == "room for its results", lost
            object.__setattr__(room, "patience", patience)
        dist.barrier()
        assert bool((room.inbox(rank) == 7.0).all()), "written into without room"
        start_again()
    row_products(CHAINS[:1], (4,))


@check
def a_peer_that_never_comes_is_named() -> None:
    """The last check of a process: afterwards the group is lost."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x, w = operands(4, 48, 64 * ranks, 3)
    chosen(CHAINS[0])
    if rank == ranks - 1:
        ops.check()
        return
    room = buffers.room_of(name_of(group()))
    object.__setattr__(room, "patience", 2000)
    got = ops.row_product(part(x, 1), part(w, 1), group())
    assert bool(got.isnan().all()), "what never came must not look like a result"
    for again in (ops.check, partial(ops.row_product, part(x, 1), part(w, 1), group())):
        lost = None
        try:
            again()
        except buffers.PeerLostError as error:
            lost = error
        assert lost is not None, "a lost peer must be reported"
        assert lost.peer == ranks - 1, lost
        assert f"rank {rank} of group" in str(lost), lost


def work(rank: int, ranks: int, folder: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    setattr(gather, "product", product)  # noqa: B010 - the library has other bits on a CPU
    schedule._steps()
    setattr(grouped_kernel, "REFERENCE", EXPERTS_TILE)  # noqa: B010
    setattr(grouped_table, "weights", lambda: ((48, 64), (32, 48)))  # noqa: B010
    setattr(grouped_table, "tile_for", lambda *_: EXPERTS_TILE)  # noqa: B010
    transport._choices[f"{name_of(group())} cpu"] = transport.Choice(
        name="symmetric", reason="", module=symmetric
    )
    total, _, _ = buffers.sizes(ELEMENTS)
    buffers.furnish(
        name_of(group()),
        ranks,
        Files(folder, rank, ranks, total),
        ELEMENTS,
        torch.device("cpu"),
        PATIENCE,
    )
    found = {}
    for name in names:
        dist.barrier()
        try:
            CHECKS[name]()
            found[name] = ""
        except Exception:  # noqa: BLE001 - reported to the test that asked
            found[name] = traceback.format_exc(limit=6)
    (folder / f"found{rank}").write_text(json.dumps(found))
    dist.barrier()


def main() -> None:
    results: dict[str, str] = dict.fromkeys(CHECKS, "")
    chosen_names = sys.argv[1:] or list(CHECKS)
    # no thread is started yet, and what ranks would import is most of their time
    context = multiprocessing.get_context("fork")
    for ranks in (2, 3):
        names = [n for n in chosen_names if ranks == 2 or n in WITH_THREE]
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            folder = Path(name)
            total, _, _ = buffers.sizes(ELEMENTS)
            for rank in range(ranks):
                (folder / str(rank)).write_bytes(bytes(total))
            crew = [context.Process(target=work, args=(rank, ranks, folder, names)) for rank in range(ranks)]
            for one in crew:
                one.start()
            for one in crew:
                one.join(240)
            for rank, one in enumerate(crew):
                if one.exitcode != 0:
                    one.kill()
                    results = dict.fromkeys(results, f"rank {rank} of {ranks} ended with {one.exitcode}")
                    continue
                for check_name, trouble in json.loads((folder / f"found{rank}").read_text()).items():
                    results[check_name] += f"rank {rank} of {ranks}: {trouble}" if trouble else ""
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
