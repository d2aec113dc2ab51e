# SPDX-License-Identifier: Apache-2.0
"""Gives the sm90 ops CPU kernels that evaluate their specifications, in a process that runs nothing else afterwards.

What exchanges rows, accumulators and sums between ranks is the real code; products, norms, attention and the like are the
specifications' numbers. The process calls itself sm90, and evidence, environment and cuBLASLt's switches are not asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isoexec.adapters import base
from isoexec.adapters.megatron import adapter
from isoexec.adapters.megatron.kinds import kinds_of
from isoexec.contracts.schema import Contract, library
from isoexec.kernels import canaries, registry
from isoexec.kernels.attention.hopper import naive as attention
from isoexec.kernels.bias import naive as bias
from isoexec.kernels.embedding import naive as embedding
from isoexec.kernels.grad_norm.hopper.kernel import programs_for
from isoexec.kernels.hopper.library import _LIBRARY
from isoexec.kernels.hopper.spec import pair_sum
from isoexec.kernels.linear.hopper import naive as linear
from isoexec.kernels.logprobs.hopper import naive as logprobs
from isoexec.kernels.rms_norm.hopper import naive as norm
from isoexec.kernels.rope.hopper import rotation
from isoexec.kernels.silu_mul.hopper import naive as silu

BF16 = torch.bfloat16


def contract(name: str = "qwen3-dense-sm90") -> Contract:
    """The shipped contract, pinned to the kernels as they are here, that asks nothing of the environment but its arch."""
    found = Contract.load(library(name))
    pinned = (
        dataclasses.replace(p, source=registry.source_digest(p.function, "sm90")) for p in found.providers
    )
    anywhere = dataclasses.replace(found.claims.environment, versions=(), switches={})
    claims = dataclasses.replace(found.claims, environment=anywhere)
    return dataclasses.replace(found, providers=tuple(pinned), claims=claims)


def product(
    layout: str, a: Tensor, b: Tensor, acc: Tensor | None, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    assert a.dtype == b.dtype == BF16
    x, w = {"forward": (a, b), "input": (a, b.t()), "weight": (a.t(), b.t())}[layout]
    made = linear.chain(x, w, acc).to(dtype)
    return made if out is None else out.copy_(made)


def _embed(ids: Tensor, w: Tensor, out: Tensor, *, first: int, vocab: int) -> None:
    local = ids - first
    own = (local >= 0) & (local < len(w))
    assert int(ids.max()) < vocab
    out.copy_(torch.where(own.unsqueeze(1), w[local.clamp(0, len(w) - 1)], 0.0) + 0.0)


def _embed_gradient(grad: Tensor, ids: Tensor, dw: Tensor, *, first: int) -> None:
    own = (ids >= first) & (ids < first + len(dw))
    dw.copy_(embedding.embedding_backward(grad[own], ids[own] - first, len(dw)))


def _norm_gradient(
    g: Tensor, x: Tensor, w: Tensor, dx: Tensor, eps: float, *, g_sum: Tensor | None, **_: Any
) -> Tensor:
    dx.copy_(norm.dx(g, x, w, eps) if g_sum is None else norm.add_dx(g, g_sum, x, w, eps))
    xf = x.float()
    terms = g.float() * (xf * norm.inverse_root(xf, eps))
    terms = terms if x.dim() == 3 else terms.unsqueeze(1)
    terms = torch.nn.functional.pad(terms, (0, 0, 0, 0, 0, -len(terms) % norm.TOKENS))
    chains = torch.zeros(len(terms) // norm.TOKENS, *terms.shape[1:])
    for place in terms.unflatten(0, (-1, norm.TOKENS)).unbind(1):
        chains = chains + place
    return chains


def _trees(chains: Tensor) -> Tensor:
    whole = torch.nn.functional.pad(chains, (0, 0, 0, 0, 0, -len(chains) % norm.CHAINS))
    return pair_sum(whole.unflatten(0, (-1, norm.CHAINS)).movedim(1, -1))


def _total(trees: Tensor, out: Tensor) -> None:
    total = torch.zeros(trees.shape[1:])
    for tree in trees:
        total = total + tree
    out.copy_(pair_sum(total.t()) if out.dim() == 1 else total)


def _partials(z: Tensor, heat: Tensor | None, m: Tensor, s: Tensor, w: Tensor | None, cut: Any) -> None:
    found = logprobs.partials(logprobs.scaled(z, heat), leaves=m.shape[1])
    nodes = [t.unflatten(-1, (m.shape[2], -1)) for t in found]
    for out, made in zip((m, s, w), logprobs.tree(*nodes), strict=True):
        if out is not None:
            out.copy_(made)


def _picked(
    x: Tensor, w: Tensor, target: Tensor, heat: Tensor | None, out: Tensor, *, first: int = 0
) -> None:
    local = target - first
    own = (local >= 0) & (local < len(w))
    z = logprobs.scaled(linear.linear(x, w, out_dtype=torch.float32), heat)
    out.copy_(torch.where(own, z.gather(1, local.clamp(0, len(w) - 1).unsqueeze(1)).squeeze(1), torch.nan))


def _join(m: Tensor, s: Tensor, w: Tensor | None, *ups: Tensor | None) -> None:
    for up, made in zip(ups, logprobs.tree(m, s, torch.zeros_like(s) if w is None else w), strict=True):
        if up is not None:
            up.copy_(made)


def _merge(
    picked: Tensor,
    target: Tensor | None,
    heat: Tensor | None,
    m: Tensor,
    s: Tensor,
    w: Tensor | None,
    log_p: Tensor,
    entropy: Tensor | None,
    stats: Tensor,
) -> None:
    assert target is None
    found = logprobs.finish(picked, *logprobs.tree(m, s, torch.zeros_like(s) if w is None else w))
    log_p.copy_(found[0])
    if entropy is not None:
        entropy.copy_(found[1])
    stats.copy_(torch.stack(found[2:], 1))


def _logit_gradient(
    grad: Tensor,
    grad_entropy: Tensor | None,
    z: Tensor,
    target: Tensor,
    heat: Tensor | None,
    entropy: Tensor,
    stats: Tensor,
    out: Tensor,
    *,
    first: int,
) -> None:
    wide = torch.nn.functional.pad(z, (0, 1))  # a column for other ranks' targets
    local = target - first
    local = torch.where((local >= 0) & (local < z.shape[1]), local, z.shape[1])
    spread = entropy if len(entropy) else torch.zeros(len(z))
    made = logprobs.gradient(grad, grad_entropy, wide, local, heat, (spread, *stats.unbind(1)))
    out.copy_(made[:, :-1])


def _sequences(spans: Tensor) -> list[slice]:
    return [slice(a, a + n) for a, n in zip(spans[0].tolist(), spans[1].tolist(), strict=True)]


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    spans, scale, kv_segment = rest[5], rest[11], rest[12]
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan)
    for at in _sequences(spans):
        out[at], lse[:, at] = attention.attention(q[at], k[at], v[at], scale, kv_segment=kv_segment)
    return out, lse if rest[-1] else lse[0, :0]


def _attention_gradient(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spans: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    found = [torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v)]
    for at in _sequences(spans):
        given = (g[at], q[at], k[at], v[at], out[at], lse[:, at])
        made: Any = attention.gradients(*given, rest[2])
        for whole, part in zip(found, made, strict=False):
            whole[at] = part
    return *found, torch.empty(0)


def _sums(x: Tensor, factors: Tensor, out: Tensor) -> None:
    assert len(out) == programs_for(x.numel())
    out.zero_()[0] = (x.double().square() * factors[0] * factors[1]).round().long().sum()


def _greatest(x: Tensor, out: Tensor) -> None:
    out.fill_(float(x.float().abs().max()))


def _replace(module: Any, **values: Any) -> None:
    for name, value in values.items():
        assert hasattr(module, name), (module.__name__, name)
        setattr(module, name, value)


def install() -> None:
    """Put everything in place."""
    kinds_of("sm90")  # imports the ops
    from isoexec.kernels.attention.hopper import ops as attention_ops
    from isoexec.kernels.embedding.hopper import ops as embedding_ops
    from isoexec.kernels.grad_norm.hopper import ops as grad_norm_ops
    from isoexec.kernels.linear.hopper import cublaslt, parallel, products
    from isoexec.kernels.linear_logprobs.hopper import kernel as head_kernel
    from isoexec.kernels.linear_logprobs.hopper import ops as head_ops
    from isoexec.kernels.linear_logprobs.hopper.plan import Chunks
    from isoexec.kernels.logprobs.hopper import ops as logprobs_ops
    from isoexec.kernels.rms_norm.hopper import gradient as norm_gradient

    _replace(products, product=product)
    _replace(embedding_ops, launch=_embed, launch_gradient=_embed_gradient)
    _replace(norm_gradient, launch_gradient=_norm_gradient, launch_trees=_trees, launch_total=_total)
    _replace(logprobs_ops, launch_merge=_merge, launch_nodes=_join)
    _replace(
        head_ops,
        product=product,
        launch_partials=_partials,
        launch_gradient=_logit_gradient,
        plan_for=lambda _: Chunks(rows=64, leaves=2),
        BACKWARD_ROWS=32,
    )
    _replace(head_kernel, launch_picked=_picked)
    _replace(attention_ops, launch_map=lambda *_, **__: None, launch_tables=lambda *_, **__: None)
    _replace(attention, BLOCK={64: 32})  # fewer keys a block: a quarter of the time
    _replace(grad_norm_ops, launch_greatest=_greatest, launch_sums=_sums)
    state = [cublaslt.SHIPPED]
    _replace(
        cublaslt,
        PROBES=(),
        switches=lambda: state[0],
        restore=lambda wanted: state.__setitem__(0, wanted),
    )
    kernels: dict[str, Callable[..., Any]] = {
        "embedding": embedding_ops._lookup,
        "embedding_grad": embedding_ops._gradient,
        "rms_norm": lambda x, w, eps, *_: norm.rms_norm(x, w, eps),
        "add_rms_norm": lambda x, r, w, eps, *_: norm.add_rms_norm(x, r, w, eps),
        "norm_grad": norm_gradient._gradient,
        "residual_add": norm.residual_add,
        "rope": lambda x, at, _, *table: rotation.rotate(x, at.long(), table[:2], reverse=table[3]),
        "silu_mul_halves": lambda both: silu.silu_mul(*both.chunk(2, -1)),
        "silu_mul_halves_grad": lambda g, both: torch.cat(silu.silu_mul_backward(g, *both.chunk(2, -1)), -1),
        "bias_add": bias.bias_add,
        "bias_grad": lambda g, b: bias.bias_grad(g).to(b.dtype),
        "column_linear": parallel._column,
        "column_input_gradient": parallel._column_gradient,
        "parallel_weight_gradient": parallel._weight_gradient,
        "row_linear": parallel._row,
        "row_input_gradient": parallel._row_gradient,
        "linear_logprobs": head_ops._forward,
        "linear_logprobs_grad": head_ops._gradient,
        "attention": _attention,
        "attention_grad": _attention_gradient,
        "grad_norm_greatest": grad_norm_ops._greatest,
        "grad_norm_sums": grad_norm_ops._sums,
    }
    for name, kernel in kernels.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"isoexec::sm90_{name}", "CPU"):
            _LIBRARY.impl(f"sm90_{name}", kernel, "CPU")
    for module in (base, adapter):
        setattr(module, "arch", lambda: "sm90")  # noqa: B010
    setattr(base, "require_evidence", lambda *_: None)  # noqa: B010
    setattr(adapter, "environment", lambda: {"arch": "sm90"})  # noqa: B010
    _canaries()


def _canaries() -> None:
    """Smaller ones, and the tensor cores' references by the specifications."""
    sizes = {"tokens": 19, "K": 64, "N": 256}
    canaries._SIZES |= {
        "linear.mma_chain/1": sizes,
        "linear_logprobs.mma_blocks/1": sizes,
        "attention.mma_segments/1": {"tokens": 19, "heads": 4, "kv_heads": 2, "head_dim": 64},
    }
    _replace(canaries, _ON_GPU=())
    stated = canaries.reference

    def reference(function: str, constants: Any) -> Callable[..., Tensor]:
        match function:
            case "linear.mma_chain/1":
                return linear.linear
            case "linear_logprobs.mma_blocks/1":
                return lambda x, w, target: logprobs.token_logprobs(
                    linear.linear(x, w, out_dtype=torch.float32),
                    target,
                    vocab_leaves=constants["vocab_leaves"],
                )
            case "attention.mma_segments/1":
                return lambda q, k, v, scale: attention.attention(
                    q[0], k[0], v[0], scale, kv_segment=constants["kv_segment"]
                )[0].unsqueeze(0)
        return stated(function, constants)

    _replace(canaries, reference=reference)


def ints(values: Sequence[Tensor]) -> list[list[int]]:
    """Fp32 tensors as integers."""
    return [v.float().contiguous().view(torch.int32).flatten().tolist() for v in values]
