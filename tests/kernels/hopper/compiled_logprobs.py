# SPDX-License-Identifier: Apache-2.0
"""The sm90 logprobs' kernels for `compiled.py`: every cut and tile that is used, or that a GPU may choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isoexec.kernels.hopper.arithmetic import power_of_two
from isoexec.kernels.linear_logprobs.hopper import kernel as fused
from isoexec.kernels.linear_logprobs.hopper.plan import CANDIDATES, MIDDLE, TILES
from isoexec.kernels.logprobs.hopper import kernel as logprobs

LEAF, LEAVES = 18992, 8  # Qwen3's vocabulary


def built(compiled: Callable[..., dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Kernel -> what `compiled` says of it."""
    plain = {"enable_fp_fusion": False}
    f, t = "*fp32", "*i64"
    results = {}
    for dtype, name in ((torch.bfloat16, "*bf16"), (torch.float32, f)):
        for both, tempered in ((False, False), (True, True)):
            cut = logprobs.cut_for(8192, dtype)
            types = {"logits": name, **dict.fromkeys(("temperature", "m", "s", "w"), f)}
            types |= dict.fromkeys(("rows", "stride", "out_stride"), "i32")
            constants = {
                "LEAF": LEAF,
                "CHUNKS": -(-LEAF // (128 * cut.blocks)),
                "NODES": -(-LEAF // (128 * cut.join)),
                "GROUP": cut.blocks,
                "JOIN": cut.join,
                "ROWS": cut.rows,
                "TEMPERED": tempered,
                "BOTH": both,
                "HARDWARE_EXP": False,
            }
            results[f"logprobs partials {name[1:]}{' with all' if both else ''}"] = compiled(
                logprobs.partials_kernel, types, constants, num_warps=cut.warps, **plain
            )
        types = {"logits": name, "out": name, "target": t}
        types |= dict.fromkeys(("grad", "grad_entropy", "temperature", "entropy", "stats"), f)
        types |= dict.fromkeys(("rows", "first", "width", "stride", "out_stride"), "i32")
        constants = {"COLUMNS": 2048, "ROWS": 1, "TEMPERED": False, "BOTH": True}
        results[f"logprobs gradient {name[1:]}"] = compiled(
            logprobs.gradient_kernel, types, constants, num_warps=4, **plain
        )
    for count in (10, -(-LEAF // 128)):
        types = {"picked": "*bf16", "target": t, **dict.fromkeys(("rows", "stride", "vocab"), "i32")}
        types |= dict.fromkeys(("temperature", "m", "s", "w", "log_p", "entropy", "stats"), f)
        padded = power_of_two(count)
        constants = {"LEAVES": LEAVES, "NODES": count, "PADDED": padded, "ROWS": 1}
        constants |= {"GATHER": True, "TEMPERED": False, "BOTH": True}
        results[f"logprobs merge {count}"] = compiled(
            logprobs.merge_kernel,
            types,
            constants,
            num_warps=1 if LEAVES * padded <= 256 else 4,
            **plain,
        )
    for tile in dict.fromkeys((MIDDLE, TILES, CANDIDATES[0], CANDIDATES[3])):
        for both in (False, True) if tile in (MIDDLE, TILES) else (False,):
            types = {
                "x": f"tensordesc<bf16[{tile.rows}, {tile.depth}]>",
                "w": f"tensordesc<bf16[{tile.columns}, {tile.depth}]>",
                **dict.fromkeys(("temperature", "m", "s", "u"), f),
                **dict.fromkeys(("T", "K"), "i32"),
            }
            constants = {"LEAF": LEAF, "LEAVES": LEAVES, "ROWS": tile.rows, "COLUMNS": tile.columns}
            constants |= {"DEPTH": tile.depth, "GROUP": tile.group, "TEMPERED": False, "BOTH": both}
            constants |= {"FLAT": tile.flat}
            name = f"linear_logprobs {tile.rows}x{tile.columns}x{tile.depth} w{tile.warps} s{tile.stages}"
            results[f"{name}{' flat' if tile.flat else ''}{' with all' if both else ''}"] = compiled(
                fused.nodes_kernel,
                types,
                constants,
                num_warps=tile.warps,
                num_stages=tile.stages,
                **plain,
            )
    types = {"x": "*bf16", "w": "*bf16", "target": t, "temperature": f, "out": f}
    types |= dict.fromkeys(("T", "first", "width", "K"), "i32")
    results["linear_logprobs picked"] = compiled(
        fused.picked_kernel,
        types,
        {"ROWS": 16, "DEPTH": 128, "TEMPERED": False},
        num_warps=2,
        num_stages=4,
        **plain,
    )
    return results
