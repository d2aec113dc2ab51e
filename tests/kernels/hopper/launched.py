# SPDX-License-Identifier: Apache-2.0
"""What the sm90 ops launch, with no GPU in sight: every launch is noted with what Triton would compile it for, and not made.

Ops run their real host code on tensors of the CPU. Prints `{kernel: variants}` as JSON: how often a kernel is compiled again for
the same constants when nothing but the number of tokens and of sequences changes. `--seconds` prints the host's time a call.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import cpu_ops  # type: ignore[import-not-found]  # noqa: F401 - before any op
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from isoexec.kernels.attention.hopper import fa3
from isoexec.kernels.attention.hopper import ops as attention
from isoexec.kernels.bias.hopper import ops as bias
from isoexec.kernels.combine.hopper import ops as combine
from isoexec.kernels.dispatch.hopper import ops as dispatch
from isoexec.kernels.embedding.hopper import ops as embedding
from isoexec.kernels.l2_norm.hopper import ops as l2_norm
from isoexec.kernels.latent_attention.hopper import ops as latent
from isoexec.kernels.linear.hopper import ops as linear
from isoexec.kernels.logprobs.hopper import ops as logprobs
from isoexec.kernels.rms_norm.hopper import ops as rms_norm
from isoexec.kernels.rope.hopper import ops as rope
from isoexec.kernels.router.hopper import ops as router
from isoexec.kernels.sigmoid_mul.hopper import ops as sigmoid_mul
from isoexec.kernels.silu_mul.hopper import ops as silu_mul

BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))
TOKENS = (1, 2, 3, 15, 16, 17, 32, 60, 64, 100, 255, 1000, 1004, 1024)
BF16 = torch.bfloat16
_binders: dict[Any, Any] = {}
_forgetful: set[str] = set()
# kernel -> its constants and options -> what is known of its other arguments
seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    if self not in _binders:
        if self.fn.__name__ in _forgetful:
            for one in self.params:
                one.do_not_specialize = False
        _binders[self] = create_function_from_signature(self.signature, self.params, BACKEND)
    bound, known, options = _binders[self](*args, **options)
    constants = {n: v for (n, v), one in zip(bound.items(), known, strict=True) if one[0] == "constexpr"}
    rest = [(n, one) for n, one in zip(bound, known, strict=True) if one[0] != "constexpr"]
    seen[self.fn.__name__][str((constants, options))].add(str(rest))


JITFunction.run = _run


def _no_library(q: Any, _k: Any, v: Any, *_: Any) -> tuple[Any, ...]:
    return q.new_empty((*q.shape[:2], v.shape[-1])), q.new_empty(
        (q.shape[1], q.shape[0]), dtype=torch.float32
    )


fa3.load = lambda: _no_library  # type: ignore[assignment]


def rand(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> Any:
    return torch.zeros(shape, dtype=dtype, requires_grad=grad)


def _back(out: Any) -> None:
    outs = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(
        [o for o in outs if o.requires_grad], [torch.zeros_like(o) for o in outs if o.requires_grad]
    )


def _packed(lengths: list[int], plan: Any = attention.plan, **more: Any) -> tuple[Any, Any]:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    made = plan(
        requests=len(lengths), tokens=int(bounds[-1]), most_rows=max(lengths), most_keys=max(lengths),
        kv_segment=4096, gradients=True, device="cpu", **more,
    )  # fmt: skip
    made.fill(bounds, bounds[1:] - bounds[:-1], k_start=bounds[:-1])
    return made, torch.zeros(int(bounds[-1]), dtype=torch.int32)


def _decode(requests: int, keys: int) -> tuple[Any, Any]:
    made = attention.plan(
        requests=requests,
        tokens=requests,
        most_rows=1,
        most_keys=keys,
        kv_segment=4096,
        page=16,
        device="cpu",
    )
    bounds = torch.arange(requests + 1, dtype=torch.int32)
    blocks = torch.zeros(requests, -(-keys // 16), dtype=torch.int32)
    made.fill(bounds, torch.ones(requests, dtype=torch.int32), blocks=blocks)
    return made, torch.zeros(requests, dtype=torch.int32)


def _attended(step: Any, at: Any) -> Callable[[], None]:
    n, attend = len(at), attention.attention
    return lambda: _back(attend(rand(n, 16, 128), rand(n, 8, 128), rand(n, 8, 128), at, step, scale=0.1))


def _latent(step: Any, at: Any) -> Callable[[], None]:
    n, attend = len(at), latent.latent_attention
    return lambda: _back(
        attend(rand(n, 16, 64), rand(n, 16, 512), rand(n, 64), rand(n, 512), at, step, scale=0.1)
    )


def _decoded(cache: Any, step: Any, at: Any) -> Callable[[], Any]:
    return lambda: attention.attention(rand(len(at), 16, 128, grad=False), cache, cache, at, step, scale=0.1)


def calls(T: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ops at T tokens of a small model: name and call, forward and backward."""
    w, wide = rand(1024), rand(128)
    cos, sin = (torch.zeros(8192, 64) for _ in range(2))
    positions = torch.zeros(T, dtype=torch.int64)
    yield "rms_norm", lambda: _back(rms_norm.rms_norm(rand(T, 1024), w, 1e-6))
    yield "qk_norm", lambda: _back(rms_norm.rms_norm(rand(T, 16, 128), wide, 1e-6))
    yield "add_rms_norm", lambda: _back(rms_norm.add_rms_norm(rand(T, 1024), rand(T, 1024), w, 1e-6))
    yield "residual_add", lambda: _back(rms_norm.residual_add(rand(T, 1024), rand(T, 1024)))
    yield "l2_norm", lambda: _back(l2_norm.l2_norm(rand(T, 16, 128), 1e-6))
    yield "rope", lambda: _back(rope.rope(rand(T, 16, 128), positions, cos, sin))
    yield "silu_mul", lambda: _back(silu_mul.silu_mul_halves(rand(T, 2 * 3072)))
    yield "sigmoid_mul", lambda: _back(sigmoid_mul.sigmoid_mul(rand(T, 1024), rand(T, 1024)))
    yield "bias", lambda: _back(bias.bias_add(rand(T, 1024), w))
    yield (
        "embedding",
        lambda: embedding.vocab_parallel_embedding(
            positions.unsqueeze(1), rand(512, 1024), vocab_start=0, group=None
        ),
    )
    yield (
        "logprobs",
        lambda: _back(logprobs.token_logprobs(rand(T, 512, dtype=torch.float32), positions, vocab_leaves=8)),
    )
    if T <= 64:  # more rows are the library's
        x, weight = rand(T, 1024, grad=False), rand(4096, 1024, grad=False)
        yield "linear", lambda: linear.linear(x, weight)
    places = torch.zeros(T, 4, dtype=torch.int64)
    yield "router", lambda: _back(router.softmax_topk(rand(T, 128, dtype=torch.float32), 8))
    yield "dispatch", lambda: dispatch.dispatch(rand(T, 1024, grad=False), dispatch.plan(places, 0, 16))
    yield "combine", lambda: _back(combine.combine(rand(4 * T, 1024), rand(T, 4, dtype=torch.float32)))
    for count in (1, 3, 16):
        step, at = _packed([T] * count)
        yield f"attention of {count}", _attended(step, at)
        step, at = _packed([T] * count, provider="triton", window=64)
        yield f"attention of {count}, a window", _attended(step, at)
        step, at = _packed([T] * count, latent.plan)
        yield f"latent attention of {count}", _latent(step, at)
    cache = rand(64, 16, 8, 128, grad=False)
    for keys in (100, 4096 + T):
        step, at = _decode(T, keys)
        yield f"attention decoded at {keys}", _decoded(cache, step, at)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--show", default="", help="print what differs of this kernel")
    parser.add_argument("--forget", default="", help="as if this kernel did not say what it must not be told")
    options = parser.parse_args()
    _forgetful.add(options.forget)
    if options.seconds:
        for name, call in calls(16):
            call()
            began = time.perf_counter()
            for _ in range(200):
                call()
            print(f"{(time.perf_counter() - began) * 5e3:9.1f} us {name}")
        return 0
    for T in TOKENS:
        for _, call in calls(T):
            call()
    if options.show:
        for constants, known in seen[options.show].items():
            print(constants, *sorted(known), sep="\n    ")
    found = {name: max(len(known) for known in by.values()) for name, by in sorted(seen.items())}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
