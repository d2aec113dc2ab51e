# SPDX-License-Identifier: Apache-2.0
"""What proves attention.mma_window/1 on sm90: the own kernel's bits are the reference's, however rows and keys are laid out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from isoexec.kernels.gates import Gate, Run
from isoexec.kernels.gates.attentions import SHORT, Kind, batches, hang
from isoexec.kernels.gates.forward import many
from isoexec.kernels.window_attention.hopper.ops import attention, plan

if TYPE_CHECKING:
    from torch import Tensor

    from isoexec.kernels.gates.sequences import Batch

GATE = Gate("attention.mma_window/1", "sm90")
HEADS = ((32, 8, 128), (16, 2, 256), (32, 8, 64))  # query heads, KV heads, head dim
TOO_FAR = 2.0**-7  # of the norm: weights, each segment's output and the result are rounded to bf16


def _stock(batch: Batch, b: int) -> Tensor:
    """Torch's attention of one sequence in fp32, with the window as a mask."""
    at, group = batch.sequence(b), batch.q.shape[1] // batch.k.shape[1]
    q, k, v = (x[at].float().transpose(0, 1)[None] for x in (batch.q, batch.k, batch.v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    place = torch.arange(batch.lengths[b], device=q.device)
    seen = (place[None, :] <= place[:, None]) & (place[:, None] - place[None, :] < batch.window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)[0].transpose(0, 1)


def _planted(run: Run, batch: Batch, want: Tensor) -> None:
    run.control("a_window_of_one_key_less", batch.packed(window=batch.window - 1), want)
    run.control("another_segment", batch.packed(kv_segment=batch.S // 2), want)
    run.control("no_window", batch.packed(window=0, provider="triton"), want)


KIND = Kind(heads=HEADS, trained=len(HEADS), providers=("triton",), decodings={}, others=_planted)
hang(GATE, KIND)


@GATE.check("conformance")
def _conformance(run: Run) -> None:
    for batch, want, _ in batches(run, KIND):
        run.holds(want.isfinite())
        run.equal(want, batch.reference()[0])
        sinks = many(run, batch.q.shape[1], salt=5, dtype=torch.float32, scale=4.0)
        with_sinks, _ = batch.reference(sinks)
        run.equal(batch.packed(sinks), with_sinks)
        run.control("no_sinks", want, with_sinks)
        at, exact = batch.sequence(3), _stock(batch, 3)
        run.holds(((want[at].float() - exact).norm() < TOO_FAR * exact.norm()).view(1))
        run.control("stock_attention", exact.bfloat16(), want[at])
        _planted(run, batch, want)


@GATE.check("degenerate_shapes")
def _degenerate(run: Run) -> None:
    for batch, want, _ in batches(run, KIND):
        q, k, S, group = batch.q, batch.k, batch.S, batch.q.shape[1] // batch.k.shape[1]
        got, index = batch.rows([(4, 0, 1), (1, 3, 3), (0, 0, 1)])  # one key, no row, a first token
        run.equal(got, want[index])
        run.equal(got[:1], batch.v[batch.starts[4] :].repeat_interleave(group, 1)[:1])
        run.control("the_next_key", batch.v[1:2].repeat_interleave(group, 1), got[1:])
        every = batch.v[batch.sequence(1)].repeat_interleave(group, 1)
        alone = batch.alone(1)
        run.equal(alone.packed(window=1), every)  # each row sees itself alone
        for n in run.over("keys", [n for n in (1, 2, 63, 65, 129, 161) if n <= SHORT]):
            short = batch.of(q[:n], k[:n], batch.v[:n], [n])
            run.equal(short.packed(), short.reference()[0])
            # a window that holds every key is none: the walk is the same
            run.equal(short.packed(window=2 * S), short.reference(window=2 * S)[0])
        step = batch.plan(requests=1, tokens=4, most_rows=4, most_keys=9)
        for rows, keys in ((q[:4].float(), k), (q[:4, :, :32], k[..., :32]), (q[:5], k)):
            run.refuses(partial(attention, rows, keys, keys, batch.position[:4], step, scale=1.0))
        sizes: dict[str, Any] = {"requests": 1, "tokens": 4, "most_rows": 4, "kv_segment": S}
        run.refuses(partial(plan, **sizes, most_keys=9, window=0, device=run.device))
        run.refuses(partial(plan, **sizes, most_keys=9, window=4, page=S - 1, device=run.device))
        run.refuses(partial(plan, **sizes, most_keys=99 * S, window=98 * S, device=run.device))
