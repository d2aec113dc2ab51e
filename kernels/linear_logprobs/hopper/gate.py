# SPDX-License-Identifier: Apache-2.0
"""What proves linear_logprobs.mma_blocks/1 on sm90: the reference chain followed by the logprobs op, for every provider."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.degrees import degrees, wants
from isoexec.kernels.gates.forward import cases, every_batch, many, reruns_at_full_size, touched
from isoexec.kernels.gates.inputs import ids
from isoexec.kernels.gates.recipes import gradients, trainer_forwards
from isoexec.kernels.gates.sharing import here, on_ranks
from isoexec.kernels.groups import gather_rows, name_of
from isoexec.kernels.linear.hopper import chains
from isoexec.kernels.linear.hopper.gate import claimed
from isoexec.kernels.linear.hopper.kernel import reference
from isoexec.kernels.linear_logprobs.hopper.kernel import Tile, launch_picked
from isoexec.kernels.linear_logprobs.hopper.ops import linear_logprobs, linear_logprobs_and_entropy, nodes
from isoexec.kernels.linear_logprobs.hopper.plan import CHUNKS, FEW_ROWS, MIDDLE, TILES, Chunks
from isoexec.kernels.logprobs.hopper.ops import joined, token_logprobs, token_logprobs_and_entropy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["GATE", "operands", "shared"]

GATE = Gate("linear_logprobs.mma_blocks/1", "sm90")
ROWS = 4096
SOME = 777
FEW = 100
PLANTED = 1024  # rows in which another sum shows
HEADS = ((151936, 4096), (248320, 2048))  # Qwen3-8B, Qwen3.5-35B-A3B
QUICK_HEADS = ((151936, 1024),)
SHARED_HEAD = (6144, 1024)  # what ranks share: a listed weight whose leaves are no power of two of blocks
SHARED = 40  # rows that ranks share
DEGREES = (1, 2, 4, 8)
WHOLE = Chunks(rows=512, leaves=1024)
PLANS: tuple[Tile | Chunks, ...] = (
    TILES,
    MIDDLE,
    FEW_ROWS,
    CHUNKS,
    WHOLE,
    Tile(rows=128, columns=256, depth=64, warps=8, stages=3),
    Tile(rows=64, columns=256, depth=64, warps=4, stages=3, programs=2, group=3),
    Tile(rows=16, columns=128, depth=128, warps=4, stages=4, programs=2),
    Tile(rows=128, columns=128, depth=64, warps=4, stages=3, programs=2),
)

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def _leaves(run: Run) -> int:
    return int(run.constants["vocab_leaves"])


def heads(run: Run) -> Sequence[tuple[int, int]]:
    """The weights [V, K] of a run."""
    return run.pick(QUICK_HEADS, (*QUICK_HEADS, *HEADS))


def operands(run: Run, rows: int, V: int, K: int) -> Inputs:
    """Hidden states [rows, K], a head [V, K] whose logits are about as spread as a model's, targets, temperatures."""
    run.covers(dtype=torch.bfloat16, weight=f"{V}x{K}")
    x, w = many(run, rows, K, salt=1), many(run, V, K, salt=2, scale=3.0 * (9 / K) ** 0.5)
    warmth = 0.6 + 0.2 * (torch.arange(rows, device=run.device) % 5).float()
    return x, w, ids(rows, V, 3).to(run.device), warmth


def _over(run: Run, rows: int) -> Iterator[Inputs]:
    for V, K in heads(run):
        yield operands(run, rows, V, K)


def _both(x: Tensor, w: Tensor, target: Tensor, temperature: Tensor | None, leaves: int) -> Tensor:
    return torch.stack(
        linear_logprobs_and_entropy(x, w, target, vocab_leaves=leaves, temperature=temperature), 1
    )


def _rows(x: Tensor, w: Tensor, target: Tensor, leaves: int) -> Callable[[slice], Tensor]:
    return lambda cut: linear_logprobs(x[cut], w, target[cut], vocab_leaves=leaves)


def _apart(x: Tensor, w: Tensor, target: Tensor, temperature: Tensor | None, leaves: int) -> Tensor:
    """One tile's chain to fp32 logits, then the other op."""
    z = reference(x, w, torch.float32)
    return torch.stack(token_logprobs_and_entropy(z, target, vocab_leaves=leaves, temperature=temperature), 1)


def _planned(
    x: Tensor, w: Tensor, target: Tensor, temperature: Tensor | None, leaves: int, plan: Tile | Chunks
) -> Tensor:
    m, s, u = nodes(x, w, temperature, leaves, entropy=True, plan=plan)
    picked = torch.full((len(x),), float("nan"), device=x.device)
    launch_picked(x, w, target, temperature, picked)
    log_p, entropy, _ = joined(picked, target, m, s, u, len(w), "")
    return torch.stack([log_p, entropy], 1)


def _planted(run: Run) -> None:
    leaves = _leaves(run)
    x, w, target, _ = operands(run, PLANTED, *SHARED_HEAD)
    with claimed():
        want = linear_logprobs(x, w, target, vocab_leaves=leaves)
        run.control("half_the_leaves", linear_logprobs(x, w, target, vocab_leaves=leaves // 2), want)
    z = reference(x, w, torch.bfloat16)
    run.control("logits_rounded_to_bf16", token_logprobs(z, target, vocab_leaves=leaves), want)
    z = reference(x.flip(1), w.flip(1), torch.float32)
    run.control("k_from_the_other_end", token_logprobs(z, target, vocab_leaves=leaves), want)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    leaves, rows = _leaves(run), run.pick(SOME, ROWS)
    with claimed():
        for x, w, target, warmth in _over(run, rows):
            run.covers(temperature=["none", "by row"])
            want = torch.cat(
                [
                    _apart(x[at : at + 512], w, target[at : at + 512], warmth[at : at + 512], leaves)
                    for at in range(0, rows, 512)
                ]
            )
            for size in run.over("rows", [n for n in (1, 2, 16, 65, 257, SOME, ROWS) if n <= rows]):
                run.equal(_both(x[:size], w, target[:size], warmth[:size], leaves), want[:size])
            few = slice(0, min(FEW, rows))
            cold = _apart(x[few], w, target[few], None, leaves)
            run.equal(linear_logprobs(x[few], w, target[few], vocab_leaves=leaves), cold[:, 0])
            for plan in PLANS:
                run.covers(provider=type(plan).__name__.lower())
                run.equal(_planned(x[few], w, target[few], warmth[few], leaves, plan), want[few])
            z = (x[few].double() @ w.double().t()) / warmth[few].double().unsqueeze(1)
            exact = torch.log_softmax(z, -1).gather(1, target[few].unsqueeze(1)).squeeze(1)
            run.holds((want[few, 0].double() - exact).abs() < TOO_FAR)
            run.control(
                "another_temperature", _both(x[few], w, target[few], warmth[few] + 0.1, leaves), want[few]
            )
    _planted(run)


TOO_FAR = 2e-4  # nats from float64: K products summed in fp32 along one chain, over a temperature of 0.6


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    leaves, rows = _leaves(run), run.pick(min(256, ROWS), ROWS)
    with claimed():
        for x, w, target, _ in _over(run, rows):
            call = _rows(x, w, target, leaves)
            every_batch(run, call, call(slice(0, rows)))
    _planted(run)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    leaves = _leaves(run)
    with claimed():
        for x, w, target, warmth in _over(run, SOME):
            packed = cases(run, _rows(x, w, target, leaves), SOME)
            few = slice(0, min(FEW, SOME))
            for case, out in trainer_forwards(
                partial(linear_logprobs, target=target[few], vocab_leaves=leaves), x[few], w
            ).items():
                run.covers(case=case)
                run.equal(out, packed[few])
            # an engine that keeps logits, and divides them by the temperature before it asks
            z = reference(x[few], w, torch.float32) / warmth[few].unsqueeze(1)
            engine = token_logprobs(z, target[few], vocab_leaves=leaves)
            run.equal(_both(x[few], w, target[few], warmth[few], leaves)[:, 0], engine)
    _planted(run)


def shared(
    rank: int,
    size: int,
    group: ProcessGroup | None,
    head: tuple[int, int],
    leaves: int,
    rows: int,
    sp: bool,
    device: str,
) -> list[Tensor]:
    """Log p beside the entropy, the input's gradient, and that of a rank's part of the head.

    With `sp` ranks share the rows of the input: they are gathered before the head, and a rank keeps its rows of the gradient.
    """
    run = Run(constants={}, full=True, device=here(device))
    x, w, target, warmth = operands(run, rows, *head)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return torch.stack(
            linear_logprobs_and_entropy(x, w, target, group, vocab_leaves=leaves, temperature=warmth), 1
        )

    grad = many(run, rows, 2, salt=7, dtype=torch.float32)
    if sp:
        x = gather_rows(x.chunk(size)[rank], name_of(group))
    with claimed():
        out, dx, dw = gradients(call, [x, w.chunk(size)[rank].contiguous()], grad)
    return [t.cpu() for t in (out, dx.chunk(size)[rank] if sp else dx, dw)]


def _sums_added(run: Run, shards: int) -> None:
    """The input's gradient with the shards' own sums added, where one goes on from the other's accumulator."""
    leaves = _leaves(run)
    x, w, target, _ = operands(run, SHARED, *SHARED_HEAD)
    grad = many(run, SHARED, salt=7, dtype=torch.float32)
    z = reference(x, w, torch.float32)
    d = gradients(lambda z: token_logprobs(z, target, vocab_leaves=leaves), [z], grad)[1].bfloat16()
    total = torch.zeros(x.shape, device=x.device)
    for a, b in zip(d.chunk(shards, 1), w.chunk(shards), strict=True):
        total = total + chains.reference("input", a.contiguous(), b.contiguous(), None, torch.float32)
    run.control("shards_own_sums_added", total, chains.reference("input", d, w, None, torch.float32))


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """The head's rows on several ranks, whole leaves each: log p, entropy and gradients, in real processes."""
    leaves, kind = _leaves(run), run.device.type
    with claimed():
        for x, w, target, warmth in _over(run, FEW):
            whole = nodes(x, w, warmth, leaves, entropy=False, plan=TILES)[:2]
            for shards in run.over("vocab_shards", [n for n in (1, 2, 4, 8) if leaves % n == 0]):
                made = [
                    nodes(x, part, warmth, leaves // shards, entropy=False, plan=TILES)[:2]
                    for part in w.chunk(shards)
                ]
                run.equal([torch.cat(some, 1) for some in zip(*made, strict=True)], list(whole))
            run.control(
                "another_head", nodes(x, w.roll(1, 0), None, leaves, entropy=False, plan=TILES)[1], whole[1]
            )
            del target
    one = shared(0, 1, None, SHARED_HEAD, leaves, SHARED, False, kind)
    for axis, sp in (("TP", False), ("SP", True)):
        for size in degrees(run, axis, [n for n in DEGREES if leaves % n == 0]):
            found = on_ranks(run, size, shared, SHARED_HEAD, leaves, SHARED, sp, kind)
            for mine in found:
                run.equal(mine[0], one[0])
            for got in [torch.cat([mine[1] for mine in found])] if sp else [mine[1] for mine in found]:
                run.equal(got, one[1])
            run.equal(torch.cat([mine[2] for mine in found]), one[2])
    _sums_added(run, 2)
    _planted(run)


wants(GATE, "partition_invariance", TP=DEGREES, SP=DEGREES)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    leaves = _leaves(run)
    V, K = SHARED_HEAD
    x, w, target, warmth = operands(run, 18, V, K)
    call = partial(linear_logprobs, vocab_leaves=leaves)
    with claimed():
        run.holds(torch.tensor([call(x[:0], w, target[:0]).shape == (0,)]))
        empty = partial(call, target=target[:0])
        none = gradients(empty, [x[:0], w], torch.zeros(0, device=run.device))[1:]
        run.holds(torch.tensor([bool((g == 0).all()) for g in none]))
        odd = x.clone()
        odd[3, 5], odd[7], odd[8] = float("nan"), 0.0, 1e30
        lost = target.clone()
        lost[0], lost[1] = V, -1
        for plan in PLANS:
            got = _planned(odd, w, lost, None, leaves, plan)
            run.equal(
                got,
                _apart(odd, w, lost.clamp(0, V - 1), None, leaves).where(_known(lost, V), torch.nan),
                any_nan=True,
            )
            run.holds(got[torch.tensor([0, 1, 3, 8], device=x.device), 0].isnan())
            run.holds(got[[2, 7, 9, 17]].isfinite())
        whole = call(x, w, target)
        run.equal(call(odd, w, target)[9:], whole[9:])
        run.control("the_odd_rows", call(odd, w, target)[:9], whole[:9])
        for wrong in (
            partial(call, x.float(), w.float(), target),
            partial(call, x[:, : K // 2], w, target),
            partial(call, x, w[: V - 8], target),
            partial(call, x, w, target.int()),
            partial(call, x, w, target[:5]),
            partial(call, x, w, target, temperature=warmth.double()),
            partial(linear_logprobs, x, w, target, vocab_leaves=3),
        ):
            run.refuses(wrong)


def _known(target: Tensor, V: int) -> Tensor:
    # the entropy has no target, but it stands beside log p of one
    inside = (target >= 0) & (target < V)
    return torch.stack([inside, torch.ones_like(inside)], 1)


@GATE.check("rerun_determinism")
def _rerun(run: Run) -> None:
    leaves = _leaves(run)
    with claimed():
        for x, w, target, _ in _over(run, ROWS):
            for plan in (TILES, CHUNKS):
                call = partial(_planned, x, w, target, None, leaves, plan)
                first = reruns_at_full_size(run, call)
            run.control("the_last_bit_of_one_in_seven", touched(first), first)
            grad = many(run, ROWS, salt=7, dtype=torch.float32)
            op = partial(linear_logprobs, target=target, vocab_leaves=leaves)
            found = gradients(op, [x, w], grad)
            for _ in range(run.pick(1, 3)):
                run.equal(gradients(op, [x, w], grad), found)


@GATE.check("backward")
def _backward(run: Run) -> None:
    """The gradients are those of the ops one after the other, by one tile's chains; padding changes none."""
    leaves, rows = _leaves(run), run.pick(min(FEW, SOME), SOME)
    with claimed():
        for x, w, target, warmth in _over(run, rows):
            for tempered in (None, warmth):
                run.covers(temperature="none" if tempered is None else "by row")
                op = partial(_both, target=target, temperature=tempered, leaves=leaves)
                grad = many(run, rows, 2, salt=7, dtype=torch.float32)
                out, dx, dw = gradients(op, [x, w], grad)
                z = reference(x, w, torch.float32)

                def after(z: Tensor, target: Tensor = target, heat: Tensor | None = tempered) -> Tensor:
                    return torch.stack(
                        token_logprobs_and_entropy(z, target, vocab_leaves=leaves, temperature=heat), 1
                    )

                apart, d = gradients(after, [z], grad)
                d = d.bfloat16()
                run.equal(out, apart)
                run.equal(dx, chains.reference("input", d, w))
                run.equal(dw, chains.reference("weight", d, x))
            del z
            for size in run.over("rows", [n for n in (1, 7, 33) if n < rows]):
                cut = slice(rows - size, rows)
                part = partial(_both, w=w, target=target[cut], temperature=warmth[cut], leaves=leaves)
                run.equal(gradients(part, [x[cut]], grad[cut])[1], dx[cut])
            longer = [torch.cat([t, torch.zeros_like(t[:9])]) for t in (x, grad)]
            heat, ends = torch.cat([warmth, warmth[:9]]), torch.cat([target, target[:9]])
            padded = partial(_both, target=ends, temperature=heat, leaves=leaves)
            run.equal(gradients(padded, [longer[0], w], longer[1])[2], dw)
            run.control("d_in_another_order", chains.reference("weight", d.flip(0), x.flip(0)), dw)
            halves = [
                chains.reference("input", a.contiguous(), b.contiguous(), None, torch.float32)
                for a, b in zip(d.chunk(2, 1), w.chunk(2), strict=True)
            ]
            run.control(
                "the_vocabulary_in_two_sums",
                halves[0] + halves[1],
                chains.reference("input", d, w, None, torch.float32),
            )
            run.control("the_last_bit_of_one_in_seven", [touched(dx), touched(dw)], [dx, dw])
            _close(run, x, w, target, grad)


def _close(run: Run, x: Tensor, w: Tensor, target: Tensor, grad: Tensor) -> None:
    """Against float64, for a few rows: d logits is rounded to bf16, and so is each result."""
    few = slice(0, 16)
    a, b = (t.double().requires_grad_() for t in (x[few], w))
    with torch.enable_grad():
        every = torch.log_softmax(a @ b.t(), -1)
        value = torch.stack(
            [every.gather(1, target[few, None]).squeeze(1), -(every.exp() * every).sum(-1)], 1
        )
        want = torch.autograd.grad(value, [a, b], grad[few].double())
    op = partial(_both, target=target[few], temperature=None, leaves=_leaves(run))
    found = gradients(op, [x[few], w], grad[few])[1:]
    for got, exact in zip(found, want, strict=True):
        run.holds((got.double() - exact).abs() <= 2.0**-7 * exact.abs().max())
        run.holds((got != 0).any().view(1))
