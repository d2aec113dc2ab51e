# SPDX-License-Identifier: Apache-2.0
"""What proves logprobs.blocks/2 on sm90: its specification on the GPU and on the CPU, float64, shards of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.degrees import degrees, wants
from isoexec.kernels.gates.forward import cases, every_batch, many, reruns_at_full_size, touched
from isoexec.kernels.gates.inputs import DTYPES, ids
from isoexec.kernels.gates.recipes import ACCURACY, gradients, trainer_forwards
from isoexec.kernels.gates.sharing import here, on_ranks
from isoexec.kernels.logprobs.hopper import naive
from isoexec.kernels.logprobs.hopper.kernel import (
    Cut,
    cut_for,
    launch_gradient,
    launch_merge,
    launch_partials,
    nodes_of,
)
from isoexec.kernels.logprobs.hopper.ops import token_logprobs, token_logprobs_and_entropy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["GATE", "faults", "inputs", "shared"]

GATE = Gate("logprobs.blocks/2", "sm90")
ROWS = 8192
SOME = 777
PLANTED = 1024  # rows in which another sum shows
FEW = 256
VOCABULARIES = (151936, 248320)  # Qwen3, Qwen3.5
WORST = 8e-6  # nats from float64: two units in the last place of the least logprob here, about -33
CUTS = (  # every kind of cut: one warp and several, nodes of one block and of many, several rows
    Cut(blocks=32, join=32, rows=1, warps=1),
    Cut(blocks=16, join=1, rows=2, warps=4),
    Cut(blocks=32, join=8, rows=1, warps=8),
    Cut(blocks=8, join=4, rows=4, warps=2),
)
WIDE = {"rows_per_program": 1, "columns_per_program": 2048, "num_warps": 4}
SHARED = 40  # rows that ranks share

Call = Callable[[slice], "Tensor"]


def _leaves(run: Run) -> int:
    return int(run.constants["vocab_leaves"])


def inputs(
    run: Run, rows: int, vocab: int, dtype: torch.dtype, *, salt: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets and temperatures; the last are 1, 0.6 and others."""
    logits = many(run, rows, vocab, salt=salt, dtype=dtype, scale=12.0)
    warmth = 0.6 + 0.2 * (torch.arange(rows, device=run.device) % 5).float()
    return logits, ids(rows, vocab, salt + 1).to(run.device), warmth


def _over(run: Run, rows: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for dtype in run.over("dtype", DTYPES):
        for vocab in run.over("vocab", VOCABULARIES):
            yield inputs(run, rows, vocab, dtype)


def _both(logits: Tensor, target: Tensor, temperature: Tensor | None, leaves: int) -> Tensor:
    """Log p beside the entropy."""
    return torch.stack(
        token_logprobs_and_entropy(logits, target, vocab_leaves=leaves, temperature=temperature), 1
    )


def _rows(logits: Tensor, target: Tensor, temperature: Tensor, leaves: int) -> Call:
    return lambda cut: _both(logits[cut], target[cut], temperature[cut], leaves)


def _plain(logits: Tensor, target: Tensor, leaves: int) -> Call:
    return lambda cut: token_logprobs(logits[cut], target[cut], vocab_leaves=leaves)


def _made(
    run: Run,
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    leaves: int,
    cut: Cut,
    **own: bool,
) -> Tensor:
    rows = len(logits)
    shape = (rows, leaves, nodes_of(logits.shape[1], leaves, cut.join))
    m, s, w = (torch.full(shape, float("nan"), device=run.device) for _ in range(3))
    log_p, entropy = (torch.full((rows,), float("nan"), device=run.device) for _ in range(2))
    stats = torch.full((rows, 3), float("nan"), device=run.device)
    launch_partials(logits, temperature, m, s, w, cut, **own)
    launch_merge(logits, target, temperature, m, s, w, log_p, entropy, stats, rows_per_program=cut.rows)
    return torch.stack([log_p, entropy], 1)


def _other_sums(run: Run) -> None:
    leaves = _leaves(run)
    logits, target, _ = inputs(run, PLANTED, VOCABULARIES[0], torch.float32, salt=3)
    want = token_logprobs(logits, target, vocab_leaves=leaves)
    run.control("half_the_leaves", token_logprobs(logits, target, vocab_leaves=leaves // 2), want)
    order = torch.arange(logits.shape[1], device=run.device).view(leaves, -1).roll(1, 1).reshape(-1)
    place = torch.argsort(order)
    run.control(
        "words_in_another_order",
        token_logprobs(logits[:, order], place[target], vocab_leaves=leaves),
        want,
    )
    cut = replace(cut_for(len(logits), logits.dtype), rows=1)
    run.control("hardware_exp", _made(run, logits, target, None, leaves, cut, hardware_exp=True)[:, 0], want)


def _exact(logits: Tensor, target: Tensor, temperature: Tensor) -> Tensor:
    every = torch.log_softmax(logits.double() / temperature.double().unsqueeze(1), -1)
    picked = every.gather(-1, target.unsqueeze(1)).squeeze(1)
    return torch.stack([picked, -(every.exp() * every).sum(-1)], 1)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    rows, leaves = run.pick(min(128, ROWS), ROWS), _leaves(run)
    for logits, target, warmth in _over(run, rows):
        run.covers(temperature=["none", "by row"])
        plain, whole = _plain(logits, target, leaves), _rows(logits, target, warmth, leaves)
        every = slice(0, rows)
        cold, warm = plain(every), whole(every)
        for at in range(0, rows, 512):  # the specification's intermediates are large
            cut = slice(at, at + 512)
            run.equal(cold[cut], naive.token_logprobs(logits[cut], target[cut], vocab_leaves=leaves))
            if at < FEW:
                wanted = naive.everything(logits[cut], target[cut], warmth[cut], vocab_leaves=leaves)
                run.equal(warm[cut], torch.stack(wanted[:2], 1))
        some = slice(0, 16)
        host = naive.everything(
            logits[some].cpu(), target[some].cpu(), warmth[some].cpu(), vocab_leaves=leaves
        )
        run.equal(warm[some].cpu(), torch.stack(host[:2], 1))
        few = slice(0, min(FEW, rows))
        run.holds((warm[few].double() - _exact(logits[few], target[few], warmth[few])).abs() < WORST)
        run.holds((warm <= 0) == torch.tensor([[True, False]], device=run.device))
        for free in CUTS:
            run.equal(_made(run, logits[few], target[few], warmth[few], leaves, free), warm[few])
        run.control("another_temperature", _both(logits, target, warmth.roll(1), leaves), warm)
    _other_sums(run)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    rows, leaves = run.pick(min(256, ROWS), ROWS), _leaves(run)
    for logits, target, warmth in _over(run, rows):
        call = _plain(logits, target, leaves)
        every_batch(run, call, call(slice(0, rows)))
        call = _rows(logits, target, warmth, leaves)
        few = slice(0, min(FEW, rows))
        whole = call(few)
        for size in (1, 2, 17, few.stop):
            run.equal(call(slice(few.stop - size, few.stop)), whole[few.stop - size :])
    _other_sums(run)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    leaves = _leaves(run)
    for logits, target, warmth in _over(run, SOME):
        packed = cases(run, _rows(logits, target, warmth, leaves), SOME)
        # an engine divides by the temperature before it asks
        divided = token_logprobs(logits.float() / warmth.unsqueeze(1), target, vocab_leaves=leaves)
        run.equal(divided, packed[:, 0])
        call = partial(_both, target=target, temperature=warmth, leaves=leaves)
        for case, out in trainer_forwards(call, logits).items():
            run.covers(case=case)
            run.equal(out, packed)
        times = (logits.float() * (1.0 / warmth).unsqueeze(1)).contiguous()
        run.control(
            "times_one_over_the_temperature", token_logprobs(times, target, vocab_leaves=leaves), divided
        )
    _other_sums(run)


def shared(
    rank: int,
    size: int,
    group: ProcessGroup | None,
    dtype: torch.dtype,
    vocab: int,
    leaves: int,
    rows: int,
    device: str,
) -> list[Tensor]:
    """Log p, entropy and the gradient of a rank's logits."""
    run = Run(constants={}, full=True, device=here(device))
    logits, target, warmth = inputs(run, rows, vocab, dtype)

    def call(z: Tensor) -> Tensor:
        return torch.stack(
            token_logprobs_and_entropy(z, target, group, vocab_leaves=leaves, temperature=warmth), 1
        )

    grad = many(run, rows, 2, salt=7, dtype=torch.float32)
    return [t.cpu() for t in gradients(call, [logits.chunk(size, 1)[rank].contiguous()], grad)]


def faults(
    rank: int, size: int, group: ProcessGroup | None, vocab: int, leaves: int, rows: int, device: str
) -> dict[str, Tensor]:
    """Log p by ranks rightly, and wrongly joined: another order of logits, other leaves, a rank's sums alone."""
    run = Run(constants={}, full=True, device=here(device))
    logits, target, _ = inputs(run, rows, vocab, torch.float32, salt=3)
    parts = [t.contiguous() for t in logits.chunk(size, 1)]
    width, call = vocab // size, partial(token_logprobs, vocab_leaves=leaves)
    moved = (target + width) % vocab
    # two ranks have no other order: a sum of two is the same either way
    turned = (
        {"ranks_in_another_order": call(parts[(rank + size - 1) % size], moved, group)} if size > 2 else {}
    )
    found = {
        "right": call(parts[rank], target, group),
        **turned,
        "other_leaves": token_logprobs(
            parts[rank], target, group, vocab_leaves=size if size < leaves else 2 * size
        ),
        "a_rank_s_sums_alone": call(parts[0], target % width, None),
    }
    return {name: t.cpu() for name, t in found.items()}


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Ranks that own whole leaves exchange a maximum and a sum a leaf, in real processes."""
    leaves = _leaves(run)
    vocab, kind = VOCABULARIES[0], run.device.type
    for dtype in run.over("dtype", DTYPES):
        whole = shared(0, 1, None, dtype, vocab, leaves, SHARED, kind)
        for size in degrees(run, "TP", [n for n in DEGREES if leaves % n == 0]):
            found = on_ranks(run, size, shared, dtype, vocab, leaves, SHARED, kind)
            for one in found:
                run.equal(one[0], whole[0])
            run.equal(torch.cat([one[1] for one in found], 1), whole[1])
    # the tree is one: each half of the leaves on its own has the nodes it has in company
    logits = inputs(run, SOME, vocab, torch.float32)[0]
    cut = cut_for(SOME, logits.dtype)
    nodes = {}
    for shards in run.over("vocab_shards", [n for n in (1, 2, 4, 8) if leaves % n == 0]):
        made = []
        for z in logits.chunk(shards, 1):
            own = leaves // shards
            m, s = (
                torch.full((SOME, own, nodes_of(z.shape[1], own, cut.join)), float("nan"), device=run.device)
                for _ in range(2)
            )
            launch_partials(z, None, m, s, None, cut)
            made.append(torch.stack([m, s]))
        nodes[shards] = torch.cat(made, 2)
        run.equal(nodes[shards], nodes[1])
    most = max((n for n in degrees(run, "TP", DEGREES) if leaves % n == 0), default=1)
    if most > 1:
        found = on_ranks(run, most, faults, vocab, leaves, PLANTED, kind)[0]
        right = found.pop("right")
        for name, wrong in found.items():
            run.control(name, wrong, right)
    _other_sums(run)


DEGREES = (1, 2, 4, 8)
wants(GATE, "partition_invariance", TP=DEGREES)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    leaves, vocab = _leaves(run), VOCABULARIES[0]
    call = partial(token_logprobs, vocab_leaves=leaves)
    for dtype in run.over("dtype", DTYPES):
        for rows in run.over("rows", (0, 1, 5)):
            logits, target, warmth = inputs(run, rows, vocab, dtype)
            got = _both(logits, target, warmth, leaves)
            if rows:  # the specification has no rows to reduce
                wanted = naive.everything(logits, target, warmth, vocab_leaves=leaves)
                run.equal(got, torch.stack(wanted[:2], 1))
            else:
                run.holds(torch.tensor([got.shape == (0, 2)]))
        for width in run.over("vocab", (leaves, 3 * leaves, (naive.BLOCK + 1) * leaves)):
            logits, target, warmth = inputs(run, 5, width, dtype)
            wanted = naive.everything(logits, target, warmth, vocab_leaves=leaves)
            run.equal(_both(logits, target, warmth, leaves), torch.stack(wanted[:2], 1))
        logits = many(run, 12, vocab, salt=5, dtype=dtype)
        logits[:2, 1 : vocab // 2] = float("-inf")
        logits[3], logits[4, 7] = float("-inf"), float("nan")
        logits[6], logits[7], logits[8, 3] = 0.0, -3e38, 2e6
        logits[9, 1:], logits[10, 5], logits[11] = -1e4, float("inf"), 1e5
        target = torch.tensor([0, vocab, -1, 4, 5, vocab - 1, 6, 7, 3, 0, 5, 11], device=run.device)
        got = call(logits, target)
        known = torch.tensor([0, 3, 4, 5, 6, 7, 8, 9, 10, 11], device=run.device)
        specified = naive.token_logprobs(logits[known], target[known], vocab_leaves=leaves)
        run.equal(got[known], specified, any_nan=True)
        lost = torch.tensor([1, 2, 3, 4, 7, 8, 10], device=run.device)
        run.holds(
            got[lost].isnan()
        )  # foreign targets, no finite logit, NaN, infinity, beyond 2^20: no answer
        sure = torch.tensor([0, 5, 6, 9, 11], device=run.device)
        run.holds(got[sure].isfinite())
        # a forbidden word has no gradient, and a row without an answer none but NaN
        grown = logits.clone().requires_grad_()
        with torch.enable_grad():
            total = call(grown, target.clamp(0, vocab - 1)).sum()
            (found,) = torch.autograd.grad(total, grown)
        run.holds(found[0, 1 : vocab // 2] == 0)
        run.holds(found[lost[2:]].isnan().all(1))
        run.holds(found[sure].isfinite())
        run.control("unmasked", call(logits[5:6], target[:1]), got[:1])
        tau = torch.ones(12, device=run.device)
        run.refuses(partial(token_logprobs, logits, target, vocab_leaves=3))
        run.refuses(partial(call, logits[:, 1:], target))
        run.refuses(partial(call, logits.half(), target))
        run.refuses(partial(call, logits, target.int()))
        run.refuses(partial(call, logits, target, temperature=tau[:5]))
        run.refuses(partial(call, logits, target, temperature=tau.double()))


@GATE.check("rerun_determinism")
def _rerun(run: Run) -> None:
    leaves = _leaves(run)
    for logits, target, _ in _over(run, ROWS):
        first = reruns_at_full_size(run, partial(_plain(logits, target, leaves), slice(0, ROWS)))
        run.control("the_last_bit_of_one_in_seven", touched(first), first)


@GATE.check("backward")
def _backward(run: Run) -> None:
    """The gradient is its specification's, row by row; cuts change no bit; it is float64's to the accuracy of the dtype."""
    leaves, rows = _leaves(run), run.pick(min(40, SOME), SOME)
    for logits, target, warmth in _over(run, rows):
        for tempered in (None, warmth):
            run.covers(temperature="none" if tempered is None else "by row")
            call = partial(_both, target=target, temperature=tempered, leaves=leaves)
            grad = many(run, rows, 2, salt=7, dtype=torch.float32)
            _, found = gradients(call, [logits], grad)
            few = slice(0, min(64, rows))
            heat = None if tempered is None else tempered[few]
            stats = naive.everything(logits[few], target[few], heat, vocab_leaves=leaves)[1:]
            want = naive.gradient(grad[few, 0], grad[few, 1], logits[few], target[few], heat, stats)
            run.equal(found[few], want)
            alone = gradients(
                partial(token_logprobs, target=target[few], vocab_leaves=leaves, temperature=heat),
                [logits[few]],
                grad[few, 0].contiguous(),
            )[1]
            one = naive.gradient(grad[few, 0], None, logits[few], target[few], heat, stats)
            run.equal(alone, one)
            for size in run.over("rows", [n for n in (1, 7, 33) if n < rows]):
                cut = slice(rows - size, rows)
                own = None if tempered is None else tempered[cut]
                part = partial(_both, target=target[cut], temperature=own, leaves=leaves)
                run.equal(gradients(part, [logits[cut]], grad[cut])[1], found[cut])
            _close(run, found[few], logits[few], target[few], heat, grad[few])
            run.control("the_last_bit_of_one_in_seven", touched(found), found)
        packed = torch.stack([stats[1], stats[2], stats[3]], 1).contiguous()
        out = torch.full_like(logits[few], float("nan"))
        free = {**WIDE, "columns_per_program": 512, "num_warps": 1}
        launch_gradient(
            grad[few, 0].contiguous(), None, logits[few], target[few], heat, None, packed, out, **free
        )
        run.equal(out, one)
        run.control("gradient_without_the_entropy", one, want)
        other = naive.gradient(grad[few, 0], None, logits[few], target[few].roll(1), heat, stats)
        run.control("another_word_s_gradient", other, one)


def _close(
    run: Run, found: Tensor, logits: Tensor, target: Tensor, heat: Tensor | None, grad: Tensor
) -> None:
    z = logits.double().requires_grad_()
    with torch.enable_grad():
        tempered = torch.ones(len(z), device=z.device) if heat is None else heat
        (want,) = torch.autograd.grad(_exact(z, target, tempered), z, grad.double())
    # of the greatest entry, as in recipes, and p's own error: e^x is within 2.3e-7, its exponent within 1e-6 at x = 20
    bound = ACCURACY[logits.dtype] * want.abs().max() + 4e-6 * want.abs()
    run.holds((found.double() - want).abs() <= bound)
    run.holds((found != 0).any().view(1))
