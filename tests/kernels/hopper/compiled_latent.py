# SPDX-License-Identifier: Apache-2.0
"""Compiles the sm90 latent attention's kernels with no GPU in sight and prints `{kernel: registers, spills, ...}` as JSON."""

from __future__ import annotations

import json
from typing import Any

from compiled import compiled  # type: ignore[import-not-found]

from isoexec.kernels.latent_attention.hopper import backward, kernel
from isoexec.kernels.latent_attention.hopper.naive import BLOCK, LATENT, ROPE


def _types(arguments: list[str], fp32: set[str], constants: dict[str, Any]) -> dict[str, str]:
    integers = {n for n in arguments if n.endswith(("_row", "_head")) or n in ("R", "n", "visible", "heads")}
    floats = {"scale", "c", "c_ln2"} & set(arguments)
    kinds = dict.fromkeys(integers, "i32") | dict.fromkeys(floats, "fp32")
    for name in set(arguments) - integers - floats - set(constants):
        kinds[name] = "*fp32" if name in fp32 else "*i32" if name == "q_start" else "*bf16"
    return kinds


def _compiled(of: Any, constants: dict[str, Any], **options: Any) -> dict[str, Any]:
    fp32 = {"lse", "delta", "dk_rope", "dlatent"}
    found: dict[str, Any] = compiled(
        of, _types(of.arg_names, fp32, constants), constants, enable_fp_fusion=False, **options
    )
    return found


def main() -> None:
    widths = {"WIDTH": LATENT, "TURN": ROPE}
    results = {
        "segment": _compiled(
            kernel.segment_kernel,
            {
                **widths,
                "KEYS": BLOCK,
                "ROWS": 16,
                "HARDWARE": True,
                "ASCENDING": False,
                "LATENT_FIRST": False,
            },
            num_warps=4,
            num_stages=1,
        ),
        "delta": _compiled(backward.delta_kernel, {"HEADS": 4, "WIDTH": LATENT}, num_warps=4),
    }
    for name, of, tile, more in (
        ("queries", backward.query_kernel, backward.QUERIES, {}),
        ("keys", backward.key_kernel, backward.KEYS, {"CONTINUE": False}),
        ("keys, continued", backward.key_kernel, backward.KEYS, {"CONTINUE": True}),
    ):
        cut = {**widths, "H": 16, "TILE": tile.rows, "COLUMNS": tile.keys, **more}
        results[name] = _compiled(of, cut, num_warps=tile.warps, num_stages=tile.stages)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
