# SPDX-License-Identifier: Apache-2.0
"""Compiles the sm90 linear's chain in every layout with no GPU in sight and prints `{kernel: registers, spills, ...}` as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from compiled import compiled  # type: ignore[import-not-found]

from isoexec.kernels.linear.hopper import chains, table
from isoexec.kernels.linear.hopper.kernel import Tile


def build(layout: str, tile: Tile, *, going_on: bool, out: str) -> dict[str, Any]:
    chunk = min(tile.columns, chains._CHUNK)
    a_down, b_down = layout == "weight", layout != "forward"

    def rectangle(down: bool, side: int) -> str:
        return (
            f"tensordesc<bf16[{tile.depth}, {side}]>" if down else f"tensordesc<bf16[{side}, {tile.depth}]>"
        )

    types = {
        "a": rectangle(a_down, tile.rows),
        "b": rectangle(b_down, tile.columns),
        "acc": f"tensordesc<{'fp32' if going_on else out}[{tile.rows}, {chunk}]>",
        "out": f"tensordesc<{out}[{tile.rows}, {chunk}]>",
        **dict.fromkeys(("M", "N", "K"), "i32"),
    }
    cut = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "CHUNK": chunk}
    cut |= {"A_DOWN": a_down, "B_DOWN": b_down, "SWAP": tile.kind == "swapped"}
    cut |= {"CONTINUE": going_on, "GROUP": chains._GROUP}
    free = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    found: dict[str, Any] = compiled(chains.chain_kernel, types, cut, **free)
    return found


def _called() -> set[tuple[Tile, str, bool]]:
    """Tiles with the layouts that `products.product` calls them for, and whether those go on; the reference with every one."""
    of = {
        "continue": (("forward", False), ("forward", True), ("input", True)),
        "input": (("input", False),),
        "weight": (("weight", False),),
    }
    chosen = [(product, steps) for (product, *_), steps in table._chain_tiles().items()]
    found = {
        (tile, *form)
        for product, steps in (*table.UNTUNED.items(), *chosen)
        for _, tile in steps
        if tile
        for form in of[product]
    }
    return found | {(chains.REFERENCE, *form) for form in (*of["continue"], *of["input"], *of["weight"])}


def main() -> None:
    results = {}
    for tile, layout, going_on in sorted(_called(), key=str):
        for out in ("bf16", "fp32") if tile.rows > 64 else ("bf16",):
            name = (
                f"{layout} {tile.kind} {tile.rows}x{tile.columns}x{tile.depth} w{tile.warps} s{tile.stages}"
            )
            results[f"{name} {'on' if going_on else 'from zero'} {out}"] = build(
                layout, tile, going_on=going_on, out=out
            )
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
