# SPDX-License-Identifier: Apache-2.0
"""One process a GPU of `handoff.py`: bits of every schedule, then its time, in turns that all ranks take together."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
from handoff_cases import (  # type: ignore[import-not-found]  # beside this script
    CASES,
    FORMS,
    ROWS,
    Case,
    candidates,
    cut,
    label,
    predicted,
)
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from isoexec.kernels.groups import name_of
from isoexec.kernels.hopper.timing import copies_for
from isoexec.kernels.linear.hopper import cublaslt, symmetric
from isoexec.kernels.linear.hopper.handoff import buffers, gather, moves, ops
from isoexec.kernels.linear.hopper.handoff.kernel import Cut, call_of, chain_kernel
from isoexec.kernels.linear.hopper.handoff.schedule import Schedule, choose, fitted
from isoexec.kernels.linear.hopper.kernel import reference

__all__ = ["LOG", "OUT", "work"]

BF16 = torch.bfloat16
OUT = Path(os.environ.get("OUT", "."))
LOG = OUT / "handoff.jsonl"
ELEMENTS = 1 << 27  # of the room in which candidates are tried
PATIENCE = 3.0  # seconds: a candidate that hangs costs little
FIRST_PATIENCE = 60.0  # while small kernels are compiled
START = time.monotonic()


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def say(*words: object) -> None:
    if dist.get_rank() == 0:
        print(f"[{time.monotonic() - START:5.0f} s]", *words, flush=True)


def note(**facts: Any) -> None:
    """A line of the log; the parent watches that it grows."""
    if dist.get_rank() == 0:
        with LOG.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def agreed(value: float, op: Any = None) -> float:
    held = torch.tensor(float(value), device="cuda", dtype=torch.float64)
    dist.all_reduce(held, op=op or dist.ReduceOp.MAX)
    return float(held)


class _Alone:
    """A memory for compiling: the same bytes stand for every rank's."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self._bytes = torch.zeros(buffers.sizes(1024)[0], dtype=torch.uint8, device="cuda")
        self.bases = [self._bytes.data_ptr()] * ranks

    def view(self, _rank: int, dtype: torch.dtype, offset: int, count: int) -> Tensor:
        return self._bytes[offset : offset + count * dtype.itemsize].view(dtype)


def build(job: tuple[int, int, int, Cut, bool, int, bool]) -> str:
    """Compile one kernel into Triton's cache; returns what went wrong. (rank, ranks, device, cut, each, laps, turned)"""
    rank, ranks, device, one, each, laps, turned = job
    torch.cuda.set_device(device)
    try:
        room = buffers.furnish("", ranks, _Alone(rank, ranks), 1024, torch.device("cuda", device), PATIENCE)
        k = 16384 * laps
        x = torch.empty(16, k, dtype=BF16, device="cuda")
        w = torch.empty(*((k, 256) if turned else (256, k)), dtype=BF16, device="cuda")
        out = torch.empty(16, 256, dtype=BF16, device="cuda")
        sizes: dict[str, Any] = {
            "per": 16,
            "stride": 16,
            "each": each,
            "parts": [k // laps] * laps,
            "turned": turned,
        }
        grid, arguments, options = call_of(x, w, out, room, one, **sizes)
        chain_kernel.warmup(*arguments, grid=grid, **options)
    except Exception as error:  # noqa: BLE001 - a cut that does not build is left out, and said
        return repr(error)[-300:]
    return ""


def schedules(case: Case, M: int, form: Any, shipped: bool) -> list[Schedule]:
    """What is tried: candidates, or what the checked-in table chooses in a room of the size that a group gets."""
    if not shipped:
        made: list[Schedule] = candidates(case, M)
        return made
    ranks = dist.get_world_size()
    return [choose(M, case.N, case.K, ranks, form, case.product, symmetric.ELEMENTS)]


def build_all(cases: list[Case], skipped: set[str], shipped: bool) -> set[str]:
    """Compile what is going to be tried, several at once; returns the labels that failed on any rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    jobs = {}
    for case in cases:
        for M in ROWS:
            for form in FORMS:
                for one in schedules(case, M, form, shipped):
                    if one.cut is not None and label(one) not in skipped:
                        depth = fitted(one.cut, case.K // ranks // case.laps)
                        fit = replace(one.cut, depth=depth)
                        key = (rank, ranks, rank, fit, form == "all", case.laps, case.product == "gradient")
                        jobs[key] = label(one)
    with ProcessPoolExecutor(10, mp_context=multiprocessing.get_context("spawn")) as pool:
        troubles = dict(zip(jobs, pool.map(build, jobs), strict=True))
    failed = {jobs[job]: trouble for job, trouble in troubles.items() if trouble}
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, failed)
    for other, found in enumerate(every):
        for name, trouble in found.items():
            say("does not build on rank", other, name, trouble)
            note(left_out=name, why=trouble)
    return {name for found in every for name in found}


def differing(a: Tensor, b: Tensor) -> int:
    return int((a.view(torch.int16) != b.contiguous().view(torch.int16)).sum())


def replayed(call: Callable[[int], Any], copies: int, turns: int) -> float:
    """Median us of one call in graph replays, the slowest rank's."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(0)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            call(i)
    spans = []
    for turn in range(turns + 2):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(100_000)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        buffers.check()
        if turn > 1:
            spans.append(begin.elapsed_time(end) * 1e3 / copies)
    return agreed(sorted(spans)[len(spans) // 2])


@dataclass(kw_only=True)
class Setting:
    """Operands of a case at M rows, this rank's shares in several copies, and the result of one GPU."""

    case: Case
    M: int
    xs: list[Tensor]
    ws: list[Tensor]
    want: Tensor
    want_other: Tensor  # what adding the ranks' parts gives


def setting(case: Case, M: int) -> Setting:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator("cuda").manual_seed(M + case.N + case.K)
    x = torch.randn(M, case.K, device="cuda", generator=generator).bfloat16()
    w = (torch.randn(case.N, case.K, device="cuda", generator=generator) / case.K**0.5).bfloat16()
    want = reference(x, w)
    share = case.K // ranks
    order = torch.arange(case.K, device="cuda").view(case.laps, ranks, -1)
    mine = order[:, rank].reshape(-1)
    other = order[:, 1 - rank if ranks == 2 else (rank + 1) % ranks].reshape(-1)
    own_x = x[:, mine].contiguous()
    parts = reference(own_x, w[:, mine].contiguous(), torch.float32)
    parts = parts + reference(x[:, other].contiguous(), w[:, other].contiguous(), torch.float32)
    copies = min(copies_for(2 * case.N * share), 16) if M <= 1024 else 2
    if case.product == "columns":
        first = w.chunk(ranks, 0)[rank].contiguous()
    else:
        first = w[:, mine].t().contiguous() if case.product == "gradient" else w[:, mine].contiguous()
    ws = [first, *(first.clone() for _ in range(copies - 1))]
    return Setting(case=case, M=M, xs=[own_x], ws=ws, want=want, want_other=parts.bfloat16())


def native(s: Setting, form: str) -> Callable[[int], Any]:
    ranks = dist.get_world_size()
    w_of = (lambda i: s.ws[i].t()) if s.case.product == "gradient" else (lambda i: s.ws[i])
    scattered = torch.empty(max(1, s.M // ranks), s.case.N, dtype=BF16, device="cuda")
    whole = [torch.randn(s.case.N, s.case.K // ranks, device="cuda").bfloat16() for _ in s.ws[:2]]

    def call(i: int) -> None:
        w = whole[i % 2] if s.case.product == "columns" else w_of(i)
        y = F.linear(s.xs[0], w)
        if form == "all":
            dist.all_reduce(y)
        else:
            dist.reduce_scatter_tensor(scattered, y)

    return call


def ours(s: Setting, form: str, one: Schedule, out: Tensor) -> Callable[[int], None]:
    room = buffers.room_of(name_of(dist.group.WORLD))
    each = form == "all"

    def call(i: int) -> None:
        if s.case.product == "columns":
            gather.by_columns(s.xs[0], s.ws[i], out, room, each=each, tile=one.tile)
        else:
            turned = s.case.product == "gradient"
            ops.run(s.xs[0], s.ws[i], out, room, one, each=each, parts=s.case.parts(s.xs[0]), turned=turned)

    return call


def tried(s: Setting, form: str, one: Schedule) -> dict[str, Any]:
    """Bits first, then time, then bits again after the replays."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    each = form == "all"
    rows = s.M if each else s.M // ranks
    want = s.want if each else s.want[rank * rows : (rank + 1) * rows]
    out = torch.full((rows, s.case.N), float("nan"), dtype=BF16, device="cuda")
    call = ours(s, form, one, out)
    found: dict[str, Any] = {}
    try:
        call(0)
        torch.cuda.synchronize()
        buffers.check()
        trouble = ""
    except Exception as error:  # noqa: BLE001 - left out, and said
        trouble = repr(error)[:300]
    if agreed(bool(trouble)):
        buffers.reset(world())
        return {"trouble": trouble or "on another rank"}
    found["differ"] = int(agreed(differing(out, want), dist.ReduceOp.SUM))
    if found["differ"]:
        return found
    out.fill_(float("nan"))
    try:
        found["us"] = replayed(call, len(s.ws), 7 if s.M > 1024 else 9)
    except Exception as error:  # noqa: BLE001 - left out, and said
        trouble = repr(error)[:300]
    if agreed(bool(trouble)):
        buffers.reset(world())
        return {"trouble": trouble or "on another rank"}
    found["differ_after"] = int(agreed(differing(out, want), dist.ReduceOp.SUM))
    return found


def link_rates() -> dict[str, float]:
    """GB/s to a peer by the copy engine and by a kernel, both ways at once, 64 MB contiguous and in rows of 4 KB."""
    room = buffers.room_of(name_of(dist.group.WORLD))
    found = {}
    src = torch.empty(16384, 2048, dtype=BF16, device="cuda").normal_()
    box = room.inbox((room.rank + 1) % room.ranks, BF16)
    for mover in ("engine", "kernel"):
        for name, dst in (
            ("whole", box[: src.numel()].view(src.shape)),
            ("rows", box[: 2 * src.numel()].view(16384, 4096)[:, :2048]),
        ):

            def call(i: int, dst: Tensor = dst, mover: Any = mover) -> None:
                moves.move(dst, src, mover, torch.cuda.current_stream().cuda_stream)

            try:
                found[f"{mover} {name}"] = round(src.numel() * 2e-3 / replayed(call, 4, 5), 1)
            except Exception as error:  # noqa: BLE001 - said
                say("link rate", mover, name, repr(error)[:200])
    return found


def first_calls() -> None:
    """Compile what is not a candidate's own, then let a rank wait no longer than a candidate may cost."""
    room = buffers.room_of(name_of(world()))
    x, w = (torch.randn(n, 256, device="cuda").bfloat16() for n in (64, 512))
    for each in (True, False):
        out = torch.empty(64 if each else 64 // room.ranks, 512, dtype=BF16, device="cuda")
        one = Schedule(kind="rows", mover="kernel")
        ops.run(x, w, out, room, one, each=each, parts=[256], turned=False)
        whole = torch.randn(512 // room.ranks, 256 * room.ranks, device="cuda").bfloat16()
        gather.by_columns(x, whole, out, room, each=each, tile=None)
    torch.cuda.synchronize()
    buffers.check()
    dist.barrier()
    object.__setattr__(room, "seconds", PATIENCE)
    object.__setattr__(room, "patience", int(PATIENCE * 1e9))


def lost_peer() -> dict[str, Any]:
    """Rank 0 calls, the others do not: it must end, name the peer and give NaN."""
    room = buffers.room_of(name_of(dist.group.WORLD))
    K = 1024
    x, w = (torch.randn(n, K, device="cuda").bfloat16() for n in (64, 512))
    begin, text, nan = time.monotonic(), "", 0.0
    if dist.get_rank() == 0:
        out = torch.zeros(64, 512, dtype=BF16, device="cuda")
        ops.run(x, w, out, room, cut(64, 64, 128, 4, 4, swapped=True), each=True, parts=[K], turned=False)
        torch.cuda.synchronize()
        nan = float(out.isnan().float().mean())
        try:
            buffers.check()
        except buffers.PeerLostError as error:
            text = str(error)
    seconds = time.monotonic() - begin
    dist.barrier()
    buffers.reset(world())
    return {"seconds": round(seconds, 2), "share_nan": nan, "error": text}


def work(arguments: argparse.Namespace) -> int:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    dist.all_reduce(torch.ones(1, device="cuda"))
    cublaslt.claim()
    ended = START + arguments.seconds
    lines = [json.loads(line) for line in LOG.read_text().splitlines()] if LOG.exists() else []
    skipped = {line["left_out"] for line in lines if "left_out" in line}
    done = {(d["case"], d["product"], d["rows"], d["form"], d["schedule"]) for d in lines if "schedule" in d}
    elements = symmetric.ELEMENTS if arguments.shipped else ELEMENTS
    ops.setup(world(), elements, patience=FIRST_PATIENCE)
    wanted = [case for case in CASES if arguments.only in f"{case.name} {case.product}"]
    note(
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        triton=triton.__version__,
        nccl=str(torch.cuda.nccl.version()),
        gpus=dist.get_world_size(),
        date=time.strftime("%Y-%m-%d", time.gmtime()),
    )
    if not any("link" in line for line in lines):
        note(trying="link rates")
        rates = link_rates()
        say("GB/s to a peer, each way:", rates)
        note(link=rates)
    note(trying="build")
    skipped |= build_all(wanted, skipped, arguments.shipped)
    note(trying="first calls")
    first_calls()
    say("built")
    for M in ROWS:
        for case in wanted:
            few = M <= 256 and M != 64
            if (M > 1024 and case.product == "columns") or (few and case.product == "gradient"):
                continue
            if agreed(time.monotonic() > ended):
                say("out of time at", M, case.name)
                break
            s = setting(case, M)
            control = int(agreed(differing(s.want, s.want_other), dist.ReduceOp.SUM))
            for form in FORMS:
                if form == "rows" and M % dist.get_world_size():
                    continue
                us = replayed(native(s, form), len(s.ws), 9)
                head = {
                    "case": case.name,
                    "product": case.product,
                    "N": case.N,
                    "K": case.K,
                    "rows": M,
                    "form": form,
                }
                expected = round(predicted(case, M, form, dist.get_world_size(), None), 1)
                head |= {"native": round(us, 2), "native_predicted": expected, "control": control}
                for one in schedules(case, M, form, arguments.shipped):
                    name = label(one)
                    if name in skipped or (case.name, case.product, M, form, name) in done:
                        continue
                    if agreed(time.monotonic() > ended):
                        break
                    note(trying=name)
                    found = tried(s, form, one)
                    expected = round(predicted(case, M, form, dist.get_world_size(), one), 1)
                    note(**head, schedule=name, predicted=expected, made=asdict(one), **found)
                    us_own = found.get("us")
                    say(
                        case.name,
                        case.product,
                        M,
                        form,
                        name,
                        f"predicted {expected}",
                        f"{us_own:.1f} us, {us_own / us:.2f}x of {us:.1f}" if us_own else found,
                        f"DIFFERS {found}" if found.get("differ") or found.get("differ_after") else "",
                    )
            del s
            torch.cuda.empty_cache()
    note(trying="lost peer")
    answer = lost_peer()
    say("lost peer:", answer)
    note(lost=answer)
    note(finished=True)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return 0
