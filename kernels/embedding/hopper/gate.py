# SPDX-License-Identifier: Apache-2.0
"""What proves embedding.lookup/1 on sm90: the CPU's specification and gradient, whole and by shards of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from isoexec.kernels.embedding import naive
from isoexec.kernels.embedding.hopper.kernel import launch_gradient
from isoexec.kernels.embedding.hopper.ops import embedding, shard_lookup, vocab_parallel_embedding
from isoexec.kernels.gates import Gate, Run, rows
from isoexec.kernels.gates.degrees import degrees, wants
from isoexec.kernels.gates.forward import many
from isoexec.kernels.gates.inputs import DTYPES, fill, ids, odd_values
from isoexec.kernels.gates.recipes import gradients
from isoexec.kernels.gates.rows import Rows
from isoexec.kernels.gates.sharing import here, on_ranks

GATE = Gate("embedding.lookup/1", "sm90")
TABLES = ((18992, 1024), (4096, 4096))  # an eighth of Qwen3-0.6B's; Qwen3-8B's width
DEGREES = (1, 2, 4, 8)
TERMS = 7  # rows that many tokens share, so that the order of their terms shows


def _table(run: Run, vocab: int, width: int, dtype: torch.dtype) -> Tensor:
    w = many(run, vocab, width, salt=1, dtype=dtype)
    w[:, 0] = -0.0  # the sign that a sum over shards would lose
    return w


def _over(run: Run, count: int) -> Iterator[Rows]:
    for dtype in run.over("dtype", DTYPES):
        for vocab, width in TABLES:
            run.covers(vocab=vocab, width=width)
            w = _table(run, vocab, width, dtype)

            def by_spec(g: Tensor, which: Tensor, w: Tensor) -> list[Tensor]:
                return [naive.embedding_backward(g, which, len(w)).to(w.dtype)]

            for which, gradient in ((ids(count, vocab, 2), None), (ids(count, TERMS, 3), by_spec)):
                yield Rows(
                    op=embedding,
                    spec=naive.embedding,
                    by_row=(which.to(run.device),),
                    shared=(w,),
                    spec_gradients=gradient,
                    exact=F.embedding,
                    on_host=True,
                )


def _planted(run: Run) -> None:
    w, which = _table(run, 64, 100, torch.float32), ids(300, 64, 2).to(run.device)
    run.control("stock_lookup", F.embedding(which, w), embedding(which, w))
    run.control("another_token", embedding((which + 1) % 64, w), embedding(which, w))


rows.hang(GATE, _over, _planted)


@GATE.check("partition_invariance")
def _partition(run: Run) -> None:
    """Rows of the table on several ranks: one term is a row and the others zeros; a rank's gradient is that of its rows."""
    for dtype in run.over("dtype", DTYPES):
        w, which = _table(run, 64, 96, dtype), ids(rows.SOME, 64, 2).to(run.device)
        grad = many(run, rows.SOME, 96, salt=5, dtype=dtype)
        out, dw = gradients(lambda w: embedding(which, w), [w], grad)
        for shards in run.over("vocab_shards", DEGREES):
            terms, parts = [], []
            for i, part in enumerate(w.chunk(shards)):
                first = i * len(part)
                terms.append(shard_lookup(which, part, vocab_start=first, vocab=64))
                own = torch.zeros_like(part)
                launch_gradient(grad, which, own, first=first)
                parts.append(own)
            run.equal(torch.stack(terms).sum(0), out)
            run.equal(torch.cat(parts), dw)
        run.control("a_shard_left_out", terms[0], out)
        whole = on_ranks(run, 1, ranks, dtype, False, run.device.type)[0]
        for axis, sp in (("TP", False), ("SP", True)):
            for size in degrees(run, axis, DEGREES):
                found = on_ranks(run, size, ranks, dtype, sp, run.device.type)
                for got in [torch.cat([p[0] for p in found])] if sp else [p[0] for p in found]:
                    run.equal(got, whole[0])
                run.equal(torch.cat([p[1] for p in found]), whole[1])


wants(GATE, "partition_invariance", TP=DEGREES, SP=DEGREES)


def ranks(
    rank: int, size: int, group: ProcessGroup | None, dtype: torch.dtype, sp: bool, device: str
) -> list[Tensor]:
    """Output and gradient of this process's part of the vocabulary; with `sp`, of its block of tokens."""
    w = fill(512, 64, salt=1, dtype=dtype).chunk(size)[rank].to(here(device))
    w[:, 0] = -0.0
    which = ids(48, 512, 2).view(16, 3).to(here(device))
    grad = fill(16, 3, 64, salt=5, dtype=dtype).to(here(device))

    def call(w: Tensor) -> Tensor:
        return vocab_parallel_embedding(
            which, w, vocab_start=rank * 512 // size, group=group, sequence_parallel=sp
        )

    own = grad.chunk(size)[rank] if sp and group else grad
    return [t.cpu() for t in gradients(call, [w], own.contiguous())]


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    for dtype in run.over("dtype", DTYPES):
        for vocab, width in ((1, 1), (1, 5), (3, 1), (7, 3)):
            for count in run.over("rows", (0, 1, 2)):
                w, which = _table(run, vocab, width, dtype), ids(count, vocab, 1).to(run.device)
                run.equal(embedding(which, w), naive.embedding(which, w))
                run.equal(
                    vocab_parallel_embedding(which, w, vocab_start=0, group=None), naive.embedding(which, w)
                )
                grad = many(run, count, width, salt=3, dtype=dtype)
                dw = gradients(lambda w: embedding(which, w), [w], grad)[1]
                run.equal(dw.cpu(), naive.embedding_backward(grad.cpu(), which.cpu(), vocab).to(dtype))
        w = odd_values(dtype).unsqueeze(1).expand(-1, 3).contiguous().to(run.device)
        which = ids(40, len(w), 3).to(run.device)
        run.equal(embedding(which, w), naive.embedding(which, w), any_nan=True)
        run.equal(embedding(which.int(), w), naive.embedding(which, w), any_nan=True)
        twice = torch.tensor([1, 1], device=run.device)
        run.control("zero_keeps_its_sign", w[1:2].expand(2, 3), embedding(twice, w))
        outside = torch.tensor([len(w), -1], device=run.device)
        run.holds(embedding(outside, w).isnan())  # no rank holds it: no answer
        run.holds(shard_lookup(outside, w, vocab_start=0, vocab=len(w)).isnan())
        other = shard_lookup(outside[:1], w, vocab_start=0, vocab=2 * len(w))
        run.equal(other, torch.zeros_like(other))  # another rank holds it
        run.refuses(partial(embedding, which, w.half()))
        run.refuses(partial(embedding, which.float(), w))
        run.refuses(partial(embedding, which, w[0]))
