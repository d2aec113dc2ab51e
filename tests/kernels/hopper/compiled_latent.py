# SPDX-License-Identifier: Apache-2.0
"""Compiles the sm90 latent attention's kernels with no GPU in sight and prints `{kernel: registers, spills, ...}` as JSON."""

from __future__ import annotations

import json
from typing import Any

from compiled import compiled  # type: ignore[import-not-found]

from isoexec.kernels.attention.hopper.backward import UNIT
from isoexec.kernels.attention.hopper.split import values_kernel
from isoexec.kernels.latent_attention.hopper import backward, reference, split, tiles
from isoexec.kernels.latent_attention.hopper.naive import BLOCK, LATENT, ROPE

_KINDS = {
    **dict.fromkeys(("v", "weights"), "*bf16"),
    **dict.fromkeys(("lse", "delta", "acc", "scores", "tops", "fades"), "*fp32"),
    **dict.fromkeys(("spans", "owners", "units", "pages", "table", "lies"), "*i32"),
    **dict.fromkeys(("scale", "c", "c_ln2"), "fp32"),
    **dict.fromkeys(
        ("q_rope", "q_latent", "k_rope", "latent", "out", "dout", "dq_rope", "dq_latent"), "*bf16"
    ),
}


def _compiled(of: Any, constants: dict[str, Any], *, out: str = "*bf16", **options: Any) -> dict[str, Any]:
    kinds: dict[str, Any] = {n: _KINDS.get(n, "i32") for n in of.arg_names if n not in constants}
    if "of" in kinds:
        kinds["of"] = backward.Operands(*(_KINDS.get(n, "i32") for n in backward.Operands._fields))
    kinds |= {"out": out} if "out" in of.arg_names else {}
    found: dict[str, Any] = compiled(of, kinds, constants, enable_fp_fusion=False, **options)
    return found


def main() -> None:
    widths = {"WIDTH": LATENT, "TURN": ROPE}
    of = {**widths, "KEYS": BLOCK, "HARDWARE": True}
    results = {
        "segment": _compiled(
            reference.segment_kernel,
            {**of, "ROWS": 16, "ASCENDING": False, "LATENT_FIRST": False},
            num_warps=4,
            num_stages=1,
        ),
        "delta": _compiled(backward.delta_kernel, {"HEADS": 4, "WIDTH": LATENT}, num_warps=4),
    }
    halves = {"TURN": ROPE, "HALF": LATENT // 2, "KEYS": BLOCK, "HARDWARE": True}
    for name, heads, single, page in (
        ("packed prefill of 16 heads", 16, False, 0),
        ("prefill of 128 heads", 128, False, 64),
        ("decode of 16 heads", 16, True, 64),
        ("decode of 20 heads", 20, True, 16),
        ("decode of 128 heads", 128, True, 64),
    ):
        tile = tiles.decode_tile(heads) if single else tiles.PREFILL
        tokens = 1 if single else tiles.tokens_of(tile, heads)
        group = tiles.heads_of(tile, heads)
        cut = {"GROUP": group, "TOKENS": tokens, "ROWS": tiles.rows_of(tokens * group), "PAGE": page}
        results[name] = _compiled(
            tiles.tile_kernel, {**halves, **cut}, num_warps=tile.warps, num_stages=tile.stages
        )
    tuning, groups = split.TUNING, split.groups_of(16)
    cut = {"KV": groups, "GROUP": 16, "KEYS": BLOCK, "PAGE": 64}
    results["split scores"] = _compiled(
        split.scores_kernel,
        {**cut, **widths, "PER": tuning.score_blocks},
        num_warps=tuning.score_warps,
        num_stages=tuning.score_stages,
    )
    results["split values"] = _compiled(
        values_kernel,
        {**cut, "D": LATENT, "WIDTH": BLOCK, "COLUMNS": tuning.columns, "UNROLLED": tuning.unrolled},
        out="*fp32",
        num_warps=tuning.warps,
        num_stages=tuning.stages,
    )
    for name, kernel, walk, more in (
        ("queries", backward.query_kernel, backward.QUERIES, {}),
        ("keys", backward.key_kernel, backward.KEYS, {"CONTINUE": False}),
        ("keys, continued", backward.key_kernel, backward.KEYS, {"CONTINUE": True}),
    ):
        cut = {**widths, "H": 16, "WHOLE": UNIT, "TILE": walk.rows, "COLUMNS": walk.keys, **more}
        results[name] = _compiled(kernel, cut, num_warps=walk.warps, num_stages=walk.stages)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
