# SPDX-License-Identifier: Apache-2.0
"""What proves logprobs.blocks/1 on sm90: its specification on the GPU and on the CPU, float64, shards of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.forward import cases, every_batch, many, reruns_at_full_size, touched
from isoexec.kernels.gates.inputs import DTYPES, ids
from isoexec.kernels.logprobs.hopper import naive
from isoexec.kernels.logprobs.hopper.kernel import blocks_of, launch_merge, launch_partials
from isoexec.kernels.logprobs.hopper.ops import merge, partials, token_logprobs

if TYPE_CHECKING:
    from torch import Tensor

GATE = Gate("logprobs.blocks/1", "sm90")
ROWS = 8192
SOME = 777
PLANTED = 1024  # rows in which another sum shows
VOCABULARIES = (151936, 248320)  # Qwen3, Qwen3.5
WORST = 8e-6  # nats from float64: two units in the last place of the least logprob here, about -33

Call = Callable[[slice], "Tensor"]


def _leaves(run: Run) -> int:
    return int(run.constants["vocab_leaves"])


def _over(run: Run, rows: int) -> Iterator[tuple[Call, Tensor, Tensor]]:
    """The op by rows, logits and targets."""
    for dtype in run.over("dtype", DTYPES):
        for vocab in run.over("vocab", VOCABULARIES):
            logits = many(run, rows, vocab, salt=1, dtype=dtype, scale=12.0)
            target = ids(rows, vocab, 2).to(run.device)
            yield _rows(logits, target, _leaves(run)), logits, target


def _rows(logits: Tensor, target: Tensor, leaves: int) -> Call:
    return lambda cut: token_logprobs(logits[cut], target[cut], vocab_leaves=leaves)


def _tiled(
    run: Run,
    logits: Tensor,
    target: Tensor,
    *,
    leaves: int,
    block: int,
    rows: int = 1,
    warps: int = 4,
    **own: bool,
) -> Tensor:
    shape = (len(logits), leaves, blocks_of(logits.shape[1], leaves, block))
    m, s = (torch.full(shape, float("nan"), device=run.device) for _ in range(2))
    out = torch.full((len(logits),), float("nan"), device=run.device)
    launch_partials(logits, m, s, block=block, rows_per_program=rows, num_warps=warps, **own)
    launch_merge(logits, target, m, s, out, rows_per_program=rows, num_warps=warps)
    return out


def _other_sums(run: Run) -> None:
    rows, vocab, leaves = PLANTED, VOCABULARIES[0], _leaves(run)
    logits, target = many(run, rows, vocab, salt=3, dtype=torch.float32, scale=12.0), ids(rows, vocab, 4)
    target = target.to(run.device)
    want = token_logprobs(logits, target, vocab_leaves=leaves)
    block = naive.BLOCK
    run.control("half_the_leaves", _tiled(run, logits, target, leaves=leaves // 2, block=block), want)
    run.control("half_the_block", _tiled(run, logits, target, leaves=leaves, block=block // 2), want)
    run.control(
        "hardware_exp", _tiled(run, logits, target, leaves=leaves, block=block, hardware_exp=True), want
    )


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    rows, leaves = run.pick(min(128, ROWS), ROWS), _leaves(run)
    for call, logits, target in _over(run, rows):
        whole = call(slice(0, rows))
        for at in range(0, rows, 1024):  # the specification's intermediates are large
            cut = slice(at, at + 1024)
            run.equal(whole[cut], naive.token_logprobs(logits[cut], target[cut], vocab_leaves=leaves))
        few = slice(0, 256)
        run.equal(
            whole[:16].cpu(), naive.token_logprobs(logits[:16].cpu(), target[:16].cpu(), vocab_leaves=leaves)
        )
        exact = torch.log_softmax(logits[few].double(), -1).gather(-1, target[few, None])[:, 0]
        run.holds((whole[few].double() - exact).abs() < WORST)
        for per, warps in ((1, 8), (2, 4)):
            again = _tiled(run, logits, target, leaves=leaves, block=naive.BLOCK, rows=per, warps=warps)
            run.equal(again, whole)
    _other_sums(run)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    rows = run.pick(min(256, ROWS), ROWS)
    for call, _, _ in _over(run, rows):
        every_batch(run, call, call(slice(0, rows)))
    _other_sums(run)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    for call, _, _ in _over(run, SOME):
        cases(run, call, SOME)
    _other_sums(run)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Ranks that own whole leaves exchange a maximum and a sum a block; here they take turns in one process."""
    leaves = _leaves(run)
    for call, logits, target in _over(run, SOME):
        whole = call(slice(0, SOME))
        picked = logits.gather(1, target.unsqueeze(1)).squeeze(1).float()
        for shards in run.over("vocab_shards", [n for n in (1, 2, 4, 8) if leaves % n == 0]):
            owned = [partials(z.contiguous(), leaves=leaves // shards) for z in logits.chunk(shards, 1)]
            m, s = (torch.cat(parts, 1) for parts in zip(*owned, strict=True))
            run.equal(merge(picked, m, s), whole)
            if shards > 1:
                run.control("a_rank_s_sums_lost", merge(picked, m, s.roll(1, 1)), whole)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    leaves, vocab = _leaves(run), VOCABULARIES[0]
    for dtype in run.over("dtype", DTYPES):
        for rows in run.over("rows", (0, 1, 5)):
            logits, target = (
                many(run, rows, vocab, salt=1, dtype=dtype, scale=12.0),
                ids(rows, vocab, 2).to(run.device),
            )
            got = token_logprobs(logits, target, vocab_leaves=leaves)
            if rows:  # the specification has no rows to reduce
                run.equal(got, naive.token_logprobs(logits, target, vocab_leaves=leaves))
            else:
                run.holds(torch.tensor([got.shape == (0,)]))
        for width in run.over("vocab", (leaves, 3 * leaves, (naive.BLOCK + 1) * leaves)):
            logits, target = (
                many(run, 5, width, salt=1, dtype=dtype, scale=12.0),
                ids(5, width, 2).to(run.device),
            )
            got = token_logprobs(logits, target, vocab_leaves=leaves)
            run.equal(got, naive.token_logprobs(logits, target, vocab_leaves=leaves))
        logits = many(run, 6, vocab, salt=5, dtype=dtype)
        logits[:2, 1000:90000] = float("-inf")
        logits[3], logits[4, 77] = float("-inf"), float("nan")
        target = torch.tensor([1, vocab, -1, 4, 5, 6], device=run.device)
        got = token_logprobs(logits, target, vocab_leaves=leaves)
        run.equal(got[:1], naive.token_logprobs(logits[:1], target[:1], vocab_leaves=leaves))
        run.holds(got[1:5].isnan())  # foreign targets, a row without any token, a NaN logit: no answer
        run.holds(got[5:].isfinite())
        run.control("unmasked", token_logprobs(logits[5:], target[:1], vocab_leaves=leaves), got[:1])
        run.refuses(partial(token_logprobs, logits, target, vocab_leaves=3))
        run.refuses(partial(token_logprobs, logits[:, 1:], target, vocab_leaves=leaves))
        run.refuses(partial(token_logprobs, logits.half(), target, vocab_leaves=leaves))
        run.refuses(partial(token_logprobs, logits, target.int(), vocab_leaves=leaves))


@GATE.check("rerun_determinism")
def _rerun(run: Run) -> None:
    for call, _, _ in _over(run, ROWS):
        first = reruns_at_full_size(run, partial(call, slice(0, ROWS)))
        run.control("the_last_bit_of_one_in_seven", touched(first), first)
