# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3 as built into vLLM as a provider of the segments: one code path a head dim, one split, no heuristics.

The library is loaded as a file, without importing vLLM; its identity is the digest of that file. What decides its bits is the
number of keys a block, which follows from the code path and the head dim (and, for short queries, from their number):

| path | 64 | 128 | 256 |
|---|---|---|---|
| causal, more than 64 packed query rows claimed | 128 | 128 | 80 |
| causal, fewer | 192 | 128 | 80 |
| plain, on contiguous keys | 192 | 160, 176 for few rows | 80 |
| sliding window | 160, from the window's start | 128, likewise | 64, likewise |

So every call is causal, with at least `FEWEST` rows claimed. A row's own segment and a decoded token need nothing else. For
rows beyond a segment the causal limit is moved past the segment's end: `spread` by the library's context parallelism (key i
stands at i * TOTAL_STEP of kv_segment * TOTAL_STEP), `window` by a window that never binds, `plain` by no limit at all; the
last two only where their block is the causal one. A real sliding window is refused: FA3 starts its blocks at the window of a
tile's first row, so a row's bits would depend on its neighbours.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from isoexec.contracts.errors import IsoExecError
from isoexec.kernels.attention.hopper.kernel import TOTAL_STEP
from isoexec.kernels.domain import require

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BUILDS",
    "FEWEST",
    "HEAD_DIMS",
    "PAST",
    "Identity",
    "LibraryMissingError",
    "Path3",
    "UncertifiedLibraryError",
    "admit",
    "call",
    "identity",
    "load",
]

Path3 = Literal["causal", "spread", "window", "plain"]
HEAD_DIMS = (64, 128, 256)
FEWEST = {
    64: 65,
    128: 2,
    256: 2,
}  # rows claimed at least; one row would leave the causal path, few rows of 64 its block
PAST: dict[int, Path3] = {64: "spread", 128: "window", 256: "plain"}
WHERE = "ISOEXEC_FA3"
BUILDS = {  # certified by the gate, file digest by file digest
    "sha256:af90d0e144bddb52b4b790fe1e01c08d019d53021f5efbfcc245ec8b439258f2": "vLLM 0.25.1, CUDA 13.0",
}
_FILE = "_vllm_fa3_C.abi3.so"
_NEVER = 1 << 20  # a window no sequence reaches


class LibraryMissingError(IsoExecError):
    """FlashAttention-3 could not be loaded: `reason`."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)

    def __str__(self) -> str:
        return f"FlashAttention-3 is not here: {self.reason}. Install vLLM for CUDA 13, or name its {_FILE} in {WHERE}"


class UncertifiedLibraryError(IsoExecError):
    """FlashAttention-3 is here, and no evidence says what bits this build gives: `build` of `path`."""

    def __init__(self, build: str, path: Path) -> None:
        self.build, self.path = build, path
        super().__init__(build, path)

    def __str__(self) -> str:
        return (
            f"{self.path} is {self.build}, wanted one of the certified builds {sorted(BUILDS.values())}. Install one of them, or "
            "certify this one: fa3.admit(build) for one process, the gate of attention.mma_segments/1, then a line in fa3.BUILDS"
        )


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which library computes: the distribution it came with, if known, the file's digest, torch's version."""

    version: str
    build: str
    torch: str


def _loaded() -> Path | None:
    """The library's file in this process's memory map, whoever loaded it."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next((Path(line.split()[-1]) for line in lines if "_vllm_fa3_C" in line), None)


def _find() -> Path:
    if (found := _loaded()) is not None:
        return found
    if named := os.environ.get(WHERE):
        if not Path(named).is_file():
            raise LibraryMissingError(f"{WHERE} names {named}, which is no file")
        return Path(named)
    spec = find_spec("vllm")
    for place in (spec.submodule_search_locations or []) if spec else []:
        file = Path(place) / "vllm_flash_attn" / _FILE
        if file.is_file():
            return file
    raise LibraryMissingError(
        "vLLM is not installed here" if spec is None else f"its {_FILE} is not built in"
    )


_admitted: set[str] = set()


def admit(build: str) -> None:
    """Let this process compute with a build that is not certified, to certify it."""
    _admitted.add(build)


@cache
def _build(path: Path) -> str:
    return "sha256:" + sha256(path.read_bytes()).hexdigest()


@cache
def load() -> Any:
    """The library's forward as a torch op. Raises `LibraryMissingError`, and `UncertifiedLibraryError` for another build."""
    path = _find()
    if _build(path) not in BUILDS.keys() | _admitted:
        raise UncertifiedLibraryError(_build(path), path)
    try:
        torch.ops.load_library(str(path))
        return torch.ops._vllm_fa3_C.fwd.default
    except (OSError, AttributeError, RuntimeError) as error:
        raise LibraryMissingError(f"{path} does not load: {error}") from error


@cache
def identity() -> Identity:
    """The identity of the library this process computes with; loads it."""
    load()
    path = _loaded()
    if path is None:
        raise LibraryMissingError("its file cannot be seen in /proc/self/maps")
    try:
        distribution = version("vllm")
    except PackageNotFoundError:
        distribution = "unknown"
    return Identity(
        version=distribution,
        build=_build(path),
        torch=torch.__version__,
    )


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    pages: Tensor | None,
    *,
    scale: float,
    path: Path3,
    most_rows: int,
    most_keys: int,
    out: Tensor | None = None,
    splits: int = 1,
    window: tuple[int, int] | None = None,
    q_v: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One call over the entries of `table` (see `kernel.launch_tables`): (out [rows, H, D], lse [H, rows]).

    Rows that no entry has are not written. q [rows, H, D]; k and v [keys, KV, D], or [pages, page, KV, D] with `pages`.
    `splits` other than 1 and a `window` are other functions: the gates use them. With `q_v` [rows, H, V], D being 64 and v's
    rows V wide, a score is q k + q_v v; its blocks have 64 keys on every path.
    """
    D = q.shape[-1]
    require(
        most_rows <= TOTAL_STEP, "sm90_attention", f"{most_rows} rows in one request", f"at most {TOTAL_STEP}"
    )
    overstated = 2 * _NEVER if path == "window" else most_keys
    left, right = window or ((_NEVER, -1) if path == "window" else (-1, -1))
    results = load()(
        q,
        k,
        v,
        None,  # k_new
        None,  # v_new
        q_v,
        out,
        table[0],
        table[3] if pages is None else None,
        None,  # cu_seqlens_k_new
        table[1, :-1],
        table[2, :-1],
        max(FEWEST[D], most_rows),
        overstated,
        pages,
        None,  # kv_batch_idx
        None,  # leftpad_k
        None,  # rotary_cos
        None,  # rotary_sin
        None,  # seqlens_rotary
        None,  # q_descale
        None,  # k_descale
        None,  # v_descale
        scale,
        path in ("causal", "spread"),
        left,
        right,
        0.0,  # softcap
        True,  # is_rotary_interleaved
        None,  # scheduler_metadata
        splits,
        None,  # pack_gqa
        0,  # sm_margin
        None,  # s_aux
        TOTAL_STEP if path == "spread" else 1,
        0,  # cp_rank
        table[4, :-1] if path == "spread" else None,
    )
    return results[0], results[1]
