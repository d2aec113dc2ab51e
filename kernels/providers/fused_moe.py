# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton kernel of grouped products, taken out of its source file: vLLM itself is not imported, nor need it be installed.

The file is that of the vLLM that Python finds, or, where there is none, the one that ISOEXEC_FUSED_MOE names: copy
`vllm/model_executor/layers/fused_moe/fused_moe.py` to a machine that has only torch and triton. Its version is the digest of the
two functions taken, so another release with the same kernel is the same provider.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isoexec.contracts.digests import digest_bytes
from isoexec.contracts.errors import EvidenceError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VARIABLE", "Blocks", "blocks", "grouped", "multiply", "version"]

VARIABLE = "ISOEXEC_FUSED_MOE"
_INSIDE = Path("model_executor/layers/fused_moe/fused_moe.py")
_FUNCTIONS = ("write_zeros_to_output", "fused_moe_kernel")
_HEAD = "import triton\nimport triton.language as tl\n\n\n"
# rows, columns and depth of a block, as vLLM takes them without a tuned file: few rows an expert, and many
_FEW = (16, 64, 64)
_MANY = (64, 64, 32)


def _source() -> Path:
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    found = importlib.util.find_spec("vllm")
    places = [Path(one) / _INSIDE for one in (found.submodule_search_locations or ())] if found else []
    here = next((place for place in places if place.is_file()), None)
    if here is None:
        raise EvidenceError(
            field="provider.version",
            wanted="vLLM's fused_moe.py",
            found="no vllm in this environment",
            fix=f"set {VARIABLE} to a copy of vllm/{_INSIDE}",
        )
    return here


@cache
def _taken() -> str:
    path = _source()
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EvidenceError(
            field="provider.version", wanted="vLLM's fused_moe.py", found=str(error), fix=f"mend {VARIABLE}"
        ) from error
    parts = {n.name: ast.unparse(n) for n in tree.body if isinstance(n, ast.FunctionDef)}
    missing = [name for name in _FUNCTIONS if name not in parts]
    if missing:
        raise EvidenceError(
            field="provider.version",
            wanted=f"the functions {', '.join(_FUNCTIONS)}",
            found=f"no {', '.join(missing)} in {path}",
            fix="name the file of another vLLM",
        )
    return _HEAD + "\n\n\n".join(parts[name] for name in _FUNCTIONS) + "\n"


def version() -> str:
    """`fused_moe_kernel sha256:...`: the digest of its text without comments and layout."""
    return f"fused_moe_kernel {digest_bytes(_taken().encode())}"


@cache
def _kernel() -> Any:
    # Triton reads a kernel's text from its file, so it has one for as long as the process lives
    path = Path(tempfile.mkdtemp(prefix="isoexec-fused-moe-")) / "fused_moe_kernel.py"
    path.write_text(_taken(), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module.fused_moe_kernel


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The kernel's plan: the rows of each block, padded with one that there is not, its expert, and how many slots that makes."""

    slots: Tensor
    owners: Tensor
    padded: Tensor
    sides: tuple[int, int, int]  # rows, columns and depth of a block


def blocks(ends: Tensor, rows: int) -> Blocks:
    """Plan `rows` rows, in the order of experts, whose last rows are before `ends [E]`. The host reads them."""
    sides = _FEW if rows <= 16 * len(ends) else _MANY
    height = sides[0]
    count = torch.diff(ends.cpu().long(), prepend=torch.zeros(1, dtype=torch.int64))
    many = -(-count // height)
    slots = torch.full((int(many.sum()) * height,), rows, dtype=torch.int32)
    at, begin = 0, 0
    for n, b in zip(count.tolist(), many.tolist(), strict=True):
        slots[at : at + n] = torch.arange(begin, begin + n, dtype=torch.int32)
        at, begin = at + b * height, begin + n
    owners = torch.repeat_interleave(torch.arange(len(ends)), many).to(torch.int32)
    padded = torch.tensor([len(slots)], dtype=torch.int32)
    return Blocks(
        slots=slots.to(ends.device),
        owners=owners.to(ends.device),
        padded=padded.to(ends.device),
        sides=sides,
    )


def multiply(x: Tensor, w: Tensor, plan: Blocks) -> Tensor:
    """Planned rows `x [R, K]` by `w [E, N, K]`: bf16 `[R, N]`. Waits for nothing."""
    import triton.language as tl

    R, K = x.shape
    N = w.shape[1]
    rows, columns, depth = plan.sides
    out = torch.empty(R, N, dtype=torch.bfloat16, device=x.device)
    off = dict.fromkeys(
        ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "per_channel_quant", "HAS_BIAS", "SWAP_AB"), False
    )
    strides = (x.stride(0), x.stride(1), w.stride(0), w.stride(2), w.stride(1), out.stride(0), out.stride(1))
    grid = (len(plan.owners) * -(-N // columns),)
    _kernel()[grid](
        *(x, w, out, None, None, None, None, plan.slots, plan.owners, plan.padded),
        *(N, K, len(plan.slots), R, *strides),
        *([0] * 7),  # strides of scales and a bias that are not there
        group_n=0,
        group_k=0,
        naive_block_assignment=False,
        BLOCK_SIZE_M=rows,
        BLOCK_SIZE_N=columns,
        BLOCK_SIZE_K=depth,
        GROUP_SIZE_M=8,
        SPLIT_K=1,
        MUL_ROUTED_WEIGHT=False,
        top_k=1,
        compute_type=tl.bfloat16,
        **off,
        num_warps=4,
        num_stages=4,
    )
    return out


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Rows `x [R, K]` in the order of experts, whose last rows are before `ends [E]`, by `w [E, N, K]`: bf16 `[R, N]`."""
    return multiply(x, w, blocks(ends, len(x)))
