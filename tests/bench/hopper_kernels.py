# SPDX-License-Identifier: Apache-2.0
"""Gates, then times, of the sm90 kernels on one GPU: `python tests/bench/hopper_kernels.py [--tune]`.

Nothing is timed when a gate fails. Times are medians of CUDA-graph replays over rotating inputs (the L2 is cold), next to the
stock operator in the same run. `--tune` first measures the tiles of the few-row chain and rewrites
`kernels/linear/hopper/table.json`. Tables go to the terminal, `kernels-h200.json` and `.md` to $OUT or the working directory.
Needs torch and triton on a Hopper GPU, and of this project only `isoexec.kernels` and `isoexec.contracts`.
"""

# ruff: noqa: E402 - where the package is not installed, its links are put on the path first

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

ROOT = Path(__file__).resolve().parents[2]
if find_spec("isoexec") is None:
    sys.path.insert(0, str(ROOT / ".src"))

from isoexec.kernels.hopper.timing import capture, copies_for, graph_time, replay_times
from isoexec.kernels.linear.hopper import cublaslt, tuning
from isoexec.kernels.linear.hopper import table as linear_table
from isoexec.kernels.linear.hopper.certify import certify, differing, few_rows
from isoexec.kernels.linear.hopper.kernel import launch as launch_linear
from isoexec.kernels.linear.hopper.kernel import reference
from isoexec.kernels.linear.hopper.ops import linear
from isoexec.kernels.logprobs.hopper import kernel as logprobs_kernel
from isoexec.kernels.logprobs.hopper import naive as logprobs_naive
from isoexec.kernels.logprobs.hopper.ops import merge, partials, token_logprobs
from isoexec.kernels.registry import FUNCTIONS, source_digest
from isoexec.kernels.rms_norm.hopper import kernel as norm_kernel
from isoexec.kernels.rms_norm.hopper import naive as norm_naive
from isoexec.kernels.rms_norm.hopper.ops import add_rms_norm, rms_norm
from isoexec.kernels.rope import naive as rope_naive
from isoexec.kernels.rope.hopper import kernel as rope_kernel
from isoexec.kernels.rope.hopper.ops import rope, table_digest, tables
from isoexec.kernels.silu_mul.hopper import kernel as silu_kernel
from isoexec.kernels.silu_mul.hopper import naive as silu_naive
from isoexec.kernels.silu_mul.hopper.ops import silu_mul

WEIGHTS = (
    ("0.6B qkv", 4096, 1024),
    ("0.6B o", 1024, 2048),
    ("0.6B gate_up", 6144, 1024),
    ("0.6B down", 1024, 3072),
    ("0.6B lm_head", 151936, 1024),
    ("8B qkv", 6144, 4096),
    ("8B o", 4096, 4096),
    ("8B gate_up", 24576, 4096),
    ("8B down", 4096, 12288),
    ("8B lm_head", 151936, 4096),
)
ROWS = (
    *(
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        12,
        15,
        16,
        17,
        24,
        31,
        32,
        33,
        40,
        48,
        63,
        64,
        65,
        80,
        96,
        112,
        127,
        128,
        129,
    ),
    *(
        160,
        192,
        200,
        255,
        256,
        257,
        300,
        384,
        500,
        512,
        513,
        640,
        777,
        1000,
        1024,
        1025,
        1500,
        2000,
        2048,
        3000,
    ),
    *(4096, 5000, 6144, 8191, 8192),
)
LINEAR_TIMES = (1, 16, 64, 128, 1024, 8192)
ROW_TIMES = (1, 16, 64, 256, 1024, 8192)
VOCAB, LEAVES, EPS, BASE, HEAD_DIM = 151936, 8, 1e-6, 1e6, 128
MODELS = (("0.6B", 1024, 3072, 16), ("8B", 4096, 12288, 32))  # hidden, feed-forward, query heads
BF16, FP32 = torch.bfloat16, torch.float32
SHIPPED = cublaslt.Switches(library="cublas", reduced_precision=True, split_k=True)
Call = Callable[[int], Any]

GATES: list[dict[str, Any]] = []
TIMES: list[dict[str, Any]] = []
START = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - START:5.0f} s]", *words, flush=True)


def gate(name: str, ok: bool, detail: str) -> None:
    GATES.append({"gate": name, "ok": bool(ok), "detail": detail})
    say("pass" if ok else "FAIL", "|", name, "|", detail)


def equal(name: str, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """A gate: every pair has equal bits, and at least one element was compared."""
    wrong = total = 0
    for got, want in pairs:
        wrong += differing(got.contiguous(), want)
        total += got.numel()
    gate(name, wrong == 0 and total > 0, f"{wrong} of {total} elements differ")


def control(name: str, got: Tensor, want: Tensor) -> None:
    """A gate that passes when bits differ: the comparison can fail."""
    count = differing(got.contiguous(), want)
    gate(f"control: {name}", count > 0, f"{count} of {want.numel()} elements differ")


def rand(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(std=scale)


def poisoned(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device="cuda")


# Linear


def _op(x: Tensor, w: Tensor, out_dtype: torch.dtype) -> Tensor:
    return linear(x, w, fp32_out=out_dtype == FP32)


def gate_linear() -> None:
    shapes = [(N, K) for _, N, K in WEIGHTS]
    few = tuple(M for M in ROWS if M <= 128)
    runs: tuple[tuple[str, Any, tuple[int, ...], torch.dtype], ...] = (
        ("sm90_linear", _op, ROWS, BF16),
        ("sm90_linear", _op, (1, 2, 7, 16, 17, 33, 64, 65, 128, 129, 1000, 4096, 8192), FP32),
        ("few_rows", few_rows, few, BF16),
        ("cublaslt", cublaslt.linear, tuple(M for M in few if M > 1), BF16),
    )
    for name, provider, rows, dtype in runs:
        found = certify(name, provider, shapes, rows, out_dtype=dtype)
        bad = [(c.N, c.K, c.differing[:6]) for c in found if c.differing]
        gate(
            f"{name} {found[0].out_dtype}: chain bits over {len(shapes)} weights, {len(rows)} M from {rows[0]} to {rows[-1]}",
            all(c.holds for c in found),
            f"{sum(c.elements for c in found)} elements, differing {bad}, fp64 error {max(c.error for c in found):.1e}",
        )
        torch.cuda.empty_cache()
    x, w = rand(64, 4096), rand(4096, 4096, scale=1 / 64)
    want = reference(x, w)
    used = sorted({t for steps in linear_table.tiles().values() for _, t in steps if t}, key=str)
    outs = []
    for tile in used:
        out = poisoned(64, 4096)
        launch_linear(x, w, out, tile)
        outs.append((out, want))
    equal(f"linear: {len(used)} tiles in use, one weight", outs)
    big, w2 = rand(8192, 4096), rand(24576, 4096, scale=1 / 64)
    equal("linear: rerun at 8192 x 24576 x 4096", ((linear(big, w2), linear(big, w2)) for _ in range(3)))
    equal("linear: rerun of one row", ((linear(x[:1], w), want[:1]) for _ in range(50)))
    halves = [reference(x[:, i::2].contiguous(), w[:, i::2].contiguous(), FP32) for i in (0, 1)]
    control("K halves added", halves[0] + halves[1], reference(x, w, FP32))
    cublaslt.restore(SHIPPED)
    refused = False
    try:
        linear(rand(1024, 4096), w)
    except cublaslt.SwitchError:
        refused = True
    gate(
        "control: flipped switches are refused", refused, "SwitchError" if refused else "served all the same"
    )
    caught = "nothing"
    try:
        cublaslt.probe(F.linear)
    except cublaslt.ProbeError as error:
        caught = f"(M, N, K, elements) {error.found}"
    gate("control: the probe sees split-K", caught != "nothing", caught)
    split = certify("cublas as shipped", lambda x, w, _: F.linear(x, w), shapes, few)
    pairs = sum(len(c.differing) for c in split)
    gate(
        "control: split-K allowed", pairs > 0, f"{pairs} of {len(shapes) * len(few)} (weight, M) pairs differ"
    )
    cublaslt.claim()
    cublaslt.probe()
    torch.cuda.empty_cache()


# Row kernels


def in_company(call: Callable[[slice], Tensor], whole: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """The first M rows for every M, and single rows from all over the batch."""
    rows = len(whole)
    cuts = [slice(0, M) for M in ROWS if rows >= M] + [slice(i, i + 1) for i in range(0, rows, rows // 16)]
    for cut in cuts:
        yield call(cut), whole[cut]


def gate_norm(width: int, dtype: torch.dtype, residual: bool, heads: int = 1) -> None:
    name = (
        f"rms_norm {width}{' + residual' if residual else ''}{' heads' if heads > 1 else ''} {str(dtype)[6:]}"
    )
    w, eps = rand(width, dtype=dtype), EPS
    x = rand(8192, heads * width, dtype=dtype, scale=3.0)
    x = x.view(8192, heads, width)[:, : heads - 1] if heads > 1 else x
    r = rand(8192, width, dtype=dtype) if residual else None

    def call(cut: slice) -> Tensor:
        return rms_norm(x[cut], w, eps) if r is None else torch.cat(add_rms_norm(x[cut], r[cut], w, eps), -1)

    def spec(device: str, cut: slice) -> Tensor:
        xd, wd = x[cut].to(device), w.to(device)
        if r is None:
            return norm_naive.rms_norm(xd, wd, eps)
        return torch.cat(norm_naive.add_rms_norm(xd, r[cut].to(device), wd, eps), -1)

    whole = call(slice(0, 8192))
    equal(f"{name}: specification on the GPU", [(whole, spec("cuda", slice(0, 8192)))])
    equal(f"{name}: specification on the CPU", [(whole[:64].cpu(), spec("cpu", slice(0, 64)))])
    equal(f"{name}: alone = in company", in_company(call, whole))
    equal(f"{name}: rerun", ((call(slice(0, 8192)), whole) for _ in range(10)))

    def free(**knobs: Any) -> Tensor:
        y = poisoned(*x.shape, dtype=dtype)
        h = poisoned(*x.shape, dtype=dtype) if residual else None
        norm_kernel.launch(x, r, w, y, h, eps, **knobs)
        return y if h is None else torch.cat((y, h), -1)

    most = max(1, 4096 // width)
    knobs = [(n, k) for n in (1, 4, 8) if n <= most for k in (1, 2, 4, 8)]
    equal(f"{name}: {len(knobs)} tilings", ((free(rows_per_program=n, num_warps=k), whole) for n, k in knobs))
    if dtype == FP32:
        control(f"{name} with fused multiply-add", free(fused_multiply_add=True), whole)


def gate_rows() -> None:
    for width in (1024, 4096):
        gate_norm(width, BF16, residual=False)
        gate_norm(width, BF16, residual=True)
        gate_norm(width, FP32, residual=False)
    gate_norm(HEAD_DIM, BF16, residual=False, heads=9)
    gate_norm(HEAD_DIM, FP32, residual=False, heads=9)
    for dtype in (BF16, FP32):
        name = str(dtype)[6:]
        gate_up = rand(8192, 2 * 3072, dtype=dtype, scale=8.0)
        gate_up[0, :8] = torch.tensor([0.0, -0.0, 87.0, -87.5, 88.7, -88.9, 300.0, -300.0])
        g, u = gate_up.chunk(2, -1)

        def part(cut: slice, g: Tensor = g, u: Tensor = u) -> Tensor:
            return silu_mul(g[cut], u[cut])

        whole = silu_mul(g, u)
        equal(f"silu_mul {name}: specification on the GPU", [(whole, silu_naive.silu_mul(g, u))])
        equal(
            f"silu_mul {name}: specification on the CPU",
            [(whole[:64].cpu(), silu_naive.silu_mul(g[:64].cpu(), u[:64].cpu()))],
        )
        equal(
            f"silu_mul {name}: alone = in company",
            in_company(part, whole),
        )
        equal(f"silu_mul {name}: rerun", ((silu_mul(g, u), whole) for _ in range(10)))

        def silu(g: Tensor = g, u: Tensor = u, dtype: torch.dtype = dtype, **free: Any) -> Tensor:
            out = poisoned(*g.shape, dtype=dtype)
            silu_kernel.launch(g, u, out, **free)
            return out

        tilings = [(b, k) for b in (128, 512, 2048) for k in (1, 4, 8)]
        equal(f"silu_mul {name}: 9 tilings", ((silu(block=b, num_warps=k), whole) for b, k in tilings))
        if dtype == FP32:
            control("silu_mul with the hardware's exp", silu(hardware_exp=True), whole)
        cos, sin = tables(HEAD_DIM, BASE, torch.device("cuda", 0))
        x = rand(8192, 18 * HEAD_DIM, dtype=dtype).view(8192, 18, HEAD_DIM)[:, :16]
        p = torch.randint(0, rope_naive.LENGTH, (8192,), device="cuda")
        whole = rope(x, p, cos, sin)
        want = rope_naive.rope(x.cpu(), p.cpu(), BASE)
        equal(f"rope {name}: specification on the CPU", [(whole.cpu(), want)])

        def some(cut: slice, x: Tensor = x, p: Tensor = p, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
            return rope(x[cut], p[cut], cos, sin)

        calls = in_company(some, whole)
        equal(f"rope {name}: alone = in company", calls)
        equal(f"rope {name}: rerun", ((rope(x, p, cos, sin), whole) for _ in range(10)))

        def turned(x: Tensor = x, p: Tensor = p, dtype: torch.dtype = dtype, **free: Any) -> Tensor:
            out = poisoned(*x.shape, dtype=dtype)
            rope_kernel.launch(x, p, *tables(HEAD_DIM, BASE, torch.device("cuda", 0)), out, **free)
            return out

        tilings = [(h, k) for h in (1, 4, 16) for k in (1, 4)]
        equal(
            f"rope {name}: 6 tilings", ((turned(heads_per_program=h, num_warps=k), whole) for h, k in tilings)
        )
        if dtype == FP32:
            control("rope with fused multiply-add", turned(fused_multiply_add=True), whole)


def _logprobs(
    logits: Tensor, target: Tensor, leaves: int, block: int, rows: int = 1, warps: int = 4, **own: Any
) -> Tensor:
    shape = (len(logits), leaves, logprobs_kernel.blocks_of(logits.shape[1], leaves, block))
    m, s = poisoned(*shape, dtype=FP32), poisoned(*shape, dtype=FP32)
    out = poisoned(len(logits), dtype=FP32)
    logprobs_kernel.launch_partials(logits, m, s, block=block, rows_per_program=rows, num_warps=warps, **own)
    logprobs_kernel.launch_merge(logits, target, m, s, out, rows_per_program=rows, num_warps=warps)
    return out


def gate_logprobs() -> None:
    target = torch.randint(0, VOCAB, (8192,), device="cuda")
    for dtype in (BF16, FP32):
        name = f"logprobs {str(dtype)[6:]}"
        logits = rand(8192, VOCAB, dtype=dtype, scale=3.0)
        whole = token_logprobs(logits, target, vocab_leaves=LEAVES)
        few = slice(0, 256)
        want = logprobs_naive.token_logprobs(logits[few], target[few], vocab_leaves=LEAVES)
        equal(f"{name}: specification on the GPU", [(whole[few], want)])
        want = logprobs_naive.token_logprobs(logits[:16].cpu(), target[:16].cpu(), vocab_leaves=LEAVES)
        equal(f"{name}: specification on the CPU", [(whole[:16].cpu(), want)])
        exact = torch.log_softmax(logits[few].double(), -1).gather(-1, target[few, None])[:, 0]
        error = float((whole[few].double() - exact).abs().max())
        gate(f"{name}: against fp64", error < 4e-6, f"largest error {error:.1e} nats")

        def some(cut: slice, logits: Tensor = logits) -> Tensor:
            return token_logprobs(logits[cut], target[cut], vocab_leaves=LEAVES)

        calls = in_company(some, whole)
        equal(f"{name}: alone = in company", calls)
        equal(
            f"{name}: rerun", ((token_logprobs(logits, target, vocab_leaves=LEAVES), whole) for _ in range(5))
        )
        block = logprobs_naive.BLOCK
        tilings = [(n, k) for n in (1, 2) for k in (2, 4, 8)]
        equal(
            f"{name}: 6 tilings",
            ((_logprobs(logits, target, LEAVES, block, n, k), whole) for n, k in tilings),
        )
        picked = logits[:512].gather(1, target[:512, None])[:, 0].float()
        sharded = []
        for ranks in (2, 4, 8):
            parts = [partials(z.contiguous(), leaves=LEAVES // ranks) for z in logits[:512].chunk(ranks, 1)]
            m, s = (torch.cat(p, 1) for p in zip(*parts, strict=True))
            sharded.append((merge(picked, m, s), whole[:512]))
        equal(f"{name}: vocabulary shared by 2, 4, 8 ranks", sharded)
        control(f"{name} with 4 leaves", _logprobs(logits, target, 4, block), whole)
        control(f"{name} with blocks of 2048", _logprobs(logits, target, LEAVES, 2048), whole)
        control(
            f"{name} with the hardware's exp",
            _logprobs(logits, target, LEAVES, block, hardware_exp=True),
            whole,
        )
        del logits
        torch.cuda.empty_cache()


def gate_edges() -> None:
    """Rows no one should get an answer for, no rows at all, CUDA graphs, and torch.compile."""
    cos, sin = tables(HEAD_DIM, BASE, torch.device("cuda", 0))
    logits, target = rand(6, VOCAB, dtype=FP32), torch.tensor([1, VOCAB, -1, 4, 5, 6], device="cuda")
    logits[:2, 1000:90000] = -math.inf
    logits[3], logits[4, 77] = -math.inf, math.nan
    got = token_logprobs(logits, target, vocab_leaves=LEAVES)
    want = logprobs_naive.token_logprobs(logits[:1], target[:1], vocab_leaves=LEAVES)
    equal("logprobs: most columns masked", [(got[:1], want)])
    lost = got[1:5].isnan()
    gate("logprobs: foreign targets, empty rows and NaN give NaN", bool(lost.all()), str(lost.tolist()))
    turned = rope(rand(3, 2, HEAD_DIM), torch.tensor([8191, 8192, -1], device="cuda"), cos, sin)
    seen = turned.isnan().flatten(1).all(1).tolist(), turned.isnan().flatten(1).any(1).tolist()
    gate("rope: positions outside the table give NaN", seen == ([False, True, True],) * 2, str(seen[0]))

    w, wh, wl = rand(1024), rand(HEAD_DIM), rand(4096, 1024, scale=1 / 32)

    def every(x: Tensor, p: Tensor) -> tuple[Tensor, ...]:
        y, h = add_rms_norm(x, x, w, EPS)
        qkv = linear(y, wl)
        q = rope(rms_norm(qkv.view(-1, 32, HEAD_DIM)[:, :16], wh, EPS), p, cos, sin)
        return h, q, silu_mul(*qkv.chunk(2, -1)), token_logprobs(qkv, p, vocab_leaves=LEAVES)

    rows = [len(t) for t in every(rand(0, 1024), torch.arange(0, device="cuda"))]
    gate("every op: no rows", rows == [0] * 4, str(rows))
    for M in (8, 512):
        x, p = rand(M, 1024), torch.arange(M, device="cuda")
        given = torch.zeros_like(x)
        outs: list[tuple[Tensor, ...]] = []
        graph = capture(lambda _, given=given, p=p, outs=outs: outs.append(every(given, p)), 1)  # type: ignore[misc]
        given.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        eager = every(x, p)
        equal(f"every op, {M} rows: a CUDA graph replayed on new input", zip(outs[-1], eager, strict=True))
        torch._dynamo.reset()
        fast = torch.compile(every, fullgraph=True)
        equal(f"every op, {M} rows: under torch.compile", zip(fast(x, p), eager, strict=True))


# Times


def compared(native: Call, ours: Call, copies: int) -> dict[str, float]:
    """Times in turns: native twice (its second graph shows the noise), with cuBLAS as torch ships it, and ours."""
    before = cublaslt.switches()
    cublaslt.restore(SHIPPED)
    try:
        graphs = [capture(native, copies), capture(native, copies)]
    finally:
        cublaslt.restore(before)
    first, again, own = replay_times([*graphs, capture(ours, copies)], copies)
    return {"native": first, "again": again, "ours": own}


def time_linear() -> None:
    for name, N, K in WEIGHTS:
        copies = copies_for(2 * N * K)
        ws = [rand(N, K, scale=K**-0.5) for _ in range(copies)]
        for M in LINEAR_TIMES:
            x = rand(M, K)
            n = min(copies, 4) if M >= 8192 else copies

            def stock(i: int, *, x: Tensor = x, ws: list[Tensor] = ws, up: bool = False) -> Tensor:
                y = F.linear(x, ws[i])
                return y.float() if up else y

            def own(i: int, *, x: Tensor = x, ws: list[Tensor] = ws, up: bool = False) -> Tensor:
                return linear(x, ws[i], fp32_out=up)

            tile = linear_table.tile_for(N, K, M)
            for up in (False, True) if "lm_head" in name else (False,):
                row: dict[str, Any] = {
                    "op": "linear, fp32 out" if up else "linear",
                    "shape": f"{name} {N}x{K}",
                }
                row |= {"rows": M, **compared(partial(stock, up=up), partial(own, up=up), n)}
                row["provider"] = "cublaslt" if tile is None else f"few_rows {tile.kind}"
                row["tflops"] = 2 * M * N * K / row["ours"] / 1e6
                row["tb_per_s"] = (2 * (N * K + M * K) + M * N * (4 if up else 2)) / row["ours"] / 1e6
                TIMES.append(row)
        del ws
        torch.cuda.empty_cache()
    show("linear")


def inductor(function: Callable[..., Any], inputs: list[tuple[Any, ...]]) -> float | None:
    """The native op compiled for this shape, or None with the reason printed."""
    torch._dynamo.reset()
    try:
        fast = torch.compile(function, dynamic=False)
        return graph_time(lambda i: fast(*inputs[i]), len(inputs))
    except Exception as error:  # noqa: BLE001 - a comparison only; its absence is shown in the table
        say("no compiled time:", repr(error)[:200])
        return None


Make = Callable[[], tuple[Any, ...]]


def time_row(
    op: str, shape: str, M: int, nbytes: int, make: Make, native: Callable[..., Any], ours: Callable[..., Any]
) -> None:
    copies = copies_for(nbytes)
    inputs = [make() for _ in range(copies)]
    row: dict[str, Any] = {"op": op, "shape": shape, "rows": M}
    row |= compared(lambda i: native(*inputs[i]), lambda i: ours(*inputs[i]), copies)
    row["tb_per_s"] = nbytes / row["ours"] / 1e6
    if M in (64, 8192):
        row["compiled"] = inductor(native, inputs)
    TIMES.append(row)


def native_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, w.shape, w, EPS)


def own_norm(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x, w, EPS)


def native_add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return F.rms_norm(h, w.shape, w, EPS), h


def native_rope(x: Tensor, p: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = cos[p].unsqueeze(1), sin[p].unsqueeze(1)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)


def native_silu(x: Tensor) -> Tensor:
    g, u = x.chunk(2, -1)
    return F.silu(g) * u


def native_logprobs(z: Tensor, t: Tensor) -> Tensor:
    return torch.log_softmax(z, -1, dtype=FP32).gather(-1, t.unsqueeze(-1)).squeeze(-1)


def own_add_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm(x, r, w, EPS)


def own_silu(x: Tensor) -> Tensor:
    return silu_mul(*x.chunk(2, -1))


def own_logprobs(z: Tensor, t: Tensor) -> Tensor:
    return token_logprobs(z, t, vocab_leaves=LEAVES)


def time_rows() -> None:
    cos, sin = tables(HEAD_DIM, BASE, torch.device("cuda", 0))
    for model, hidden, ffn, heads in MODELS:
        w, wh = rand(hidden), rand(HEAD_DIM)
        for M in ROW_TIMES:

            def hid(n: int, M: int = M, hidden: int = hidden, w: Tensor = w) -> tuple[Any, ...]:
                return (*(rand(M, hidden) for _ in range(n)), w)

            def head(*rest: Any, M: int = M, heads: int = heads) -> tuple[Any, ...]:
                return (rand(M, heads, HEAD_DIM), *rest)

            def up(M: int = M, ffn: int = ffn) -> tuple[Any, ...]:
                return (rand(M, 2 * ffn),)

            wide, heads_of = f"{model} {hidden}", f"{model} {heads}x{HEAD_DIM}"
            turn = (torch.arange(M, device="cuda"), cos, sin)
            time_row("rms_norm", wide, M, 4 * M * hidden, partial(hid, 1), native_norm, own_norm)
            time_row("add_rms_norm", wide, M, 8 * M * hidden, partial(hid, 2), native_add_norm, own_add_norm)
            nbytes = 4 * M * heads * HEAD_DIM
            time_row("q norm", heads_of, M, nbytes, partial(head, wh), native_norm, own_norm)
            time_row("rope", heads_of, M, nbytes, partial(head, *turn), native_rope, rope)
            time_row("silu_mul", f"{model} {ffn}", M, 6 * M * ffn, up, native_silu, own_silu)
    for dtype in (BF16, FP32):
        for M in ROW_TIMES:

            def logits(M: int = M, dtype: torch.dtype = dtype) -> tuple[Any, ...]:
                return rand(M, VOCAB, dtype=dtype), torch.arange(M, device="cuda")

            name = f"{VOCAB} {str(dtype)[6:]}"
            time_row("logprobs", name, M, VOCAB * M * dtype.itemsize, logits, native_logprobs, own_logprobs)
    show("rows")


# Report


def tune() -> None:
    entries = tuning.tune(WEIGHTS, say)
    text = json.dumps({"arch": "sm90", **versions(), "weights": entries}, indent=1) + "\n"
    linear_table.PATH.write_text(text)
    linear_table.tiles.cache_clear()
    (out_folder() / "table.json").write_text(text)


def versions() -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def out_folder() -> Path:
    return Path(os.environ.get("OUT", "."))


def lines(kind: str) -> list[str]:
    """Markdown of one kind of times in us; `ratio` is ours / native (above 1 is slower), `noise` native / native."""
    rows = [r for r in TIMES if r["op"].startswith("linear") == (kind == "linear")]
    extra = ["provider", "tflops"] if kind == "linear" else ["compiled"]
    head = ["op", "shape", "rows", "native", "noise", "ours", "ratio", *extra, "tb_per_s"]
    text = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        cells = {**r, "ratio": r["ours"] / r["native"], "noise": r["again"] / r["native"]}
        shown = [cells.get(h) for h in head]
        text.append(
            "| "
            + " | ".join(f"{c:.2f}" if isinstance(c, float) else "" if c is None else str(c) for c in shown)
            + " |"
        )
    return text


def show(kind: str) -> None:
    print("\n".join(lines(kind)), flush=True)


def write(seconds: float) -> None:
    facts = {
        **versions(),
        "driver": subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip(),
        "sources": {n: source_digest(n, "sm90") for n, f in FUNCTIONS.items() if "sm90" in f.arch},
        "rope_table": table_digest(HEAD_DIM, BASE, torch.device("cuda", 0)),
        "seconds": round(seconds),
    }
    folder = out_folder()
    (folder / "kernels-h200.json").write_text(
        json.dumps({**facts, "gates": GATES, "times": TIMES}, indent=1) + "\n"
    )
    gates = [f"| {'pass' if g['ok'] else 'FAIL'} | {g['gate']} | {g['detail']} |" for g in GATES]
    text = [
        *(f"- {k}: {v}" for k, v in facts.items()),
        "",
        "| | gate | detail |",
        "|---|---|---|",
        *gates,
        "",
    ]
    (folder / "kernels-h200.md").write_text("\n".join([*text, *lines("linear"), "", *lines("rows")]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", action="store_true", help="measure tiles first and rewrite the table")
    parser.add_argument("--gates-only", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("needs a GPU of compute capability 9.0", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    say(versions())
    with torch.no_grad():
        cublaslt.claim()
        cublaslt.probe()
        if arguments.tune:
            tune()
        gate_rows()
        gate_logprobs()
        gate_linear()
        gate_edges()
        failed = [g["gate"] for g in GATES if not g["ok"]]
        if not failed and not arguments.gates_only:
            time_rows()
            time_linear()
    write(time.monotonic() - START)
    say(f"{len(GATES)} gates, {len(failed)} failed: {failed}" + ("; nothing was timed" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
