# SPDX-License-Identifier: Apache-2.0
"""The sm90 attention as opaque torch ops: segments by FlashAttention-3 or by an own kernel, one merge, one gradient.

Who computes the segments is the plan's `provider`, which a contract chooses; a missing library is an error, never another
provider. Only the own kernel has windows.

A step's `Plan` is made once and used by every layer. Its tables lie on the device and are filled there, so a CUDA graph may
hold both `fill` and the op: what changes from step to step is in tensors, what is in integers are upper bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from isoexec.kernels.attention.hopper import fa3
from isoexec.kernels.attention.hopper.backward import UNIT, launch_gradients
from isoexec.kernels.attention.hopper.kernel import (
    OWN,
    PAST,
    ROWS_OF_TABLE,
    SINGLE,
    launch_tables,
)
from isoexec.kernels.attention.hopper.naive import BLOCK
from isoexec.kernels.attention.hopper.segments import (
    Tables,
    by_library,
    check_rows,
    kept,
    lines,
    merged,
    nothing,
)
from isoexec.kernels.attention.hopper.split import MOST_GROUP, Tuning, launch_split
from isoexec.kernels.attention.hopper.tiles import (
    DECODE,
    PREFILL,
    WINDOW,
    launch_map,
    launch_tiles,
    tokens_of,
)
from isoexec.kernels.domain import DomainError, require
from isoexec.kernels.hopper.library import define

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Plan", "attention", "plan"]

Maker = Literal["fa3", "triton"]
MOST_SEGMENTS = 32
_FOLD_ROWS = (
    4096  # query rows up to which all past segments share one call over copies of the queries; free of bits
)

# entries times KV heads, by head dim, up to which decode is split by keys and columns
FEW_PROGRAMS = {64: 64, 128: 32, 256: 32}
_SPLIT = Tuning(columns=32, warps=4, stages=9, score_blocks=4, score_warps=4, score_stages=5, ahead=4)
SPLIT = {
    64: _SPLIT,
    128: replace(_SPLIT, score_blocks=2, score_stages=3),
    256: replace(_SPLIT, score_blocks=1, score_stages=1),
}
HARDWARE = True  # exp2, log2 and 1 / x of the chip; False is for the interpreter
TILED: set[int] = set()  # head dims whose decode the own kernel serves instead of the library; free of bits


def split_for(entries: int, kv_heads: int, group: int, head_dim: int) -> Tuning | None:
    """How few decode entries are split, or None where the library serves them; both have the same bits."""
    few = entries * kv_heads <= FEW_PROGRAMS[head_dim] and group <= MOST_GROUP
    return SPLIT[head_dim] if few else None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The tables of one step: what `attention` is called with.

    `provider` computes the segments, and `gradient` names who of `GRADIENTS` computes theirs; `window` is the keys that a row
    sees at most, its own included, or 0 for all. With `gradients` every request brings the rows of all its keys. `spans` [4, B]:
    a request's first row, rows, keys, first key. `single` says that every request has at most one row, so own and past segments
    share a call. `most_rows`, `most_keys` and the shapes are upper bounds; `fill` refuses nothing that is beyond them, so choose
    them by the engine's own limits.
    """

    provider: Maker
    kv_segment: int
    window: int
    page: int
    requests: int
    tokens: int
    most_rows: int
    most_keys: int
    single: bool
    folded: bool
    own: Tensor
    own_pages: Tensor | None
    past: Tensor
    past_pages: Tensor | None
    spans: Tensor
    owners: Tensor
    pages: Tensor | None
    units: Tensor | None
    gradient: str = "own"

    def fill(
        self, q_start: Tensor, lengths: Tensor, *, k_start: Tensor | None = None, blocks: Tensor | None = None
    ) -> None:
        """Write the tables from int32 device tensors: q_start [B + 1], lengths [B] (keys, this step's included).

        Keys lie contiguously from k_start [B] on, or in pages blocks [B, width].
        """
        require(
            (k_start is None) == (self.page > 0) and (blocks is None) == (self.page == 0),
            "sm90_attention",
            "k_start" if blocks is None else "blocks",
            "blocks for a paged plan, k_start for a contiguous one",
        )
        for tensor in (q_start, lengths, k_start, blocks):
            require(
                tensor is None or (tensor.dtype == torch.int32 and tensor.stride(-1) == 1),
                "sm90_attention",
                "" if tensor is None else f"{tensor.dtype}, strides {tensor.stride()}",
                "int32 tables, dense in their last dimension",
            )
        torch.sub(q_start[1:], q_start[:-1], out=self.spans[1])
        self.spans[0].copy_(q_start[:-1])
        self.spans[2].copy_(lengths)
        if k_start is not None:
            self.spans[3].copy_(k_start)
        if self.single:
            launch_map(self.spans[1], self.owners, unit=1)
        if self.units is not None:
            launch_map(self.spans[1], self.units, unit=UNIT)
        if self.pages is not None and blocks is not None:
            width = min(self.pages.shape[1], blocks.shape[1])
            self.pages[:, :width].copy_(blocks[:, :width])
        if self.provider == "triton":
            return
        calls: list[tuple[int, Tensor, Tensor | None]] = [
            (SINGLE if self.single else OWN, self.own, self.own_pages)
        ]
        if self.past.numel():
            calls.append((PAST, self.past, self.past_pages))
        for kind, table, pages in calls:
            launch_tables(
                kind,
                q_start,
                lengths,
                k_start,
                blocks,
                table,
                pages,
                tokens=self.tokens,
                kv_segment=self.kv_segment,
                page=self.page,
                folded=kind == SINGLE or (kind == PAST and self.folded),
            )


def plan(
    *,
    requests: int,
    tokens: int,
    most_rows: int,
    most_keys: int,
    kv_segment: int,
    page: int = 0,
    provider: Maker = "fa3",
    window: int = 0,
    gradients: bool = False,
    folded: bool | None = None,
    device: torch.device | str = "cuda",
) -> Plan:
    """An empty plan for up to `requests` requests, `tokens` query rows, `most_rows` rows and `most_keys` keys in one request.

    `page` is 0 for contiguous keys. `provider` "triton" is the own kernel, slower and with the same bits; a `window` (another
    function) needs it. `gradients` asks for whole sequences, contiguous: each request's rows are those of all its keys.
    Fixed by these numbers: how many calls of the library, over how many entries.
    """
    require(
        0 < most_rows <= tokens and most_keys > 0 and requests > 0,
        "sm90_attention",
        f"{requests} requests, {tokens} tokens, {most_rows} rows, {most_keys} keys",
        "positive sizes, and no more rows in a request than tokens",
    )
    require(
        kv_segment > 0 and (page == 0 or (page > 0 and kv_segment % page == 0)),
        "sm90_attention",
        f"kv_segment {kv_segment} in pages of {page}",
        "segments of whole pages",
    )
    require(
        provider in ("fa3", "triton") and window >= 0 and (window == 0 or provider == "triton"),
        "sm90_attention",
        f"provider {provider!r} with a window of {window}",
        "fa3 without a window, or triton: the library starts its blocks at the window of a tile's first row",
    )
    require(
        not (gradients and page), "sm90_attention", f"gradients through pages of {page}", "contiguous keys"
    )
    count = -(-most_keys // kv_segment)
    if window:
        count = min(count, (window + kv_segment - 2) // kv_segment + 1)  # that a row sees
    require(
        count <= MOST_SEGMENTS,
        "sm90_attention",
        f"{most_keys} keys in segments of {kv_segment}",
        f"at most {MOST_SEGMENTS} segments",
    )
    single = most_rows == 1 and not gradients
    fold = tokens <= _FOLD_ROWS if folded is None else folded
    touched = min(count, (most_rows + kv_segment - 2) // kv_segment + 1)

    def table(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=device)

    def laid(rows: int, width: int) -> Tensor:
        return lines(rows, width, dtype=torch.int32, device=device).zero_()

    own = requests * (count if single else touched) if provider == "fa3" else 0
    past = 0 if single or provider != "fa3" else requests * (count - 1)
    per = kv_segment // page if page else 0
    return Plan(
        provider=provider,
        kv_segment=kv_segment,
        window=window,
        page=page,
        requests=requests,
        tokens=tokens,
        most_rows=most_rows,
        most_keys=most_keys,
        single=single,
        folded=fold,
        own=table(ROWS_OF_TABLE, own + 1),
        own_pages=table(own, per) if page else None,
        past=table(ROWS_OF_TABLE, past + 1 if past else 0),
        past_pages=table(past, per) if page else None,
        spans=laid(4, requests),
        owners=laid(2, requests if single else 0),
        pages=table(requests, -(-most_keys // page)) if page else None,
        units=laid(2, tokens // UNIT + requests) if gradients else None,
    )


def _check(q: Tensor, k: Tensor, v: Tensor, position: Tensor, sinks: Tensor | None, tokens: int) -> None:
    T, H, D = q.shape
    require(
        D in BLOCK
        and k.shape[-1] == v.shape[-1] == D
        and H % k.shape[-2] == 0
        and k.shape[:-1] == v.shape[:-1],
        "sm90_attention",
        f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
        f"head dims {sorted(BLOCK)}, keys and values of one shape, query heads a multiple of theirs",
    )
    require(
        all(x.dtype == torch.bfloat16 and x.stride(-1) == 1 for x in (q, k, v)),
        "sm90_attention",
        f"{[str(x.dtype) for x in (q, k, v)]}",
        "bfloat16, dense in the last dimension",
    )
    check_rows("sm90_attention", T, position, tokens)
    require(
        sinks is None or (sinks.shape == (H,) and sinks.dtype == torch.float32 and sinks.is_contiguous()),
        "sm90_attention",
        "" if sinks is None else f"sinks {list(sinks.shape)} {sinks.dtype}",
        "contiguous fp32 sinks, one a query head",
    )


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    own: Tensor,
    own_pages: Tensor | None,
    past: Tensor,
    past_pages: Tensor | None,
    spans: Tensor,
    owners: Tensor,
    pages: Tensor | None,
    units: Tensor | None,
    sinks: Tensor | None,
    gradient: str,
    scale: float,
    kv_segment: int,
    requests: int,
    tokens: int,
    most_rows: int,
    most_keys: int,
    single: bool,
    folded: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, position, sinks, tokens)
    T, H, D = q.shape
    if not T:
        return nothing(q, with_lse)
    if single and D in TILED:
        sizes = (gradient, scale, kv_segment, 0, tokens, most_keys, single, with_lse)
        return _tiles(q, k, v, position, spans, owners, pages, units, sinks, *sizes)
    KV, given = k.shape[-2], dict[str, Any](with_lse=with_lse, hardware=HARDWARE)
    tuning = split_for(own.shape[1] - 1, KV, H // KV, D) if single else None
    if tuning is not None:
        n = (own.shape[1] - 1) // requests
        parts, totals, lse = launch_split(
            *(q, k, v, own, own_pages),
            requests=requests,
            kv_segment=kv_segment,
            scale=scale,
            tuning=tuning,
            hardware=HARDWARE,
        )
        slots, each = (x.view(H, n, T).transpose(0, 1) for x in (lse, totals))
        return merged(
            *(parts.view(n, T, H, D), slots, position, sinks), kv_segment=kv_segment, totals=each, **given
        )

    def attend(
        copies: int,
        table: Tensor,
        of: Tensor | None,
        path: fa3.Path3,
        rows: int,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        queries = q if copies == 1 else q.repeat(copies, 1, 1)
        return fa3.call(
            *(queries, k, v, table, of), scale=scale, path=path, most_rows=rows, most_keys=kv_segment, out=out
        )

    tables = Tables(
        own=own,
        own_pages=own_pages,
        others=past,
        other_pages=past_pages,
        past=fa3.PAST[D],
        requests=requests,
        kv_segment=kv_segment,
        most_rows=most_rows,
        single=single,
        folded=folded,
    )
    return by_library(attend, q, position, sinks, tables, **given)


def _fake(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return nothing(q, bool(rest[-1]))


def _tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    spans: Tensor,
    owners: Tensor,
    pages: Tensor | None,
    units: Tensor | None,
    sinks: Tensor | None,
    gradient: str,
    scale: float,
    kv_segment: int,
    window: int,
    tokens: int,
    most_keys: int,
    single: bool,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, position, sinks, tokens)
    T, H, D = q.shape
    if not T:
        return nothing(q, with_lse)
    group = H // k.shape[-2]
    tile = (DECODE if single else WINDOW if window else PREFILL)[D]
    held = 1 if single else tokens_of(tile, group)
    if not single:
        owners = lines(2, T // held + spans.shape[1], dtype=torch.int32, device=q.device)
        launch_map(spans[1], owners, unit=held)
    slots = segments = -(-most_keys // kv_segment)
    if window:
        slots = min(slots, (window + kv_segment - 2) // kv_segment + 1)
        segments = min(segments, (window + held + kv_segment - 3) // kv_segment + 1)
    parts = torch.empty(slots, T, H, D, dtype=q.dtype, device=q.device)
    lse = lines(slots, H, T, dtype=torch.float32, device=q.device)
    launch_tiles(
        *(q, k, v, parts, lse, spans, owners, pages),
        scale=scale,
        kv_segment=kv_segment,
        window=window,
        segments=segments,
        tile=tile,
        tokens=held,
        hardware=HARDWARE,
    )
    if slots == 1 and sinks is None:
        return parts[0], kept(lse[0], with_lse)
    return merged(
        *(parts, lse, position, sinks),
        kv_segment=kv_segment,
        window=window,
        with_lse=with_lse,
        hardware=HARDWARE,
    )


def _grad(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Tensor,
    units: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    most_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = {"scale": scale, "window": window, "most_rows": most_rows, "hardware": HARDWARE}
    dq, dk, dv, dsinks = launch_gradients(q, k, v, out, lse, g, spans, units, sinks, **sizes)  # type: ignore[arg-type]
    return dq, dk, dv, torch.empty(0, dtype=torch.float32, device=q.device) if dsinks is None else dsinks


def _grad_fake(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = rest[4]
    dsinks = q.new_empty(0, dtype=torch.float32) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


_TABLES = "Tensor spans, Tensor owners, Tensor? pages, Tensor? units, Tensor? sinks, str gradient"
_FA3 = (
    "sm90_attention(Tensor q, Tensor k, Tensor v, Tensor position, Tensor own, Tensor? own_pages, Tensor past, "
    f"Tensor? past_pages, {_TABLES}, float scale, int kv_segment, int requests, int tokens, int most_rows, "
    "int most_keys, bool single, bool folded, bool with_lse) -> (Tensor, Tensor)"
)
_TILES = (
    f"sm90_attention_tiles(Tensor q, Tensor k, Tensor v, Tensor position, {_TABLES}, float scale, int kv_segment, "
    "int window, int tokens, int most_keys, bool single, bool with_lse) -> (Tensor, Tensor)"
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor], *, tiles: bool) -> None:
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.inputs, ctx.tiles = len(inputs), tiles
    at = 4 if tiles else 8
    spans, _, _, units, sinks, ctx.gradient, ctx.scale = inputs[at : at + 7]
    ctx.window = inputs[at + 8] if tiles else 0
    # most_keys of a tile's, most_rows of the library's: a plan with gradients has both alike
    ctx.most = inputs[at + 10]
    ctx.admitted = units is not None and inputs[-1]
    if ctx.admitted:
        ctx.save_for_backward(*inputs[:3], out, lse, spans, units, sinks)


def _setup_fa3(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _setup(ctx, inputs, output, tiles=False)


def _setup_tiles(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _setup(ctx, inputs, output, tiles=True)


def _backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.admitted:
        raise DomainError(
            "isoexec::sm90_attention",
            "a backward pass",
            "forward passes under torch.no_grad(), or a plan with gradients=True of whole contiguous sequences",
        )
    sinks = ctx.saved_tensors[-1]
    grad = GRADIENTS[ctx.gradient]
    dq, dk, dv, dsinks = grad(g, *ctx.saved_tensors, ctx.scale, ctx.window, ctx.most)
    found: list[Tensor | None] = [None] * ctx.inputs
    found[:3] = dq, dk, dv
    found[8 if ctx.tiles else 12] = None if sinks is None else dsinks
    return tuple(found)


_grad_op = define(
    "sm90_attention_grad(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor spans, Tensor units, "
    "Tensor? sinks, float scale, int window, int most_rows) -> (Tensor, Tensor, Tensor, Tensor)",
    _grad,
    _grad_fake,
)
GRADIENTS = {"own": _grad_op}  # by a plan's `gradient`; `attention_cudnn` adds its own
_op = define(_FA3, _attention, _fake, backward=_backward, setup_context=_setup_fa3)
_tiles_op = define(_TILES, _tiles, _fake, backward=_backward, setup_context=_setup_tiles)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    step: Plan,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a step's rows: q [T, H, D] bf16 at `position` [T] int32, by a filled plan; [T, H, D] bf16.

    k and v are [keys, KV, D], or [pages, page, KV, D] for a paged plan; this step's keys are among them. `sinks` [H] fp32 are
    logits without a value. Differentiable in q, k, v and sinks by a plan with `gradients`, else a backward pass raises
    `DomainError`. Raises `DomainError` outside head dims 64, 128, 256 and `fa3.LibraryMissingError` without the library.
    """
    with_lse = (
        step.units is not None
        and torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    )
    tables = (step.spans, step.owners, step.pages, step.units, sinks, step.gradient, scale, step.kv_segment)
    if step.provider == "triton":
        sizes = (step.window, step.tokens, step.most_keys, step.single, with_lse)
        out: Tensor = _tiles_op(q, k, v, position, *tables, *sizes)[0]
    else:
        calls = (step.own, step.own_pages, step.past, step.past_pages)
        bounds = (step.requests, step.tokens, step.most_rows, step.most_keys)
        out = _op(q, k, v, position, *calls, *tables, *bounds, step.single, step.folded, with_lse)[0]
    return out
