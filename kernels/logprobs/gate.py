# SPDX-License-Identifier: Apache-2.0
"""The gate of logprobs.leaves/1 on CPU."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.gloo import DEGREES, on_ranks
from isoexec.kernels.gates.inputs import DTYPES, fill, ids, nudged, shuffled, wide
from isoexec.kernels.gates.recipes import close, company, gradients, reruns, trainer_forwards
from isoexec.kernels.groups import all_reduce, gather_rows, name_of
from isoexec.kernels.logprobs import entropy, log_softmax, naive, temper, token_logprobs
from isoexec.kernels.sums import halving_tree, pair_tree

GATE = Gate("logprobs.leaves/1", "cpu")


def _leaves(run: Run) -> int:
    return int(run.constants["vocab_leaves"])


def _inputs(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return fill(rows, vocab, salt=14, dtype=dtype, scale=8.0), ids(rows, vocab, 15)


def _pick(rows: Tensor, target: Tensor) -> Tensor:
    return rows.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def _running(logits: Tensor, leaves: int) -> Tensor:
    """Log-softmax with the leaves added one after another."""
    z = logits.float()
    z = z - z.amax(-1, keepdim=True)
    total = torch.zeros(len(z))
    for leaf in torch.exp(z).chunk(4 * leaves, -1):
        total = total + leaf.sum(-1)
    return z - torch.log(total).unsqueeze(-1)


def _spread(z: Tensor) -> Tensor:
    every = torch.log_softmax(z, -1)
    return -(every.exp() * every).sum(-1)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    leaves = _leaves(run)
    for dtype in run.over("dtype", DTYPES):
        for vocab in run.over(
            "vocab", run.pick((leaves, 17 * leaves, 512), (leaves, 3 * leaves, 17 * leaves, 512, 18992))
        ):
            for rows in run.over("rows", run.pick((1, 17, 63), (1, 2, 3, 17, 63, 100))):
                logits, target = _inputs(rows, vocab, dtype)
                whole = log_softmax(logits, vocab_leaves=leaves)
                run.equal(whole, naive.log_softmax(logits, vocab_leaves=leaves))
                run.equal(token_logprobs(logits, target, vocab_leaves=leaves), _pick(whole, target))
    logits, target = _inputs(400, 27 * leaves)
    want = naive.log_softmax(logits, vocab_leaves=leaves)
    run.control("half_the_leaves_and_no_tree", _running(logits, leaves), want)
    run.control("one_leaf", log_softmax(logits, vocab_leaves=1), want)
    run.control("stock_log_softmax", torch.log_softmax(logits, -1), want)
    run.control("one_ulp_of_a_logit", log_softmax(nudged(logits), vocab_leaves=leaves), want)


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    leaves = _leaves(run)
    for dtype in run.over("dtype", DTYPES):
        logits, target = _inputs(300, 64 * leaves, dtype)
        rows = log_softmax(logits, vocab_leaves=leaves)  # an engine keeps whole rows
        prefill = _pick(rows, target)
        run.covers(case=["engine_prefill", "engine_decode"])
        run.equal(torch.cat([log_softmax(row, vocab_leaves=leaves) for row in logits.split(1)]), rows)

        def trainer(z: Tensor, target: Tensor = target) -> Tensor:
            return token_logprobs(z, target.view(60, 5), vocab_leaves=leaves)

        for case, out in trainer_forwards(trainer, logits.view(60, 5, -1)).items():
            run.covers(case=case)
            run.equal(out.view(300), prefill)
        stock = _pick(torch.log_softmax(logits.float(), -1), target)
        run.control("stock_log_softmax_in_one_case", stock, prefill)
    odd, target = _inputs(400, 27 * leaves)
    one = token_logprobs(odd, target, vocab_leaves=1)
    run.control("other_leaves_in_one_case", one, token_logprobs(odd, target, vocab_leaves=leaves))


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    leaves = _leaves(run)
    for dtype in run.over("dtype", DTYPES):
        for vocab in run.over("vocab", run.pick((64 * leaves,), (27 * leaves, 64 * leaves, 18992))):
            logits, target = _inputs(run.pick(65, 300), vocab, dtype)
            whole = log_softmax(logits, vocab_leaves=leaves)
            company(run, lambda at: log_softmax(logits[at], vocab_leaves=leaves), len(logits), whole)
            token = _pick(whole, target)
            for size in (1, 2, 17, 64):
                run.equal(token_logprobs(logits[:size], target[:size], vocab_leaves=leaves), token[:size])
        few = slice(0, 32)
        run.control("stock_log_softmax_for_few_rows", torch.log_softmax(logits[few].float(), -1), whole[few])


def shards(rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype, leaves: int) -> list[Tensor]:
    """Token logprobs and their gradient with this rank's part of the vocabulary."""
    logits, target = _inputs(200, 48 * leaves, dtype)
    call = partial(token_logprobs, target=target.view(40, 5), group=group, vocab_leaves=leaves)
    own = logits.view(40, 5, -1).chunk(size, -1)[rank]
    return gradients(call, [own], fill(40, 5, salt=16))


def spreads(
    rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype, leaves: int
) -> list[Tensor]:
    """Entropy at a temperature and its gradient with this rank's part of the vocabulary."""
    logits, _ = _inputs(200, 48 * leaves, dtype)
    heat = 0.5 + fill(200, salt=17).abs()
    own = logits.chunk(size, -1)[rank].contiguous()
    return gradients(
        lambda z: entropy(temper(z, heat), group, vocab_leaves=leaves), [own], fill(200, salt=16)
    )


def faults(rank: int, size: int, group: ProcessGroup | None, leaves: int) -> dict[str, Tensor]:
    """Sums of exponentials joined wrongly over ranks: added up as they come, in another order, over uneven leaves."""
    logits, _ = _inputs(2000, 48 * leaves)
    own = logits.chunk(size, -1)[rank]
    top = logits.amax(-1)
    e = torch.exp(own - top.unsqueeze(-1))
    name = name_of(group)
    tree = pair_tree([halving_tree(leaf) for leaf in e.chunk(leaves // size, -1)])
    every = gather_rows(tree.unsqueeze(0), name)
    thirds = halving_tree(e.view(len(e), 3, -1).transpose(1, 2), 1).sum(-1)
    return {
        "right": pair_tree(every.unbind(0)).log(),
        "a_rank_left_out": (pair_tree(every.unbind(0)) - every[-1]).log(),
        "plain_sums_added": all_reduce(e.cumsum(-1)[:, -1].contiguous(), name).log(),
        "uneven_leaves": all_reduce(thirds, name).log(),
        **({"ranks_in_another_order": pair_tree(every[[0, 2, 1, 3]].unbind(0)).log()} if size == 4 else {}),
    }


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    leaves = _leaves(run)
    for dtype in run.over("dtype", DTYPES):
        out, dz = on_ranks(1, shards, dtype, leaves)[0]
        for size in run.over("TP", [s for s in DEGREES if s <= leaves]):
            outs, dzs = zip(*on_ranks(size, shards, dtype, leaves), strict=True)
            for got in outs:
                run.equal(got, out)
            run.equal(torch.cat(dzs, -1), dz)
        out, dz = on_ranks(1, spreads, dtype, leaves)[0]
        for size in [s for s in DEGREES[1:] if s <= leaves]:
            outs, dzs = zip(*on_ranks(size, spreads, dtype, leaves), strict=True)
            for got in outs:
                run.equal(got, out)
            run.equal(torch.cat(dzs, -1), dz)
    if leaves < 4:
        return
    found = on_ranks(4, faults, leaves)[0]
    right = found.pop("right")
    for name, wrong in found.items():
        run.control(name, wrong, right)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    leaves = _leaves(run)
    with run.poisoned():
        for dtype in run.over("dtype", DTYPES):
            for rows in run.over("rows", (0, 1, 2)):
                for vocab in (leaves, 3 * leaves, 129 * leaves):
                    logits, target = _inputs(rows, vocab, dtype)
                    run.equal(
                        log_softmax(logits, vocab_leaves=leaves),
                        naive.log_softmax(logits, vocab_leaves=leaves),
                    )
                    run.equal(
                        token_logprobs(logits, target, vocab_leaves=leaves),
                        naive.token_logprobs(logits, target, vocab_leaves=leaves),
                    )
            logits, _ = _inputs(9, 8 * leaves, dtype)
            logits[0, 1:] = -math.inf  # all but one word forbidden
            logits[1, ::2] = -math.inf
            logits[2] = -math.inf
            logits[3, 5] = math.nan
            logits[4, 5] = math.inf
            logits[5] = -0.0
            logits[6] = 3e38
            logits[7, 0] = 3e38
            want = naive.log_softmax(logits, vocab_leaves=leaves)
            run.equal(log_softmax(logits, vocab_leaves=leaves), want, any_nan=True)
            run.holds(want[2:5].isnan().all(1))
            run.control(
                "forbidden_words_allowed", log_softmax(logits.clamp(min=-5.0), vocab_leaves=leaves), want
            )
            # a trainer's entry gives what the engine's gives, for every target and every odd row
            for word in range(0, 8 * leaves, 3):
                where = torch.full((9,), word)
                run.equal(token_logprobs(logits, where, vocab_leaves=leaves), want[:, word], any_nan=True)
    run.refuses(lambda: log_softmax(torch.zeros(2, leaves * 4 + 1), vocab_leaves=leaves))
    run.refuses(lambda: log_softmax(torch.zeros(2, 96), vocab_leaves=6))
    run.refuses(
        lambda: token_logprobs(torch.zeros(2, leaves), torch.tensor([0, leaves]), vocab_leaves=leaves)
    )
    run.refuses(
        lambda: token_logprobs(torch.zeros(2, leaves), torch.zeros(3, dtype=torch.int64), vocab_leaves=leaves)
    )


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    leaves, rows = _leaves(run), run.pick(4, 32)
    for dtype in run.over("dtype", DTYPES):
        for vocab in run.over("vocab", run.pick((151936,), (151936, 151680))):  # Qwen3, MiMo
            if vocab % leaves:
                continue
            logits, target = wide(rows, vocab, salt=14, dtype=dtype, scale=8.0), ids(rows, vocab, 15)
            run.covers(rows=rows)
            reruns(run, lambda: log_softmax(logits, vocab_leaves=leaves), 3)
            call = partial(token_logprobs, target=target, vocab_leaves=leaves)
            reruns(run, lambda: gradients(call, [logits], fill(rows, salt=16)), 1)
    logits, _ = _inputs(400, 128 * leaves)  # many rows: a log shows another sum in one row of twenty
    order = shuffled(128 * leaves)  # as atomics would add
    again = log_softmax(logits[:, order], vocab_leaves=leaves)
    run.control("words_in_another_order", again, log_softmax(logits, vocab_leaves=leaves)[:, order])


@GATE.check("backward")
def _backward(run: Run) -> None:
    leaves = _leaves(run)
    for dtype in run.over("dtype", DTYPES):
        for vocab in run.over("vocab", (17 * leaves, 128 * leaves)):
            logits, target = _inputs(60, vocab, dtype)
            g = fill(60, salt=16)
            call = partial(token_logprobs, target=target, vocab_leaves=leaves)
            out, dz = gradients(call, [logits], g)
            run.equal(dz, naive.token_logprobs_backward(g, logits, target, vocab_leaves=leaves))
            for rows in run.over("rows", (1, 7, 33)):
                call_few = partial(token_logprobs, target=target[:rows], vocab_leaves=leaves)
                run.equal(gradients(call_few, [logits[:rows]], g[:rows]), [out[:rows], dz[:rows]])
            close(run, call, lambda z: _pick(torch.log_softmax(z, -1), target), [logits], g)
            spread = partial(entropy, vocab_leaves=leaves)
            _, dh = gradients(spread, [logits], g)
            run.equal(gradients(spread, [logits[:7]], g[:7])[1], dh[:7])
            close(run, spread, _spread, [logits], g)
    run.control(
        "gradient_without_the_target",
        dz - g.unsqueeze(1) * torch.zeros_like(dz).scatter_(1, target.unsqueeze(1), 1.0),
        dz,
    )
    stock = gradients(lambda z: _pick(torch.log_softmax(z, -1), target), [logits], g)
    run.control("stock_gradient", stock[1], dz)
