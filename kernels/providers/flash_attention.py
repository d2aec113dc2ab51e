# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 as built into vLLM, as a provider of attention's segments; its version is the digest of its file.

What is called is the way our ops call it: no other path of the library has the functions' bits. A call takes the last rows of
one sequence and all its keys, packed or in pages, so the same call is prefill, chunk, drafted tokens and decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["held", "latent_segments", "segments", "version"]

Call = Callable[..., "Tensor"]


def version() -> str:
    """`vllm_fa3 sha256:...`: the digest of the file that is loaded. Raises where none is, or one that nothing certifies."""
    from isoexec.kernels.attention.hopper import fa3

    return f"vllm_fa3 {fa3.identity().build}"


@contextmanager
def held() -> Iterator[None]:
    """Let this process compare whatever build is here, and leave nothing to own kernels that would serve few requests."""
    from isoexec.kernels.attention.hopper import fa3
    from isoexec.kernels.attention.hopper import ops as attention
    from isoexec.kernels.latent_attention.hopper import ops as latent

    try:
        fa3.load()
    except fa3.UncertifiedLibraryError as found:
        fa3.admit(found.build)
    latent.admit(fa3.identity().build)
    few, tiled, latent_few = attention.FEW_PROGRAMS, set(attention.TILED), latent.FEW_PROGRAMS
    attention.FEW_PROGRAMS, latent.FEW_PROGRAMS = dict.fromkeys(few, 0), 0
    attention.TILED.clear()
    try:
        yield
    finally:
        attention.FEW_PROGRAMS, latent.FEW_PROGRAMS = few, latent_few
        attention.TILED.update(tiled)


def segments(constants: Mapping[str, Any]) -> Call:
    """attention.mma_segments/1: q `[rows, H, D]`, k and v `[keys, KV, D]`."""
    from isoexec.kernels.attention.hopper.ops import attention, plan

    def call(q: Tensor, k: Tensor, v: Tensor, scale: float, page: int = 0) -> Tensor:
        keys, position, step = _step(plan, q, [k, v], constants, page)
        return attention(q, keys[0], keys[1], position, step, scale=scale)

    return call


def latent_segments(constants: Mapping[str, Any]) -> Call:
    """attention.latent_segments/1: q_rope `[rows, H, 64]` and q_latent `[rows, H, 512]`, keys by `64` and `512`."""
    from isoexec.kernels.latent_attention.hopper.ops import latent_attention, plan

    def call(
        q_rope: Tensor, q_latent: Tensor, k_rope: Tensor, latent: Tensor, scale: float, page: int = 0
    ) -> Tensor:
        keys, position, step = _step(plan, q_rope, [k_rope, latent], constants, page)
        return latent_attention(q_rope, q_latent, keys[0], keys[1], position, step, scale=scale)

    return call


def _step(
    plan: Callable[..., Any], q: Tensor, keys: list[Tensor], constants: Mapping[str, Any], page: int
) -> tuple[list[Tensor], Tensor, Any]:
    """Keys as the op takes them, positions of the rows, and a filled plan by the library."""
    rows, count, device = len(q), len(keys[0]), q.device

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    sizes = {"requests": 1, "tokens": rows, "most_rows": rows, "most_keys": count, "page": page}
    step = plan(**sizes, kv_segment=int(constants["kv_segment"]), provider="fa3", device=device)
    place = torch.arange(count - rows, count, dtype=torch.int32, device=device)
    if not page:
        step.fill(ints(0, rows), ints(count), k_start=ints(0))
        return keys, place, step
    pages = -(-count // page)
    blocks = torch.arange(pages, dtype=torch.int32, device=device).flip(0)  # the first page lies last
    step.fill(ints(0, rows), ints(count), blocks=blocks[None])
    return [_paged(x, page, blocks) for x in keys], place, step


def _paged(x: Tensor, page: int, blocks: Tensor) -> Tensor:
    cache = x.new_zeros(len(blocks) * page, *x.shape[1:])
    cache[: len(x)] = x
    cache = cache.view(len(blocks), page, *x.shape[1:])
    return cache[blocks.argsort()].contiguous()
