# SPDX-License-Identifier: Apache-2.0
"""Compiles the sm90 attention's kernels with no GPU in sight and prints `{kernel: registers, spills, ...}` as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from compiled import compiled  # type: ignore[import-not-found]

from isoexec.kernels.attention.hopper import backward, kernel, ops, reference, split, tiles
from isoexec.kernels.attention.hopper.naive import BLOCK, WINDOW_BLOCK


def main() -> None:
    b, f, i = "*bf16", "*fp32", "*i32"
    plain = {"enable_fp_fusion": False, "num_warps": 4}
    results: dict[str, Any] = {}
    sizes = (
        "R",
        "n",
        "visible",
        "window",
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
            "WINDOWED": D == 64,
        }
        results[f"segment {D}"] = compiled(reference.segment_kernel, types, cut, num_stages=2, **plain)
    cut = {"ROWS": 64, "COLUMNS": 64, "STEP": 16}
    own = _typed(
        reference.chain_kernel,
        {"x": b, "w": b, "acc": f, "out": f, **dict.fromkeys(("M", "N", "K"), "i32")},
    )
    results["reference chain"] = compiled(reference.chain_kernel, own, cut, **plain)
    cut = {"BLOCK": 4096, "HARDWARE": True}
    own = {"x": f, "y": f, "count": "i32"}
    results["reference exp2"] = compiled(reference.exp2_kernel, own, cut, **plain)
    strides = (
        *(
            "wl_head",
            "window",
            "kv_segment",
            "heads",
            "own_row",
            "own_head",
            "ol_head",
            "part_slot",
            "part_row",
            "part_head",
        ),
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
        "whole_lse": f,
        "part_total": f,
    }
    types |= dict.fromkeys(strides, "i32")
    for name, slots, heads, separate, sink in (
        ("prefill", 7, 32, True, False),
        ("decode", 8, 4, False, False),
        ("decode, 32 segments and sinks", 32, 4, False, True),
    ):
        cut = {"SLOTS": slots, "D": 128, "HEADS": heads, "SEPARATE": separate, "SINK": sink}
        cut |= {"TOTALS": name == "decode", "HARDWARE": True, "WINDOWED": False, "LSE": sink}
        results[f"merge {name}"] = compiled(kernel.merge_kernel, types, cut, **plain)
    lengths = ("B", "tokens", "rows", "t_row", "p_row", "q_row", "q_head", "k_page", "k_row", "k_head")
    types = {"q": b, "k": b, "v": b, "table": i, "pages": i, "lies": i, "scores": f, "tops": f, "weights": b}
    types |= {"ordered": f, "fades": f, "out": f, "total": f, "lse": f, "c": "fp32", "c_ln2": "fp32"}
    types |= dict.fromkeys((*lengths, "v_page", "v_row", "v_head", "BLOCKS"), "i32")
    for D, keys in BLOCK.items():
        cut = {"KV": 8, "GROUP": 4, "CHAINS": 16, "D": D, "KEYS": keys, "WIDTH": 128, "MOST": 128, "PAGE": 16}
        cut |= {"HARDWARE": True}
        serves = ops.SPLIT[D]
        cut |= {"PER": serves.score_blocks, "COLUMNS": serves.columns, "AHEAD": serves.ahead}
        for name, of, warps, stages in (
            ("scores", split.scores_kernel, serves.score_warps, serves.score_stages),
            ("weights", split.weights_kernel, 4, 3),
            ("sums", split.sums_kernel, 1, 3),
            ("values", split.values_kernel, serves.warps, serves.stages),
        ):
            constants = {k: v for k, v in {**cut, "UNROLLED": serves.unrolled}.items() if k in of.arg_names}
            tuning = {**plain, "num_warps": warps, "num_stages": stages}
            results[f"split {name} {D}"] = compiled(of, types, constants, **tuning)
    types = {"q_start": i, "lengths": i, "k_start": i, "blocks": i, "table": i, "pages": i}
    types |= dict.fromkeys(("B", "entries", "tokens", "kv_segment", "width", "b_row", "t_row"), "i32")
    for kind in (kernel.OWN, kernel.PAST, kernel.SINGLE):
        cut = {"KIND": kind, "FOLDED": kind != kernel.OWN, "PAGE": 16, "PAGES": 256}
        results[f"table {kind}"] = compiled(kernel.table_kernel, types, cut, **plain)
    results |= _tiles() | _gradients()
    json.dump(results, sys.stdout)


def _typed(kernel: Any, types: dict[str, str]) -> dict[str, Any]:
    """`types`, and i32 for every other argument in small letters."""
    return {n: types.get(n, "i32") for n in kernel.arg_names if n in types or n.islower()}


def _tiles() -> dict[str, Any]:
    found: dict[str, Any] = {}
    types = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "out": "*bf16", "lse": "*fp32", "spans": "*i32"}
    types |= {"owners": "*i32", "pages": "*i32", "c": "fp32", "c_ln2": "fp32"}
    for D in BLOCK:
        # a window's tile is a prefill's with more to it, where both have the same shape; decode is heavier with the head dim
        for name, tile, page, windowed in (
            ("prefill", tiles.PREFILL[D], 0, False),
            ("prefill with a window", tiles.WINDOW[D], 0, True),
            ("decode", tiles.DECODE[D], 16, False),
        ):
            if name == "prefill" and tile == tiles.WINDOW[D] and BLOCK[D] == WINDOW_BLOCK[D]:
                continue
            if name == "decode" and D == 64:
                continue
            keys = WINDOW_BLOCK[D] if windowed else BLOCK[D]
            held = 1 if name == "decode" else tiles.tokens_of(tile, 4)
            cut = {"GROUP": 4, "D": D, "KEYS": keys, "WIDTH": 64 if keys == 64 else 128, "TOKENS": held}
            cut |= {"ROWS": max(16, 4 * held), "PAGE": page, "WINDOWED": windowed}
            tuning = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
            one = tiles.tile_kernel
            found[f"tiles {name} {D}"] = compiled(
                one, _typed(one, types), {**cut, "HARDWARE": True}, **tuning
            )
    one = tiles.map_kernel
    cut = {"MOST": 16, "PLACES": 64}
    found["tiles map"] = compiled(
        one, _typed(one, {"rows": "*i32", "owners": "*i32"}), cut, num_warps=4, enable_fp_fusion=False
    )
    return found


_TYPES: dict[str, str] = {
    **dict.fromkeys(("q", "k", "v", "g", "out", "dq", "dk", "dv", "ds"), "*bf16"),
    **dict.fromkeys(("base", "delta", "lse", "sinks", "parts", "grad"), "*fp32"),
    **dict.fromkeys(("spans", "owners"), "*i32"),
    **dict.fromkeys(("c", "scale"), "fp32"),
    "places": "*i64",
    "stripe": "i64",
}


def gradient(kind: str, D: int, walk: backward.Walk, want: int = 0) -> dict[str, Any]:
    """A kernel of the gradients by a walk: "key" of keys (1) or values (2) or both, "query", or "stored"."""
    cut: dict[str, Any] = {"GROUP": 4, "D": D, "UNIT": backward.UNIT, "WINDOWED": False, "HARDWARE": True}
    if kind == "key":
        kernel: Any = backward.key_kernel
        cut |= {"KEYS": walk.hold, "ROWS": walk.step, "STORE": D == 256, "WANT": want}
    else:
        kernel = backward.query_kernel
        cut |= {"KEYS": walk.step, "ROWS": walk.hold, "STORED": kind == "stored"}
    of = backward.Given(*(_TYPES.get(name, "i32") for name in backward.Given._fields))
    found: dict[str, Any] = compiled(
        kernel,
        {**_typed(kernel, _TYPES), "of": of},
        cut,
        num_warps=walk.warps,
        num_stages=walk.stages,
        enable_fp_fusion=False,
    )
    return found


def _gradients() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, one, cut in (
        ("delta", backward.delta_kernel, {"D": 128, "ROWS": 32}),
        ("sinks", backward.sink_kernel, {"UNIT": backward.UNIT}),
        ("sinks in all", backward.sink_total_kernel, {"UNIT": backward.UNIT, "MOST": 256}),
    ):
        options = {"num_warps": 4 if name == "delta" else 1, "enable_fp_fusion": False}
        found[f"gradient {name}"] = compiled(one, _typed(one, _TYPES), cut, **options)
    for D in BLOCK:
        for want in (1, 2) if backward.KEY[D].apart else (0,):
            found[f"gradient keys {D} {want}"] = gradient("key", D, backward.KEY[D], want)
        found[f"gradient queries {D}"] = gradient("query", D, backward.QUERY[D])
        found[f"gradient queries {D} stored"] = gradient("stored", D, backward.STORED[D])
    return found


if __name__ == "__main__":
    main()
