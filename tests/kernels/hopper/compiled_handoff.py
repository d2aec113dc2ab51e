# SPDX-License-Identifier: Apache-2.0
"""Compiles the hand-off's kernels for sm_90 with no GPU in sight and prints `{kernel: registers, spills, ...}` as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from isoexec.kernels.linear.hopper.handoff import moves
from isoexec.kernels.linear.hopper.handoff.kernel import Cut, chain_kernel

SM90 = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PLACE = {"bases": "*i64", "state": "*i64", "mirror": "*i64", "patience": "i64"}
ROUND = {"patience", "N", "K", "width", "pitch", "src_pitch", "dst_pitch"}  # multiples of 16


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> dict[str, Any]:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ROUND
    }
    built = triton.compile(ASTSource(kernel, signature, constants, aligned), target=SM90, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [str(TOOLS / "cuobjdump"), "-res-usage", cubin.name], capture_output=True, text=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage.stdout)
    assert found, usage.stdout + usage.stderr
    ptx = built.asm["ptx"]

    def count(pattern: str) -> int:
        return len(re.findall(pattern, ptx))

    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "local": int(found[3]),
        "shared": built.metadata.shared,
        "warps": options["num_warps"],
        "matrix": count(r"wgmma\.mma_async|mma\.sync"),
        "map_loads": count(r"cp\.async\.bulk\.tensor"),
        "wide_stores": count(r"st\.global\S*\.v4"),
        "wide_loads": count(r"ld\.global\S*\.v4"),
        "acquire": count(r"ld\.global\.sys\.acquire"),
        "release": count(r"atom\S*\.sys\S*\.release|atom\S*\.release\S*\.sys"),
        "fused": count(r"\bfma\.rn\.f(?:32|64)"),
        "prefetch": count(r"cp\.async\.bulk\.prefetch\.L2"),
    }


def chain(
    cut: Cut,
    rank: int,
    ranks: int = 2,
    laps: int = 1,
    starts: tuple[int, ...] | None = None,
    *,
    each: bool = True,
    turned: bool = False,
) -> Any:
    w = [cut.depth, cut.columns] if turned else [cut.columns, cut.depth]
    types = {
        "x": f"tensordesc<bf16[{cut.rows}, {cut.depth}]>",
        "w": f"tensordesc<bf16{w}>",
        **dict.fromkeys(("w_at", "out", "results"), "*bf16"),
        **dict.fromkeys(("inbox", "outbox"), "*fp32"),
        **dict.fromkeys(("per", "stride", "N", "K"), "i32"),
        **PLACE,
    }
    constants = {
        "RANK": rank,
        "RANKS": ranks,
        "LAPS": laps,
        "STARTS": starts,
        "EACH": each,
        "TURNED": turned,
        "SWAP": cut.swapped,
    }
    constants |= {"ROWS": cut.rows, "COLUMNS": cut.columns, "DEPTH": cut.depth, "GROUP": cut.group}
    constants |= {"WARPS": cut.warps, "PREFETCH": cut.prefetch, "TIMED": True}
    return compiled(
        chain_kernel, types, constants, num_warps=cut.warps, num_stages=cut.stages, enable_fp_fusion=False
    )


WIDE = Cut(rows=128, columns=256, depth=64, warps=8, stages=4)
PAIR = Cut(rows=128, columns=128, depth=64, warps=8, stages=3, per_sm=2)
FEW = Cut(rows=16, columns=64, depth=128, warps=4, stages=4, swapped=True, prefetch=8192)


def main() -> None:
    results = {
        "chain 128x256 first": chain(WIDE, 0),
        "chain 128x256 last, rows": chain(WIDE, 1, each=False),
        "chain 128x128 last": chain(PAIR, 1),
        "chain 128x128 of 3": chain(PAIR, 1, 3),
        "chain 128x256 gradient of two laps": chain(WIDE, 0, laps=2, turned=True),
        "chain 128x256 gradient of four unequal laps": chain(
            WIDE, 1, laps=4, starts=(0, 1024, 2048, 4096, 6144), turned=True
        ),
        "chain few rows": chain(FEW, 1),
    }
    types = {
        "src": "*bf16",
        "dst": "*bf16",
        "rows": "i32",
        "width": "i32",
        "src_pitch": "i32",
        "dst_pitch": "i32",
    }
    results["move"] = compiled(moves.move_kernel, types, {"HEIGHT": 4, "WIDTH": 1024}, num_warps=8)
    for what, peer in (("open", -1), ("await", -1), ("await", 1), ("raise_came", -1), ("close", -1)):
        types = {"target": "*bf16", **PLACE, "slot": "i32", "ahead": "i32", "rows": "i32", "pitch": "i32"}
        constants: dict[str, Any] = {"MARK": what, "PEER": peer, "RANK": 0, "RANKS": 3}
        constants |= {"HEIGHT": 128, "TIMED": True}
        results[f"mark {what}" + " of one" * (peer >= 0)] = compiled(
            moves.mark_kernel, types, constants, num_warps=1
        )
    types = {"area": "*bf16", "out": "*bf16", **PLACE}
    types |= dict.fromkeys(("rows", "per", "slots", "per_slot", "ahead", "N"), "i32")
    for owner in (-1, 1):
        constants = {"OWNER": owner, "RANK": 0, "RANKS": 2, "HEIGHT": 8, "WIDTH": 1024, "TIMED": True}
        name = "collect" + " of one" * (owner >= 0)
        results[name] = compiled(moves.collect_kernel, types, constants, num_warps=4)
    types = {
        "src": "*bf16",
        "area": "*bf16",
        "out": "*bf16",
        **PLACE,
        "rows": "i32",
        "step": "i32",
        "width": "i32",
    }
    constants = {"RANK": 0, "RANKS": 2, "HEIGHT": 16, "WIDTH": 512, "TIMED": True}
    results["spread"] = compiled(moves.spread_kernel, types, constants, num_warps=4)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
