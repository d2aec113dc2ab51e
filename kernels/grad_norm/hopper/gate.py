# SPDX-License-Identifier: Apache-2.0
"""What proves grad_norm.exact/1 on sm90: the CPU's specification, whatever way tensors are cut, ordered and shared."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.degrees import degrees, most_ranks, wants
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import DTYPES, fill, nudged, shuffled
from isoexec.kernels.gates.sharing import here, on_ranks, subgroup
from isoexec.kernels.grad_norm import exact_sq_sum as on_cpu
from isoexec.kernels.grad_norm import naive
from isoexec.kernels.grad_norm.hopper.kernel import launch_greatest, launch_sums, programs_for
from isoexec.kernels.grad_norm.hopper.ops import exact_sq_sum

GATE = Gate("grad_norm.exact/1", "sm90")
SCALES = (1e-20, 1e-12, 1e-3, 1.0, 1e12)
CUTS = (1, 7, 64, 100, 300)  # rows of a part
DEGREES = (1, 2, 4, 8)
# what each axis does to gradients: TP, EP and ETP cut tensors, SP, DP and CP leave any share, PP gives whole layers to ranks
AXES = {
    **dict.fromkeys(("TP", "EP", "ETP"), "columns"),
    **dict.fromkeys(("SP", "DP", "CP"), "uneven"),
    "PP": "layers",
}
LARGE = (4096, 4096)  # of a gradient at full size


def _spec(run: Run, tensors: list[Tensor]) -> Tensor:
    value = naive.exact_sq_sum([t.cpu() for t in tensors])
    return torch.tensor(value, dtype=torch.float64, device=run.device)


def _fill(run: Run, *shape: int, salt: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return fill(*shape, salt=salt, dtype=dtype, scale=scale).to(run.device)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for scale in run.pick(SCALES[::2], SCALES):
            for width in run.over("width", (17, 63)):
                tensors = [
                    _fill(run, 100, width, salt=16, dtype=dtype, scale=scale),
                    _fill(run, width, salt=17, dtype=dtype, scale=1e-3),
                ]
                run.equal(exact_sq_sum(tensors), _spec(run, tensors))
                run.equal(exact_sq_sum(tensors).cpu(), on_cpu([t.cpu() for t in tensors]))
        whole = exact_sq_sum(tensors)
        for block in run.over("block", (256, 1024, 8192)):
            run.equal(_by_blocks(tensors[0], block), _by_blocks(tensors[0], 512))
        run.control("one_ulp_of_the_gradient", exact_sq_sum([nudged(tensors[0].cpu()).to(run.device)]), whole)
        plain = torch.stack([t.float().square().sum() for t in tensors]).sum()
        run.control("plain_float32_sum", plain.double(), whole)


def _by_blocks(x: Tensor, block: int) -> Tensor:
    """The greatest magnitude, and the integers' sum at a fixed scale, by programs of `block` elements."""
    count = programs_for(x.numel(), block)
    most = torch.empty(count, dtype=torch.float32, device=x.device)
    launch_greatest(x.reshape(-1), most, block=block)
    parts = torch.empty(count, dtype=torch.int64, device=x.device)
    factors = torch.tensor([2.0**10, 2.0**12], dtype=torch.float64, device=x.device)
    launch_sums(x.reshape(-1), factors, parts, block=block)
    return torch.stack([most.amax().view(torch.int32).long(), parts.sum()])


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    run.covers(case=["trainer_fwd", "trainer_recompute"])
    for dtype in run.over("dtype", DTYPES):
        tensors = [_fill(run, 100, 63, salt=16, dtype=dtype), _fill(run, 200, salt=17, dtype=dtype)]
        want = exact_sq_sum(tensors)
        # gradients as a plain backward leaves them, and as a buffer holds them flat
        flat = torch.cat([t.view(-1) for t in tensors])
        run.equal(exact_sq_sum([flat]), want)
        run.equal(exact_sq_sum(list(flat.split(999))), want)
        run.equal(exact_sq_sum(tensors[::-1]), want)
        run.control("a_tensor_left_out", exact_sq_sum(tensors[:1]), want)
        if run.device.type == "cuda":
            run.covers(graph=True)
            run.equal(_replayed(flat), want)


def _replayed(x: Tensor) -> Tensor:
    from isoexec.kernels.hopper.timing import capture

    outs: list[Tensor] = []
    graph = capture(lambda _: outs.append(exact_sq_sum([x])), 1)
    outs[-1].zero_()
    graph.replay()
    torch.cuda.synchronize()
    return outs[-1].clone()


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        x = _fill(run, 300, 63, salt=16, dtype=dtype)
        want = exact_sq_sum([x])
        for count in run.over("rows", CUTS):
            run.equal(exact_sq_sum(list(x.split(count))), want)
        run.equal(exact_sq_sum(list(x.split(100))[::-1]), want)
        run.equal(exact_sq_sum([x[shuffled(300).to(run.device)]]), want)
        run.equal(exact_sq_sum(list(x.flip(0).t().split(30))), want)
        run.control("a_part_twice", exact_sq_sum([x, x[:1]]), want)


def ranks(
    rank: int, size: int, group: ProcessGroup | None, cut: str, dtype: torch.dtype, fault: str, device: str
) -> Tensor:
    """The sum over processes that share columns, elements as they come, or layers; or columns and layers, by four in a square.

    `fault`: "replicas" counts an unsharded tensor on every rank, "axis_left_out" reduces over one axis of the square.
    """
    layers = [fill(40, 64, salt=i, dtype=dtype, scale=2.0**-i).to(here(device)) for i in range(8)]
    if size == 1:
        return exact_sq_sum(layers).cpu()
    groups = [group]
    if cut == "columns":
        own = [t.chunk(size, 1)[rank] for t in layers] + layers[: int(fault == "replicas")]
    elif cut == "uneven":
        flat = torch.cat([t.view(-1) for t in layers])
        own = [flat.tensor_split([100 + 31 * r for r in range(size - 1)])[rank]]
    elif cut == "layers":
        own = layers[rank * 8 // size : (rank + 1) * 8 // size]
    else:
        column, row = rank % 2, rank // 2
        own = [t.chunk(2, 1)[column] for t in layers[4 * row : 4 * row + 4]]
        groups = [subgroup(2 * row, 2 * row + 1), subgroup(column, column + 2)]
        groups = groups[: 1 if fault else 2]
    return exact_sq_sum(own, [one for one in groups if one is not None]).cpu()


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Integers of any shards at one scale have one sum; and real ranks, however they share the elements."""
    device = run.device.type
    for dtype in run.over("dtype", DTYPES):
        x = _fill(run, 64, 96, salt=16, dtype=dtype)
        want = _by_blocks(x, 1024)
        for shards in run.over("shards", DEGREES):
            parts = [_by_blocks(part, 1024) for part in x.chunk(shards, 1)]
            run.equal(torch.stack([torch.stack(parts)[:, 0].amax(), torch.stack(parts)[:, 1].sum()]), want)
        run.control("a_shard_left_out", _by_blocks(x[1:], 1024), want)
        whole = on_ranks(run, 1, ranks, "", dtype, "", device)[0]
        for axis, cut in AXES.items():
            for size in degrees(run, axis, DEGREES):
                for got in on_ranks(run, size, ranks, cut, dtype, "", device):
                    run.equal(got, whole)
        if most_ranks("sm90") >= 4:
            for got in on_ranks(run, 4, ranks, "square", dtype, "", device):
                run.equal(got, whole)
            for name, cut in (("replicas", "columns"), ("axis_left_out", "square")):
                run.control(name, on_ranks(run, 4, ranks, cut, dtype, name, device)[0], whole)


wants(GATE, "partition_invariance", **dict.fromkeys(AXES, DEGREES))


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    with run.poisoned():
        for dtype in run.over("dtype", DTYPES):
            zeros = [torch.zeros(n, dtype=dtype, device=run.device) for n in (5, 0)] + [
                -torch.zeros(3, dtype=dtype, device=run.device)
            ]
            run.covers(rows=[0, 1, 5])
            run.equal(exact_sq_sum(zeros), _spec(run, zeros))
            run.equal(exact_sq_sum(zeros[1:2]), _spec(run, zeros[1:2]))
            for value in (1e-45, 1e-38, 3e38, -3e38, 1.0):
                one = torch.tensor([value], dtype=dtype, device=run.device)
                run.equal(exact_sq_sum([one, *zeros]), one.double()[0].square())
            huge, tiny = (torch.tensor([v], dtype=dtype, device=run.device) for v in (3e38, 1e-45))
            run.equal(exact_sq_sum([huge, tiny]), huge.double()[0].square())
            for broken in (math.inf, -math.inf, math.nan):
                one = torch.tensor([1.0, broken], dtype=dtype, device=run.device)
                run.holds(exact_sq_sum([one]).isnan().view(1))
            run.control("nan_ignored", exact_sq_sum([one[:1]]), exact_sq_sum([one]))
            # halves between two integers: ties to even
            ties = torch.tensor([1.0, 2.0**-30, 3.0 * 2.0**-31, 2.0**-31], device=run.device).to(dtype)
            run.equal(exact_sq_sum([ties]), _spec(run, [ties]))
    run.refuses(lambda: exact_sq_sum([torch.zeros(3, dtype=torch.float16, device=run.device)]))
    run.refuses(partial(exact_sq_sum, []))


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        x = many(run, *LARGE, salt=16, dtype=dtype, scale=1e-3)
        run.covers(rows=LARGE[0], width=LARGE[1])
        first = exact_sq_sum([x])
        for _ in range(run.pick(2, 10)):
            run.equal(exact_sq_sum([x]), first)
        run.equal(exact_sq_sum([x.flip(0)]), first)  # in whatever order
        run.equal(first.cpu(), on_cpu([x.cpu()]))
        run.control("a_row_left_out", exact_sq_sum([x[1:]]), first)


@GATE.check("backward")
def _backward(run: Run) -> None:
    """The sum is of gradients, and changes none: what a backward pass left is what the optimizer finds."""
    for dtype in run.over("dtype", DTYPES):
        w = _fill(run, 63, 32, salt=1, dtype=dtype).requires_grad_()
        x = _fill(run, 40, 32, salt=2, dtype=dtype)
        with torch.enable_grad():
            torch.autograd.backward((x @ w.t()).float().square().sum())
        assert w.grad is not None
        kept = w.grad.clone()
        got = exact_sq_sum([w.grad])
        run.equal(got, _spec(run, [kept]))
        run.equal(w.grad, kept)
        run.holds(torch.tensor([not got.requires_grad, bool(got > 0)]))
        run.control("one_ulp_of_the_gradient", exact_sq_sum([nudged(kept.cpu()).to(run.device)]), got)
