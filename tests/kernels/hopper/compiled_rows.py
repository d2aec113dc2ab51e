# SPDX-License-Identifier: Apache-2.0
"""The row kernels for `compiled.py`: norms, rotations, gates, bias, embedding and the gradient's norm, as models shape them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isoexec.kernels.bias.hopper import kernel as bias
from isoexec.kernels.embedding.hopper import kernel as embedding
from isoexec.kernels.grad_norm.hopper import kernel as grad_norm
from isoexec.kernels.hopper import elementwise
from isoexec.kernels.rms_norm.hopper import backward
from isoexec.kernels.rms_norm.hopper import kernel as norm
from isoexec.kernels.rope.hopper import kernel as rope
from isoexec.kernels.sigmoid_mul.hopper import kernel as sigmoid_mul
from isoexec.kernels.silu_mul.hopper import kernel as silu_mul

Compile = Callable[..., dict[str, Any]]
B, F, I = "*bf16", "*fp32", "i32"  # noqa: E741 - as Triton names them
STRIDES = ("x_token", "x_head", "r_token", "z_token", "z_head", "g_token", "g_head", "s_token")


def rows(compiled: Compile) -> dict[str, dict[str, Any]]:
    """Every row kernel by name, at the settings that its launch chooses for 8192 rows."""
    return {**_norms(compiled), **_elementwise(compiled), **_ropes(compiled), **_others(compiled)}


def _norms(compiled: Compile) -> dict[str, dict[str, Any]]:
    found = {}
    types = dict.fromkeys(("x", "residual", "w", "z", "y", "h"), B) | dict.fromkeys(("rows", *STRIDES), I)
    types["eps"] = "fp32"
    fixed = {"MEAN": True, "EVICT": "", "SCALE": 1, "ADD": False, "GATED": False, "TILES": 1, "STAGES": 1}
    for name, heads, width, per, warps, changed in (
        ("rms_norm 4096", 1, 4096, 1, 8, {"ADD": True}),
        ("rms_norm 1024", 1, 1024, 2, 4, {}),
        ("rms_norm 128", 32, 128, 16, 4, {}),
        ("rms_norm 4096 in turn", 1, 4096, 1, 8, {"ADD": True, "TILES": 4, "STAGES": 2}),
        ("rms_norm centred", 1, 2048, 1, 4, {"SCALE": 2}),
        ("rms_norm gated", 32, 128, 16, 4, {"GATED": True}),
        ("l2_norm", 16, 128, 16, 4, {"SCALE": 0, "MEAN": False}),
    ):
        cut: dict[str, Any] = {"HEADS": heads, "WIDTH": width, "PADDED": width, "ROWS": per}
        found[name] = compiled(
            norm.norm_kernel, types, fixed | cut | changed, num_warps=warps, enable_fp_fusion=False
        )
    types = dict.fromkeys(("g", "x", "w", "z", "g_sum", "dx", "dz"), B) | dict.fromkeys(
        ("tokens", *STRIDES), I
    )
    types |= {"chains": F, "eps": "fp32"}
    fixed = {"MEAN": True, "SCALE": 1, "ADD": False, "GATED": False, "CHAIN": 16, "STAGES": 2}
    for name, heads, width, per, warps, changed in (
        ("rms_norm gradient 4096", 1, 4096, 1, 8, {"ADD": True, "STAGES": 3}),
        ("rms_norm gradient 1024", 1, 1024, 1, 4, {"ADD": True, "SCALE": 2, "STAGES": 3}),
        ("rms_norm gradient 128", 32, 128, 16, 8, {}),
        ("rms_norm gated gradient", 32, 128, 16, 8, {"GATED": True}),
        ("l2_norm gradient", 16, 128, 16, 8, {"SCALE": 0, "MEAN": False}),
    ):
        cut = {"HEADS": heads, "WIDTH": width, "PADDED": width, "ROWS": per}
        found[name] = compiled(
            backward.gradient_kernel, types, fixed | cut | changed, num_warps=warps, enable_fp_fusion=False
        )
    types = {"sums": F, "trees": F, "chains": I}
    cut = {"WIDTH": 4096, "TREE": 64, "COLUMNS": 32}
    found["rms_norm trees"] = compiled(backward.trees_kernel, types, cut, num_warps=4, enable_fp_fusion=False)
    types = {"trees": F, "out": B, "count": I}
    cut = {"HEADS": 32, "PADDED": 32, "WIDTH": 128, "COLUMNS": 32, "FOLD": True}
    found["rms_norm total"] = compiled(backward.total_kernel, types, cut, num_warps=4, enable_fp_fusion=False)
    return found


def _elementwise(compiled: Compile) -> dict[str, dict[str, Any]]:
    sizes = dict.fromkeys(("rows", "g_row", "u_row", "d_row", "out_row", "width"), I)
    types = dict.fromkeys(("grad", "gate", "up", "out", "dgate", "dup"), B) | sizes
    block = {"ROWS": 1, "BLOCK": 1024, "EVICT": ""}
    found = {
        "silu_mul": compiled(
            silu_mul.silu_kernel, types, {**block, "HARDWARE_EXP": False}, num_warps=2, enable_fp_fusion=False
        ),
        "silu_mul gradient": compiled(
            silu_mul.gradient_kernel, types, block, num_warps=4, enable_fp_fusion=False
        ),
    }
    sizes = dict.fromkeys(("rows", "x_token", "x_head", "g_token", "g_head", "width"), I)
    types = dict.fromkeys(("grad", "x", "gate", "out", "dgate"), B) | sizes
    for name, gradient in (("sigmoid_mul", False), ("sigmoid_mul gradient", True)):
        cut: dict[str, Any] = {"HEADS": 16, "ROWS": 4, "BLOCK": 256, "GRADIENT": gradient, "EVICT": ""}
        found[name] = compiled(sigmoid_mul.sigmoid_kernel, types, cut, num_warps=4, enable_fp_fusion=False)
    types = {"a": B, "b": B, "out": B, "count": I}
    found["residual_add"] = compiled(
        elementwise.add_kernel, types, {"BLOCK": 1024}, num_warps=4, enable_fp_fusion=False
    )
    return found


def _ropes(compiled: Compile) -> dict[str, dict[str, Any]]:
    found = {}
    types = {"x": B, "positions": "*i64", "axes": "*i32", "cos": F, "sin": F, "out": B}
    types |= dict.fromkeys(("tokens", "x_token", "x_head", "p_axis", "length"), I)
    for name, heads, width, half, block, tokens, changed in (
        ("rope", 32, 128, 64, 32, 1, {}),
        ("rope partial", 16, 256, 32, 16, 2, {"SECTIONS": True, "REST": 256}),
        ("rope interleaved", 16, 64, 32, 16, 1, {"INTERLEAVED": True, "REVERSE": True}),
    ):
        cut: dict[str, Any] = {
            "HEADS": heads,
            "WIDTH": width,
            "HALF": half,
            "PADDED": half,
            "BLOCK": block,
            "TOKENS": tokens,
        }
        cut |= {"REST": 0, "SECTIONS": False, "INTERLEAVED": False, "REVERSE": False, "EVICT": ""}
        found[name] = compiled(rope.rope_kernel, types, cut | changed, num_warps=4, enable_fp_fusion=False)
    return found


def _others(compiled: Compile) -> dict[str, dict[str, Any]]:
    plain = {"enable_fp_fusion": False}
    types = {"x": B, "bias": B, "out": B, "rows": I, "x_row": I, "width": I}
    trees = {"grad": B, "trees": F, "rows": I, "width": I}
    total = {"trees": F, "out": B, "count": I, "width": I}
    lookup = {
        "ids": "*i64",
        "w": B,
        "out": B,
        **dict.fromkeys(("first", "rows", "vocab", "w_row", "width"), I),
    }
    terms = {"grad": B, "sorted_rows": "*i64", "order": "*i64", "dw": B, "rows": I, "width": I}
    greatest, sums = {"x": F, "out": F, "count": I}, {"x": F, "factors": "*fp64", "out": "*i64", "count": I}
    return {
        "bias": compiled(bias.add_kernel, types, {"ROWS": 4, "BLOCK": 512}, num_warps=4, **plain),
        "bias trees": compiled(bias.trees_kernel, trees, {"TREE": 64, "COLUMNS": 64}, num_warps=4, **plain),
        "bias total": compiled(bias.total_kernel, total, {"AHEAD": 16, "COLUMNS": 32}, num_warps=1, **plain),
        "embedding": compiled(embedding.lookup_kernel, lookup, {"BLOCK": 2048}, num_warps=4, **plain),
        "embedding gradient": compiled(
            embedding.gradient_kernel, terms, {"AHEAD": 8, "BLOCK": 512}, num_warps=4, **plain
        ),
        "grad_norm greatest": compiled(
            grad_norm.greatest_kernel, greatest, {"BLOCK": 8192}, num_warps=8, **plain
        ),
        "grad_norm sums": compiled(grad_norm.sums_kernel, sums, {"BLOCK": 8192}, num_warps=8, **plain),
    }
