# SPDX-License-Identifier: Apache-2.0
"""Compiles the experts' kernels for sm_90 without a GPU and prints `{kernel: registers, spills, ...}` as JSON; `--every` tile."""

from __future__ import annotations

import json
import sys
from typing import Any

from compiled import compiled  # type: ignore[import-not-found]

from isoexec.kernels.combine.hopper import kernel as combine
from isoexec.kernels.dispatch.hopper import kernel as dispatch
from isoexec.kernels.grouped_linear.hopper import kernel as grouped
from isoexec.kernels.grouped_linear.hopper.candidates import TILES
from isoexec.kernels.router.hopper import kernel as router
from isoexec.kernels.shared_gate.hopper import kernel as shared

PLAIN = {"enable_fp_fusion": False}
B, F, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"


def routers() -> dict[str, Any]:
    out = {}
    sizes = {"rows": "i32", "stride": "i32", "width": "i32"}
    for width, k, rows in ((128, 8, 4), (512, 16, 1)):
        cut = {"K": k, "PLACES": k, "WIDTH": width, "ROWS": rows}
        outs = {"weights": F, "experts": I64}
        warps = {"num_warps": max(1, min(8, rows * width // 128))}
        out[f"softmax {width}"] = compiled(
            router.softmax_kernel,
            {"logits": F, **outs, **sizes},
            {**cut, "HARDWARE_EXP": False},
            **warps,
            **PLAIN,
        )
        out[f"gradient {width}"] = compiled(
            router.gradient_kernel,
            {"grad": F, "given": F, "experts": I64, "out": F, **sizes, "scale": "fp32"},
            {**cut, "SIGMOID": width != 128},
            **warps,
            **PLAIN,
        )
        groups = {"GROUPS": 8, "CHOSEN": 4, "PADDED_GROUPS": 8}
        out[f"sigmoid {width}"] = compiled(
            router.sigmoid_kernel,
            {"logits": F, "bias": F, **outs, **sizes, "scale": "fp32"},
            {**cut, **groups},
            **warps,
            **PLAIN,
        )
    return out


def moving() -> dict[str, Any]:
    out = {}
    sizes = {"total": "i32", "first": "i32", "count": "i32"}
    for bins in (32, 1024):
        cut = {"BINS": bins, "SLOTS": 128}
        counts = {"experts": I64, "counts": I32, **sizes}
        out[f"count {bins}"] = compiled(dispatch.count_kernel, counts, cut, num_warps=4)
        lists = {"sums": I32, "slots": I64, "rows": I32, "offsets": I32}
        out[f"place {bins}"] = compiled(
            dispatch.place_kernel, {**counts, **lists}, {**cut, "CHUNK": 32}, num_warps=8
        )
    for blocks in (16, dispatch._BLOCKS):
        types = {"counts": I32, "sums": I32, "blocks": "i32", "count": "i32"}
        cut = {"BLOCKS": blocks, "EXPERTS": dispatch._EXPERTS}
        out[f"scan {blocks}"] = compiled(dispatch.scan_kernel, types, cut, num_warps=4)
    strides = {"width": "i32", "stride": "i32"}
    out["rows"] = compiled(
        dispatch.rows_kernel,
        {"x": B, "slots": I64, "out": B, **strides},
        {"PLACES": 8, "BLOCK": 2048},
        num_warps=8,
    )
    out["back"] = compiled(
        dispatch.back_kernel, {"y": B, "rows": I32, "out": B, **strides}, {"BLOCK": 2048}, num_warps=8
    )
    types = {"y": B, "rows": I32, "weights": F, "shared": B, "out": B, "width": "i32"}
    for mapped, weighed, more in ((True, True, True), (False, True, False), (True, False, False)):
        cut = {"PLACES": 8, "BLOCK": 2048, "MAPPED": mapped, "WEIGHED": weighed, "SHARED": more}
        name = f"sum mapped {mapped} weighed {weighed} shared {more}"
        out[name] = compiled(combine.sum_kernel, types, cut, num_warps=8, **PLAIN)
    types = {"grad": B, "y": B, "rows": I32, "weights": F, "dy": B, "dw": F, "width": "i32"}
    for width in (2048, 16384):
        cut = {"PLACES": 8, "PADDED": width, "MAPPED": True}
        out[f"combine gradient {width}"] = compiled(
            combine.gradient_kernel, types, cut, num_warps=min(8, width // 512), **PLAIN
        )
    return out


def products() -> dict[str, Any]:
    out = {}
    for tile in TILES if "--every" in sys.argv else TILES[:2]:
        cut = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
        tuning = {"num_warps": tile.warps, "num_stages": tile.stages, **PLAIN}
        name = f"{tile.rows}x{tile.columns}x{tile.depth} w{tile.warps} s{tile.stages}"
        for down, result, goes_on in ((False, B, False), (True, B, False), (False, F, True)):
            types = {"a": B, "b": B, "acc": F if goes_on else B, "out": result, "offsets": I32}
            types |= {"experts": "i32", "columns": "i32", "length": "i32", "a_row": "i32", "b_expert": "i32"}
            types |= {"b_chain" if down else "b_column": "i32"}
            one = {"b_column" if down else "b_chain": 1, "EXPERTS": 256, "EVEN": True, "CONTINUE": goes_on}
            out[f"grouped {name} down {down} on {goes_on}"] = compiled(
                grouped.rows_kernel, types, {**cut, **one}, **tuning
            )
        types = {"dy": B, "x": B, "out": B, "offsets": I32, "N": "i32", "K": "i32"}
        types |= {"dy_row": "i32", "x_row": "i32", "tall": "i32"}
        out[f"grouped weight {name}"] = compiled(grouped.weight_kernel, types, cut, **tuning)
    types = {"out": B, "offsets": I32, "size": "i32"}
    out["idle"] = compiled(grouped.idle_kernel, types, {"BLOCK": 4096}, num_warps=8)
    return out


def shared_gates() -> dict[str, Any]:
    sizes = {"rows": "i32", "width": "i32", "stride": "i32"}
    cut = {"ROWS": 16, "DEPTH": 128, "COLUMNS": 16}
    out = {
        "shared gate logit": compiled(
            shared.logit_kernel,
            {"x": B, "w": B, "logit": F, **sizes},
            cut,
            num_warps=4,
            num_stages=4,
            **PLAIN,
        )
    }
    types = {"y": B, "logit": F, "out": B, "width": "i32", "stride": "i32"}
    out["shared gate"] = compiled(shared.gate_kernel, types, {"BLOCK": 2048}, num_warps=4, **PLAIN)
    types = {"grad": B, "y": B, "w": B, "logit": F, "dy": B, "dx": B, "d": F, "width": "i32", "y_row": "i32"}
    out["shared gate gradient"] = compiled(
        shared.gradient_kernel, types, {"PADDED": 4096}, num_warps=8, **PLAIN
    )
    types, cut = {"x": B, "d": F, "parts": F, **sizes}, {"TOKENS": 64, "COLUMNS": 32}
    out["shared gate trees"] = compiled(shared.tree_kernel, types, cut, num_warps=4, **PLAIN)
    types = {"parts": F, "out": B, "blocks": "i32", "width": "i32"}
    out["shared gate blocks"] = compiled(shared.blocks_kernel, types, {"COLUMNS": 128}, num_warps=4, **PLAIN)
    return out


def main() -> None:
    json.dump({**routers(), **moving(), **products(), **shared_gates()}, sys.stdout)


if __name__ == "__main__":
    main()
