# SPDX-License-Identifier: Apache-2.0
"""The sm90 latent attention as an opaque torch op: segments by own kernels or by FlashAttention-3, one merge, one gradient.

Who computes the segments is the plan's `maker`; a library that is missing or not certified for this function is an error,
never another maker. The plan is attention.mma_segments/1's: made once a step, filled on the device, used by every layer,
paged or packed. A rank that holds some of the heads names its group, over which the gradients of keys are handed on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from isoexec.kernels.attention.hopper import fa3
from isoexec.kernels.attention.hopper import ops as segments
from isoexec.kernels.attention.hopper.ops import Maker
from isoexec.kernels.attention.hopper.segments import (
    Tables,
    by_library,
    check_rows,
    kept,
    lines,
    merged,
    nothing,
)
from isoexec.kernels.attention.hopper.tiles import launch_map
from isoexec.kernels.domain import DomainError, require
from isoexec.kernels.groups import name_of, resolve
from isoexec.kernels.hopper.library import define
from isoexec.kernels.latent_attention.hopper import tiles
from isoexec.kernels.latent_attention.hopper.backward import (
    Operands,
    launch_delta,
    launch_keys,
    launch_queries,
)
from isoexec.kernels.latent_attention.hopper.naive import HEAD, LATENT, ROPE
from isoexec.kernels.latent_attention.hopper.split import groups_of, launch_split
from isoexec.kernels.linear.hopper import transport

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["Plan", "latent_attention", "plan"]

_NAME = "sm90_latent_attention"
HARDWARE = True  # exp2, log2 and 1 / x of the chip; False is for the interpreter
FEW_PROGRAMS = 24  # entries times groups of heads up to which decode is split; free of bits
BUILDS = frozenset(  # vLLM 0.25.1, CUDA 13.0
    {"sha256:af90d0e144bddb52b4b790fe1e01c08d019d53021f5efbfcc245ec8b439258f2"}
)
"""Builds of the library that the gate has certified for this function, digests of their files."""
_admitted: set[str] = set()


def admit(build: str) -> None:
    """Let this process compute with a build that is not certified for latent attention, to certify it."""
    _admitted.add(build)


@dataclass(frozen=True, kw_only=True)
class Plan(segments.Plan):
    """The tables of one step, as `attention.hopper.ops.Plan`; `maker` computes the segments.

    Own kernels decode from the library's tables, so `provider` is "fa3" wherever those are filled.
    """

    maker: Maker


def _require_library() -> None:
    """Raise `DomainError` for a build of the library that is not certified for this function."""
    build = fa3.identity().build
    require(
        build in BUILDS | _admitted,
        _NAME,
        f"FlashAttention-3 of build {build}, whose latent form nothing has certified",
        f"the provider triton, or one of the builds {sorted(BUILDS)}; `isoexec provider certify` compares another",
    )


def plan(
    *,
    requests: int,
    tokens: int,
    most_rows: int,
    most_keys: int,
    kv_segment: int,
    page: int = 0,
    provider: Maker = "triton",
    gradients: bool = False,
    folded: bool | None = None,
    device: torch.device | str = "cuda",
) -> Plan:
    """An empty plan, as `attention.hopper.ops.plan` makes it; `provider` "fa3" is the library, with the own kernel's bits.

    Raises `DomainError` for sizes out of bounds and for a library that is not certified, `fa3.LibraryMissingError` without one.
    """
    if provider == "fa3":
        _require_library()
    made = segments.plan(
        requests=requests,
        tokens=tokens,
        most_rows=most_rows,
        most_keys=most_keys,
        kv_segment=kv_segment,
        page=page,
        provider="fa3" if most_rows == 1 else provider,
        gradients=gradients,
        folded=folded,
        device=device,
    )
    return Plan(**{one.name: getattr(made, one.name) for one in fields(made)}, maker=provider)


def _check(
    q_rope: Tensor, q_latent: Tensor, k_rope: Tensor, latent: Tensor, position: Tensor, tokens: int, page: int
) -> None:
    T, H, _ = q_latent.shape
    shapes = f"q {list(q_rope.shape)} and {list(q_latent.shape)}, keys {list(k_rope.shape)} and {list(latent.shape)}"
    require(
        q_rope.shape == (T, H, ROPE)
        and q_latent.shape == (T, H, LATENT)
        and k_rope.shape[:-1] == latent.shape[:-1]
        and (k_rope.shape[-1], latent.shape[-1]) == (ROPE, LATENT)
        and latent.dim() == (3 if page else 2)
        and (not page or latent.shape[1] == page),
        _NAME,
        shapes,
        f"queries [T, H, {ROPE}] and [T, H, {LATENT}], keys as wide, "
        + (f"in pages of {page}" if page else "[keys, width]"),
    )
    require(
        all(x.dtype == torch.bfloat16 and x.stride(-1) == 1 for x in (q_rope, q_latent, k_rope, latent)),
        _NAME,
        f"{[str(x.dtype) for x in (q_rope, q_latent, k_rope, latent)]}",
        "bfloat16, dense in the last dimension",
    )
    check_rows(_NAME, T, position, tokens)


def _attention(
    q_rope: Tensor,
    q_latent: Tensor,
    k_rope: Tensor,
    latent: Tensor,
    position: Tensor,
    own: Tensor,
    own_pages: Tensor | None,
    past: Tensor,
    past_pages: Tensor | None,
    spans: Tensor,
    owners: Tensor,
    pages: Tensor | None,
    units: Tensor | None,
    maker: str,
    group: str,
    scale: float,
    kv_segment: int,
    page: int,
    tokens: int,
    most_rows: int,
    most_keys: int,
    single: bool,
    folded: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    _check(q_rope, q_latent, k_rope, latent, position, tokens, page)
    T, H, _ = q_latent.shape
    if not T:
        return nothing(q_latent, with_lse)
    merging: dict[str, Any] = {"with_lse": with_lse, "hardware": HARDWARE}
    count = -(-most_keys // kv_segment)
    entries = own.shape[1] - 1 if single else 0
    if 0 < entries * groups_of(H) <= FEW_PROGRAMS:
        sizes = {"requests": spans.shape[1], "kv_segment": kv_segment, "scale": scale, "hardware": HARDWARE}
        split, totals, lse = launch_split(q_rope, q_latent, k_rope, latent, own, own_pages, **sizes)  # type: ignore[arg-type]
        slots, each = (x.view(H, count, T).transpose(0, 1) for x in (lse, totals))
        parts = split.view(count, T, H, LATENT)
        return merged(parts, slots, position, None, kv_segment=kv_segment, totals=each, **merging)
    if maker == "fa3":
        k, v = k_rope.unsqueeze(-2), latent.unsqueeze(-2)

        def attend(
            copies: int,
            table: Tensor,
            of: Tensor | None,
            path: fa3.Path3,
            rows: int,
            out: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]:
            x, y = (t if copies == 1 else t.repeat(copies, 1, 1) for t in (q_rope, q_latent))
            sizes: dict[str, Any] = {"scale": scale, "most_rows": rows, "most_keys": kv_segment}
            return fa3.call(x, k, v, table, of, path=path, out=out, q_v=y, **sizes)

        tables = Tables(
            own=own,
            own_pages=own_pages,
            others=past,
            other_pages=past_pages,
            past="plain",
            requests=spans.shape[1],
            kv_segment=kv_segment,
            most_rows=most_rows,
            single=single,
            folded=folded,
        )
        return by_library(attend, q_latent, position, None, tables, **merging)
    tile = tiles.decode_tile(H) if single else tiles.PREFILL
    held = 1 if single else tiles.tokens_of(tile, H)
    device = q_latent.device
    if not single:
        owners = lines(2, T // held + spans.shape[1], dtype=torch.int32, device=device)
        launch_map(spans[1], owners, unit=held)
    parts = torch.empty(count, T, H, LATENT, dtype=torch.bfloat16, device=device)
    lse = lines(count, H, T, dtype=torch.float32, device=device)
    tiles.launch_tiles(
        *(q_rope, q_latent, k_rope, latent, parts, lse, spans, owners, pages),
        scale=scale,
        kv_segment=kv_segment,
        tile=tile,
        tokens=held,
        hardware=HARDWARE,
    )
    if count == 1:
        return parts[0], kept(lse[0], with_lse)
    return merged(parts, lse, position, None, kv_segment=kv_segment, **merging)


def _fake(q_rope: Tensor, q_latent: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return nothing(q_latent, bool(rest[-1]))


def _grad(
    g: Tensor,
    q_rope: Tensor,
    q_latent: Tensor,
    k_rope: Tensor,
    latent: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Tensor,
    units: Tensor,
    group: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    g = g if g.stride(-1) == 1 else g.contiguous()
    delta = launch_delta(out, g)
    given = Operands.made(q_rope, q_latent, k_rope, latent, lse, delta, g, spans, units, scale=scale)
    dq_rope, dq_latent = launch_queries(given)
    everything = slice(0, len(latent))
    if not group:
        return dq_rope, dq_latent, launch_keys(given, everything, None, torch.bfloat16)
    ranks = resolve(group)

    def make(stage: int, keys: slice, acc: Tensor | None, dtype: torch.dtype, to: Tensor | None) -> Tensor:
        return launch_keys(given, keys, acc, dtype, to)

    dkeys = transport.prepare(ranks, latent.device).module.hand_off(
        make,
        rows=len(latent),
        width=HEAD,
        device=latent.device,
        group=ranks,
        stages=ranks.size(),
        out_dtype=torch.bfloat16,
        name="gradient of latent keys",
    )
    return dq_rope, dq_latent, dkeys


def _grad_fake(
    g: Tensor, q_rope: Tensor, q_latent: Tensor, k_rope: Tensor, latent: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    keys = latent.new_empty(len(latent), HEAD)
    return q_rope.new_empty(q_rope.shape), q_latent.new_empty(q_latent.shape), keys


_grad_op = define(
    f"{_NAME}_grad(Tensor g, Tensor q_rope, Tensor q_latent, Tensor k_rope, Tensor latent, Tensor out, Tensor lse, "
    "Tensor spans, Tensor units, str group, float scale) -> (Tensor, Tensor, Tensor)",
    _grad,
    _grad_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.inputs = len(inputs)
    spans, _, _, units, _, ctx.group, ctx.scale = inputs[9:16]
    ctx.admitted = units is not None and inputs[-1]
    if ctx.admitted:
        ctx.save_for_backward(*inputs[:4], out, lse, spans, units)


def _backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.admitted:
        raise DomainError(
            f"isoexec::{_NAME}",
            "a backward pass",
            "forward passes under torch.no_grad(), or a plan with gradients=True of whole contiguous sequences",
        )
    dq_rope, dq_latent, dkeys = _grad_op(g, *ctx.saved_tensors, ctx.group, ctx.scale)
    found: list[Tensor | None] = [None] * ctx.inputs
    found[:4] = dq_rope, dq_latent, dkeys[:, :ROPE], dkeys[:, ROPE:]
    return tuple(found)


_op = define(
    f"{_NAME}(Tensor q_rope, Tensor q_latent, Tensor k_rope, Tensor latent, Tensor position, Tensor own, "
    "Tensor? own_pages, Tensor past, Tensor? past_pages, Tensor spans, Tensor owners, Tensor? pages, Tensor? units, "
    "str maker, str group, float scale, int kv_segment, int page, int tokens, int most_rows, int most_keys, "
    "bool single, bool folded, bool with_lse) -> (Tensor, Tensor)",
    _attention,
    _fake,
    backward=_backward,
    setup_context=_setup,
)


def latent_attention(
    q_rope: Tensor,
    q_latent: Tensor,
    k_rope: Tensor,
    latent: Tensor,
    position: Tensor,
    step: Plan,
    *,
    scale: float,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Causal latent attention of a step's rows at `position` [T] int32, by a filled plan; [T, H, 512] bf16.

    q_rope [T, H, 64] and the absorbed q_latent [T, H, 512] are this rank's heads; k_rope [keys, 64] and latent [keys, 512], which
    every rank holds whole, or [pages, page, 64] and [pages, page, 512] for a paged plan, such as the two parts of one cache; this
    step's keys are among them. All bf16.

    Differentiable by a plan with `gradients`, else a backward pass raises `DomainError`. Gradients of keys are chains over the
    heads of all ranks of `group` in order, and every rank gets them whole: nothing may be added to them over the group. Raises
    `DomainError` for other shapes and dtypes and for a plan with a window.
    """
    require(step.window == 0, _NAME, f"a plan with a window of {step.window}", "plans without a window")
    inputs = (q_rope, q_latent, k_rope, latent)
    with_lse = step.units is not None and torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    out: Tensor = _op(
        *(*inputs, position, step.own, step.own_pages, step.past, step.past_pages),
        *(step.spans, step.owners, step.pages, step.units, step.maker, name_of(group), scale),
        *(step.kv_segment, step.page, step.tokens, step.most_rows, step.most_keys),
        *(step.single, step.folded, with_lse),
    )[0]
    return out
