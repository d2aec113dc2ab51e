# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel for sm_90 with no GPU in sight and prints `{kernel: registers, spills, ...}` as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from compiled_logprobs import built as logprobs  # type: ignore[import-not-found]
from compiled_rows import rows  # type: ignore[import-not-found]
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from isoexec.kernels.linear.hopper import kernel as linear
from isoexec.kernels.linear.hopper.table import tiles

SM90 = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _each(kind: Any) -> list[tuple[tuple[int, ...], str]]:
    """The types of an argument, and where they stand in it: several in a tuple."""
    return [((), kind)] if isinstance(kind, str) else [((i,), one) for i, one in enumerate(kind)]


def compiled(kernel: Any, types: dict[str, Any], constants: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Compile with pointers known to be multiples of 16, and integers that a launch would look at, as torch gives them."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    flat = [
        ((i, *path), kind) for i, name in enumerate(kernel.arg_names) for path, kind in _each(signature[name])
    ]
    aligned = {
        path: [["tt.divisibility", 16]]
        for path, kind in flat
        if kind.startswith("*") or (kind in ("i32", "i64") and not kernel.params[path[0]].do_not_specialize)
    }
    source = ASTSource(kernel, signature, constants, aligned)
    built = triton.compile(source, target=SM90, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [str(TOOLS / "cuobjdump"), "-res-usage", cubin.name], capture_output=True, text=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage.stdout)
    assert found, usage.stdout + usage.stderr
    ptx = built.asm["ptx"]
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "local": int(found[3]),
        "shared": built.metadata.shared,
        "fused": len(re.findall(r"\bfma\.rn\.f(?:32|64)", ptx)),
        "flushing": len(re.findall(r"\.ftz\b", ptx)),
        "approximate": len(re.findall(r"\.(?:approx|full)\b", ptx)),
        "matrix": len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx)),
    }


def main() -> None:
    plain = {"enable_fp_fusion": False}
    b = "*bf16"
    results: dict[str, Any] = {}
    results |= rows(compiled)
    results |= logprobs(compiled)
    sizes = {"M": "i32", "N": "i32", "K": "i32"}
    used = {tile for steps in tiles().values() for _, tile in steps if tile}
    for tile in [*sorted(used, key=str)[:: max(1, len(used) // 4)], linear.REFERENCE]:
        cut = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
        tuning = {"num_warps": tile.warps, "num_stages": tile.stages, **plain}
        if tile.kind == "pointers":
            found = compiled(linear.pointer_kernel, {"x": b, "w": b, "out": b, **sizes}, cut, **tuning)
        else:
            maps = {
                "x": f"tensordesc<bf16[{tile.rows}, {tile.depth}]>",
                "w": f"tensordesc<bf16[{tile.columns}, {tile.depth}]>",
                "out": b,
            }
            swap = {"SWAP": tile.kind == "swapped"}
            found = compiled(linear.map_kernel, {**maps, **sizes}, {**cut, **swap}, **tuning)
        results[
            f"linear {tile.kind} {tile.rows}x{tile.columns}x{tile.depth} w{tile.warps} s{tile.stages}"
        ] = found
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
