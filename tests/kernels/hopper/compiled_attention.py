# SPDX-License-Identifier: Apache-2.0
"""Compiles the sm90 attention's kernels with no GPU in sight and prints `{kernel: registers, spills, ...}` as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from compiled import compiled  # type: ignore[import-not-found]

from isoexec.kernels.attention.hopper import kernel, split
from isoexec.kernels.attention.hopper.naive import BLOCK


def main() -> None:
    b, f, i = "*bf16", "*fp32", "*i32"
    plain = {"enable_fp_fusion": False, "num_warps": 4}
    results: dict[str, Any] = {}
    sizes = (
        "R",
        "n",
        "visible",
        "q_row",
        "q_head",
        "k_row",
        "k_head",
        "v_row",
        "v_head",
        "o_row",
        "o_head",
        "l_head",
    )
    types = {
        "q": b,
        "k": b,
        "v": b,
        "out": b,
        "lse": f,
        "c": "fp32",
        "c_ln2": "fp32",
        **dict.fromkeys(sizes, "i32"),
    }
    for D, keys in BLOCK.items():
        cut = {
            "GROUP": 4,
            "D": D,
            "KEYS": keys,
            "WIDTH": 128,
            "ROWS": 16,
            "HARDWARE": True,
            "ASCENDING": False,
        }
        results[f"segment {D}"] = compiled(kernel.segment_kernel, types, cut, num_stages=2, **plain)
    strides = (
        *("kv_segment", "heads", "own_row", "own_head", "ol_head", "part_slot", "part_row", "part_head"),
        *("pl_slot", "pl_head", "out_row", "out_head"),
    )
    types = {
        "own": b,
        "own_lse": f,
        "parts": b,
        "part_lse": f,
        "position": i,
        "sinks": f,
        "out": b,
        "part_total": f,
    }
    types |= dict.fromkeys(strides, "i32")
    for name, slots, heads, separate, sink in (
        ("prefill", 7, 32, True, False),
        ("decode", 8, 4, False, False),
        ("decode, 32 segments and sinks", 32, 4, False, True),
    ):
        cut = {"SLOTS": slots, "D": 128, "HEADS": heads, "SEPARATE": separate, "SINK": sink}
        cut |= {"TOTALS": name == "decode", "HARDWARE": True}
        results[f"merge {name}"] = compiled(kernel.merge_kernel, types, cut, **plain)
    lengths = ("B", "tokens", "rows", "t_row", "p_row", "q_row", "q_head", "k_page", "k_row", "k_head")
    types = {"q": b, "k": b, "v": b, "table": i, "pages": i, "lies": i, "scores": f, "tops": f, "weights": b}
    types |= {"ordered": f, "fades": f, "out": f, "total": f, "lse": f, "c": "fp32", "c_ln2": "fp32"}
    types |= dict.fromkeys((*lengths, "v_page", "v_row", "v_head", "BLOCKS"), "i32")
    for D, keys in BLOCK.items():
        cut = {"KV": 8, "GROUP": 4, "CHAINS": 16, "D": D, "KEYS": keys, "WIDTH": 128, "MOST": 128, "PAGE": 16}
        cut |= {"PER": 4, "COLUMNS": 32, "AHEAD": 4, "HARDWARE": True}
        for name, of, warps, stages in (
            ("scores", split.scores_kernel, 4, 5),
            ("weights", split.weights_kernel, 4, 3),
            ("sums", split.sums_kernel, 1, 3),
            ("values", split.values_kernel, 4, 9),
        ):
            own = {k: v for k, v in cut.items() if k in of.arg_names}
            tuning = {**plain, "num_warps": warps, "num_stages": stages}
            results[f"split {name} {D}"] = compiled(of, types, own, **tuning)
    types = {"q_start": i, "lengths": i, "k_start": i, "blocks": i, "table": i, "pages": i}
    types |= dict.fromkeys(("B", "entries", "tokens", "kv_segment", "width", "b_row", "t_row"), "i32")
    for kind in (kernel.OWN, kernel.PAST, kernel.SINGLE):
        cut = {"KIND": kind, "FOLDED": kind != kernel.OWN, "PAGE": 16, "PAGES": 256}
        results[f"table {kind}"] = compiled(kernel.table_kernel, types, cut, **plain)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
