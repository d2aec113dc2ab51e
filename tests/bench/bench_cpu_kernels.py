# SPDX-License-Identifier: Apache-2.0
"""Times every CPU kernel against stock torch at small-model shapes: `python tests/bench/bench_cpu_kernels.py`.

Hidden 128, feed-forward 256, 4 heads and 2 KV heads of 32, vocabulary 512, bf16. 64 rows stand for a decode step,
4096 for a trainer's batch (32 sequences of 128). Times are processor time, the best of several
repeats, in microseconds, one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from isoexec.kernels.attention import PagedPlan, attention_paged, attention_varlen
from isoexec.kernels.canaries import fill
from isoexec.kernels.embedding import embedding
from isoexec.kernels.linear import chain, column_linear, pack_weight, row_linear
from isoexec.kernels.logprobs import log_softmax, token_logprobs
from isoexec.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_grad
from isoexec.kernels.rope import rope
from isoexec.kernels.silu_mul import silu_mul

DTYPE = torch.bfloat16
HIDDEN, FFN, HEADS, KV, DIM, VOCAB, CONTEXT = 128, 256, 4, 2, 32, 512, 128
Call = Callable[[], Any]


def best(call: Call, seconds: float) -> float:
    """Microseconds of processor time of the fastest repeat."""
    call()
    start = time.process_time()
    call()
    once = time.process_time() - start
    count = max(1, min(1000, int(seconds / 10 / max(once, 1e-7))))
    fastest = float("inf")
    for _ in range(10):
        start = time.process_time()
        for _ in range(count):
            call()
        fastest = min(fastest, (time.process_time() - start) / count)
    return fastest * 1e6


def _linear(x: Tensor, packed: Tensor) -> Tensor:
    return chain(x, packed).to(DTYPE)


def _stock_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def forward(rows: int) -> list[tuple[str, Call, Call]]:
    """(name, ours, stock) of every row-wise op."""
    x, residual = fill(rows, HIDDEN, salt=1, dtype=DTYPE), fill(rows, HIDDEN, salt=2, dtype=DTYPE)
    gamma = fill(HIDDEN, salt=3, dtype=DTYPE)
    out: list[tuple[str, Call, Call]] = []
    for name, K, N in (("qkv", HIDDEN, 256), ("gate_up", HIDDEN, 2 * FFN), ("down", FFN, HIDDEN)):
        a, w = fill(rows, K, salt=4, dtype=DTYPE), fill(N, K, salt=5, dtype=DTYPE)
        packed = pack_weight(w, k_block=64)
        out.append((f"linear {name}", partial(_linear, a, packed), partial(F.linear, a, w)))
    head = fill(VOCAB, HIDDEN, salt=6, dtype=DTYPE)
    packed_head = pack_weight(head, k_block=64)
    out.append(("lm_head", lambda: chain(x, packed_head), lambda: F.linear(x, head)))
    q, positions = fill(rows, HEADS, DIM, salt=7, dtype=DTYPE), torch.arange(rows) % CONTEXT
    cos, sin = (torch.rand(rows, 1, DIM // 2).to(DTYPE) for _ in range(2))
    both = fill(rows, 2 * FFN, salt=8, dtype=DTYPE)
    logits, target = fill(rows, VOCAB, salt=9), torch.arange(rows) % VOCAB
    ids = torch.arange(rows) % VOCAB
    gamma_qk = fill(DIM, salt=10, dtype=DTYPE)
    out += [
        ("embedding", lambda: embedding(ids, head), lambda: F.embedding(ids, head)),
        ("rms_norm", lambda: rms_norm(x, gamma, 1e-6), lambda: F.rms_norm(x, (HIDDEN,), gamma, 1e-6)),
        (
            "add_rms_norm",
            lambda: add_rms_norm(x, residual, gamma, 1e-6),
            lambda: F.rms_norm(x + residual, (HIDDEN,), gamma, 1e-6),
        ),
        ("q_norm", lambda: rms_norm(q, gamma_qk, 1e-6), lambda: F.rms_norm(q, (DIM,), gamma_qk, 1e-6)),
        ("rope", lambda: rope(q, positions, 1e6), lambda: _stock_rope(q, cos, sin)),
        (
            "silu_mul",
            lambda: silu_mul(both[:, :FFN], both[:, FFN:]),
            lambda: F.silu(both[:, :FFN]) * both[:, FFN:],
        ),
        ("log_softmax", lambda: log_softmax(logits, vocab_leaves=8), lambda: torch.log_softmax(logits, -1)),
        (
            "token_logprobs",
            lambda: token_logprobs(logits, target, vocab_leaves=8),
            lambda: torch.log_softmax(logits, -1).gather(1, target.unsqueeze(1)),
        ),
    ]
    return out


def decode(batch: int = 64) -> list[tuple[str, Call, Call]]:
    """Paged decode of one token each at context 128, against attention of the same keys laid side by side."""
    out: list[tuple[str, Call, Call]] = []
    for block in (128, 32):
        per = CONTEXT // block
        cache = fill(batch * per, KV, block, 2 * DIM, salt=1, dtype=DTYPE)
        table = (
            torch.randperm(batch * per, generator=torch.Generator().manual_seed(0))
            .view(batch, per)
            .to(torch.int32)
        )
        q, result = fill(batch, HEADS, DIM, salt=2, dtype=DTYPE), torch.empty(batch, HEADS, DIM, dtype=DTYPE)
        plan = PagedPlan(list(range(batch + 1)), [CONTEXT] * batch, HEADS // KV)
        k, v = (fill(batch, KV, CONTEXT, DIM, salt=s, dtype=DTYPE) for s in (3, 4))
        out.append(
            (
                f"paged decode, block {block}",
                partial(attention_paged, q, cache, table, plan, 0.2, result),
                partial(F.scaled_dot_product_attention, q.unsqueeze(2), k, v, scale=0.2, enable_gqa=True),
            )
        )
    starts, lens = list(range(batch + 1)), [CONTEXT] * batch
    out.append(("plan of a step", lambda: PagedPlan(starts, lens, 2), lambda: torch.tensor(lens)))
    return out


def _train(call: Callable[..., Tensor], inputs: list[Tensor]) -> Call:
    leaves = [t.requires_grad_() for t in inputs]
    g = torch.ones_like(call(*leaves))
    return lambda: torch.autograd.grad(call(*leaves), leaves, g)


def training() -> list[tuple[str, Call, Call]]:
    """Forward and backward over 32 sequences of 128."""
    b, s = 32, CONTEXT

    def x(*shape: int) -> Tensor:
        return fill(*shape, salt=len(shape), dtype=DTYPE)

    qkv: list[tuple[int, ...]] = [(b, s, HEADS, DIM), (b, s, KV, DIM), (b, s, KV, DIM)]

    def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        attend: Callable[..., Tensor] = F.scaled_dot_product_attention
        return attend(q, k, v, scale=0.2, is_causal=True, enable_gqa=True)

    cases: list[tuple[str, Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = [
        (
            "column_linear",
            lambda a, w: column_linear(a, w, k_block=64),
            F.linear,
            [(s, b, HIDDEN), (512, HIDDEN)],
        ),
        ("row_linear", lambda a, w: row_linear(a, w, k_block=64), F.linear, [(s, b, FFN), (HIDDEN, FFN)]),
        (
            "rms_norm",
            lambda a, w: rms_norm_grad(a, w, 1e-6),
            lambda a, w: F.rms_norm(a, (HIDDEN,), w, 1e-6),
            [(s, b, HIDDEN), (HIDDEN,)],
        ),
        ("silu_mul", silu_mul, lambda g, u: F.silu(g) * u, [(s, b, FFN), (s, b, FFN)]),
        ("attention", lambda q, k, v: attention_varlen(q, k, v, 0.2, kv_segment=32), stock, qkv),
    ]
    return [
        (f"train {n}", _train(o, [x(*d) for d in sh]), _train(t, [x(*d) for d in sh]))
        for n, o, t, sh in cases
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each measurement")
    parser.add_argument("--only", default="", help="only the names that contain this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    q, k = fill(32, CONTEXT, HEADS, DIM, salt=1, dtype=DTYPE), fill(32, CONTEXT, KV, DIM, salt=2, dtype=DTYPE)
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    dense = (
        "attention",
        lambda: attention_varlen(q, k, k, 0.2, kv_segment=32),
        lambda: attend(*(t.transpose(1, 2) for t in (q, k, k)), is_causal=True, enable_gqa=True),
    )
    groups = [(64, forward(64)), (64, decode()), (4096, [*forward(4096), dense]), (4096, training())]
    print(f"{'op':26}{'rows':>6}{'ours us':>11}{'stock us':>11}{'ratio':>8}")
    for rows, cases in groups:
        for name, ours, stock in cases:
            if args.only not in name:
                continue
            with torch.inference_mode(not name.startswith("train")):
                a, b = best(ours, args.seconds), best(stock, args.seconds)
            print(f"{name:26}{rows:6}{a:11.1f}{b:11.1f}{a / b:8.2f}", flush=True)


if __name__ == "__main__":
    main()
