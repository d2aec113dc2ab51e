# SPDX-License-Identifier: Apache-2.0
"""Every function a contract can name, where its kernel lives, and the digest of its source."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoexec.contracts.digests import digest_bytes, digest_of
from isoexec.kernels.attention.naive import QUERY_TILE
from isoexec.kernels.canaries import canary, canary_digest, expected_digest, output_digest, reference
from isoexec.kernels.domain import DomainError
from isoexec.kernels.grad_norm.naive import BITS
from isoexec.kernels.linear.naive import ROW_TILE
from isoexec.kernels.rope.naive import LENGTH

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "FUNCTIONS",
    "Function",
    "canary",
    "canary_digest",
    "check_constants",
    "expected_digest",
    "output_digest",
    "reference",
    "source_digest",
]

_ROOT = Path(__file__).resolve().parent
_SHARED = ("domain.py", "groups.py", "library.py", "slices.py", "sums.py")


@dataclass(frozen=True, kw_only=True)
class Function:
    """One exact rounding schedule.

    `module` is the package that computes it, `ops` the names it exports; `fixed` are constants that its code fixes, `free`
    those that a contract chooses within what the kernel's domain admits.
    """

    id: str
    version: int
    module: str
    ops: tuple[str, ...]
    fixed: tuple[tuple[str, Any], ...] = ()
    free: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`id/version`, as a contract writes it."""
        return f"{self.id}/{self.version}"


_ALL = (
    Function(
        id="embedding.lookup",
        version=1,
        module="isoexec.kernels.embedding",
        ops=("embedding", "vocab_parallel_embedding"),
    ),
    Function(
        id="rms_norm.tree",
        version=1,
        module="isoexec.kernels.rms_norm",
        ops=("rms_norm", "add_rms_norm", "residual_add", "rms_norm_grad"),
        fixed=(("reduce", "halving_tree"), ("accumulate", "float32")),
    ),
    Function(
        id="linear.chain",
        version=1,
        module="isoexec.kernels.linear",
        ops=("pack_weight", "chain", "hand_off", "column_linear", "row_linear"),
        fixed=(("row_tile", ROW_TILE), ("accumulate", "float32")),
        free=("k_block", "boundary"),
    ),
    Function(
        id="rope.neox_fp32",
        version=1,
        module="isoexec.kernels.rope",
        ops=("rope", "rope_grad"),
        fixed=(("table", "float64_to_float32"), ("length", LENGTH)),
    ),
    Function(
        id="attention.segments",
        version=1,
        module="isoexec.kernels.attention",
        ops=("attention_varlen", "PagedPlan", "attention_paged"),
        fixed=(("query_tile", QUERY_TILE),),
        free=("kv_segment",),
    ),
    Function(id="silu_mul.exp", version=1, module="isoexec.kernels.silu_mul", ops=("silu_mul",)),
    Function(
        id="logprobs.leaves",
        version=1,
        module="isoexec.kernels.logprobs",
        ops=("log_softmax", "token_logprobs"),
        free=("vocab_leaves",),
    ),
    Function(
        id="grad_norm.exact",
        version=1,
        module="isoexec.kernels.grad_norm",
        ops=("exact_sq_sum",),
        fixed=(("bits", BITS),),
    ),
)

FUNCTIONS: dict[str, Function] = {f.name: f for f in _ALL}


def _function(function_id: str) -> Function:
    if function_id not in FUNCTIONS:
        raise DomainError("registry", f"function {function_id!r}", f"the functions {sorted(FUNCTIONS)}")
    return FUNCTIONS[function_id]


@cache
def source_digest(function_id: str) -> str:
    """`sha256:...` over the function's own source files and those all kernels share.

    File names are relative to their folder and line ends are normalised, so the digest does not depend on where or how the
    package is installed. It is read once a process: what runs is what was loaded.
    """
    folder = _ROOT / _function(function_id).module.rpartition(".")[2]
    files = {f"own/{p.name}": p for p in folder.glob("*.py")} | {f"shared/{n}": _ROOT / n for n in _SHARED}
    return digest_of(
        {
            name: digest_bytes(b"\n".join(line.rstrip() for line in path.read_bytes().splitlines()))
            for name, path in files.items()
        }
    )


def check_constants(function_id: str, constants: Mapping[str, Any]) -> None:
    """Raise `DomainError` where a contract's constants are not those this code computes with, or lack one it needs."""
    function = _function(function_id)
    fixed = dict(function.fixed)
    for name in set(constants) | set(fixed) | set(function.free):
        found = constants.get(name)
        if name in fixed:
            admitted = found == fixed[name]
            wanted = f"{name} {fixed[name]}"
        else:
            admitted = name in function.free and found is not None
            wanted = (
                f"{name} given"
                if name in function.free
                else f"the constants {sorted([*fixed, *function.free])}"
            )
        if not admitted:
            raise DomainError(function_id, f"{name} {found!r}", wanted)
