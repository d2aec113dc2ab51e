# SPDX-License-Identifier: Apache-2.0
"""The gate of embedding.lookup/1 on CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from isoexec.kernels.embedding import embedding, naive, vocab_parallel_embedding
from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.gloo import DEGREES, on_ranks
from isoexec.kernels.gates.inputs import DTYPES, fill, ids, nudged, odd_values, shuffled, wide
from isoexec.kernels.gates.recipes import close, company, gradients, reruns, trainer_forwards

GATE = Gate("embedding.lookup/1", "cpu")


def _table(vocab: int, width: int, dtype: torch.dtype) -> Tensor:
    w = fill(vocab, width, salt=1, dtype=dtype)
    w[:, 0] = -0.0  # the sign that a sum over shards would lose
    return w


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for width in run.over("width", run.pick((1, 17, 100, 1024), (1, 2, 3, 17, 63, 100, 1024, 4096))):
            w = _table(512, width, dtype)
            for rows in run.over("rows", (1, 7, 300)):
                which = ids(rows, 512, 2)
                run.equal(embedding(which, w), naive.embedding(which, w))
        run.control("stock_lookup", F.embedding(which, w), naive.embedding(which, w))
        run.control("one_ulp_of_the_table", embedding(which, nudged(w)), naive.embedding(which, w))


@GATE.check("case_parity")
def _case_parity(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        w, which = _table(512, 128, dtype), ids(60, 512, 2)
        prefill = vocab_parallel_embedding(which, w, vocab_start=0, group=None)
        run.covers(case=["engine_prefill", "engine_decode"])
        decode = [vocab_parallel_embedding(one, w, vocab_start=0, group=None) for one in which.split(1)]
        run.equal(torch.cat(decode), prefill)
        for case, out in trainer_forwards(lambda w: embedding(which.view(20, 3), w), w).items():
            run.covers(case=case)
            run.equal(out.view(60, 128), prefill)
        run.control("stock_lookup_in_one_case", F.embedding(which, w), prefill)


@GATE.check("batch_invariance")
def _batch_invariance(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        w, which = _table(512, 100, dtype), ids(run.pick(65, 300), 512, 2)
        whole = embedding(which, w)
        company(run, lambda rows: embedding(which[rows], w), len(which), whole)
        run.control("stock_lookup_for_few_rows", F.embedding(which[:4], w), whole[:4])


def shards(
    rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype, sp: bool, shift: int
) -> list[Tensor]:
    """Output and gradient of this rank's part of the vocabulary; `shift` gives it another rank's."""
    w, which = _table(512, 64, dtype), ids(72, 512, 2).view(24, 3)
    grad = fill(24, 3, 64, salt=5, dtype=dtype)
    part = w.chunk(size, 0)[(rank + shift) % size]

    def call(part: Tensor) -> Tensor:
        return vocab_parallel_embedding(
            which, part, vocab_start=rank * 512 // size, group=group, sequence_parallel=sp
        )

    return gradients(call, [part], grad.chunk(size, 0)[rank] if sp else grad)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        out, dw = on_ranks(1, shards, dtype, False, 0)[0]
        for axis, sp in (("TP", False), ("SP", True)):
            for size in run.over(axis, DEGREES):
                outs, dws = zip(*on_ranks(size, shards, dtype, sp, 0), strict=True)
                for got in [torch.cat(outs)] if sp else outs:
                    run.equal(got, out)
                run.equal(torch.cat(dws), dw)
    permuted = on_ranks(2, shards, dtype, False, 1)
    run.control("ranks_in_another_order", permuted[0][0], out)
    w, which = _table(512, 64, dtype), ids(72, 512, 2).view(24, 3)
    first = vocab_parallel_embedding(which.clamp(max=255), w[:256], vocab_start=0, group=None)
    run.control("a_shard_left_out", first, out)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    with run.poisoned():
        for dtype in run.over("dtype", DTYPES):
            for vocab, width in ((1, 1), (1, 5), (3, 1), (7, 3)):
                for rows in run.over("rows", (0, 1, 2)):
                    w, which = _table(vocab, width, dtype), ids(rows, vocab, 1)
                    run.equal(embedding(which, w), naive.embedding(which, w))
                    run.equal(
                        vocab_parallel_embedding(which, w, vocab_start=0, group=None),
                        naive.embedding(which, w),
                    )
            w = odd_values(dtype).unsqueeze(1).expand(-1, 3).contiguous()
            which = ids(40, len(w), 3)
            run.equal(embedding(which, w), naive.embedding(which, w), any_nan=True)
            run.control("zero_keeps_its_sign", w[1:2].expand(2, 3), embedding(torch.tensor([1, 1]), w))
    run.refuses(lambda: embedding(torch.tensor([1, 4]), torch.zeros(4, 8)))
    run.refuses(lambda: embedding(torch.tensor([0]), torch.zeros(4, 8, dtype=torch.float16)))


@GATE.check("rerun_determinism")
def _reruns(run: Run) -> None:
    vocab, width = run.pick((4096, 1024), (37984, 4096))  # a quarter of Qwen3-8B's table: one of four ranks'
    for dtype in run.over("dtype", DTYPES):
        w, which = wide(vocab, width, salt=1, dtype=dtype), ids(512, vocab, 2)
        run.covers(vocab=vocab, width=width, rows=512)
        (first,) = reruns(run, lambda: embedding(which, w), 4)
        run.control("another_token", embedding(which.roll(1), w), first)
    which, grad = ids(512, 7, 2), fill(512, width, salt=5)
    small = w[:7].clone()
    want = reruns(run, lambda: gradients(lambda w: embedding(which, w), [small], grad), 2)
    order = shuffled(512)  # as atomics would add
    run.control(
        "tokens_in_another_order",
        gradients(lambda w: embedding(which[order], w), [small], grad[order])[1],
        want[1],
    )


@GATE.check("backward")
def _backward(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for rows in run.over("rows", (1, 7, 100, 300)):
            w, which, grad = _table(16, 32, dtype), ids(rows, 5, 2), fill(rows, 32, salt=5, dtype=dtype)
            got = gradients(lambda w: embedding(which, w), [w], grad)
            run.equal(got[1], naive.embedding_backward(grad, which, 16).to(dtype))
        close(run, lambda w: embedding(which, w), lambda w: F.embedding(which, w), [w], grad)
    order = shuffled(300)
    run.control("tokens_in_another_order", naive.embedding_backward(grad[order], which[order], 16), got[1])
