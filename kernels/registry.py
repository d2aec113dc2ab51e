# SPDX-License-Identifier: Apache-2.0
"""Every function a contract can name, where its kernel lives, and the digest of its source."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoexec.contracts.digests import digest_bytes, digest_of
from isoexec.kernels.attention.naive import QUERY_TILE
from isoexec.kernels.canaries import Asked, canary, canary_digest, expected_digest, output_digest, reference
from isoexec.kernels.domain import DomainError
from isoexec.kernels.grad_norm.naive import BITS
from isoexec.kernels.linear.hopper.naive import STEP
from isoexec.kernels.linear.naive import ROW_TILE
from isoexec.kernels.logprobs.hopper.naive import BLOCK
from isoexec.kernels.rope.naive import LENGTH

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ARCHS",
    "FUNCTIONS",
    "Asked",
    "Function",
    "Kernel",
    "canary",
    "canary_digest",
    "check_constants",
    "expected_digest",
    "output_digest",
    "reference",
    "source_digest",
]

ARCHS = ("cpu", "sm90")
_ROOT = Path(__file__).resolve().parent
_SHARED = ("domain.py", "groups.py", "library.py", "slices.py", "sums.py")
_NO_BITS = ("gate.py", "timing.py", "tuning.py")  # files beside the kernels that decide no bit of a result


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What computes a function on one arch: the module that exports `ops`, and where its source lies.

    `folder` is relative to this package; `also` are files outside of it that state the function.
    """

    arch: str
    module: str
    ops: tuple[str, ...]
    folder: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Function:
    """One exact rounding schedule.

    `kernels` compute it, one an arch; `fixed` are constants that their code fixes, `free` those that a contract chooses
    within what the kernel's domain admits. Two archs share a function only where they give the same bits.
    """

    id: str
    version: int
    kernels: tuple[Kernel, ...]
    fixed: tuple[tuple[str, Any], ...] = ()
    free: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`id/version`, as a contract writes it."""
        return f"{self.id}/{self.version}"

    @property
    def arch(self) -> tuple[str, ...]:
        """The archs on which a kernel of this installation computes it."""
        return tuple(kernel.arch for kernel in self.kernels)

    def kernel(self, arch: str | None = None) -> Kernel:
        """The kernel for an arch, by default the first; raises `DomainError` where there is none."""
        found = next((k for k in self.kernels if arch is None or k.arch == arch), None)
        if found is None:
            raise DomainError(self.name, f"arch {arch!r}", f"the archs {list(self.arch)}")
        return found


def _cpu(op: str, *ops: str, also: tuple[str, ...] = ()) -> Kernel:
    return Kernel(arch="cpu", module=f"isoexec.kernels.{op}", ops=ops, folder=op.replace(".", "/"), also=also)


def _sm90(op: str, *ops: str, also: tuple[str, ...] = ()) -> Kernel:
    # the package itself imports no triton; its ops do
    folder = f"{op.replace('.', '/')}/hopper"
    return Kernel(arch="sm90", module=f"isoexec.kernels.{op}.hopper.ops", ops=ops, folder=folder, also=also)


_LOGPROBS = ("token_logprobs", "token_logprobs_and_entropy")
_HEAD = (
    "groups.py",
    *(f"linear/hopper/{name}.py" for name in ("chains", "cublaslt", "kernel", "naive", "products", "table")),
    "linear/hopper/table.json",
    *(f"logprobs/hopper/{name}.py" for name in ("arithmetic", "kernel", "naive", "ops")),
)
_SEGMENTS = tuple(
    f"attention/hopper/{name}.py"
    for name in ("backward", "fa3", "kernel", "naive", "ops", "reference", "segments", "split", "tiles")
)
_RELAY = tuple(
    f"linear/hopper/{name}.py"
    for name in (
        *("naive", "parts", "plain", "symmetric", "transport"),
        *(f"handoff/{name}" for name in ("buffers", "moves", "protocol", "relay")),
    )
)
_ROUTER_FILES = ("router/naive.py", "router/ops.py")
_ROUTER = (("accumulate", "float32"), ("ties", "lowest_expert"), ("normalize", "chosen"))

_NORMS = ("add_rms_norm", "residual_add", "rms_norm", "rms_norm_grad")
_NORM_FILES = (
    *(f"rms_norm/hopper/{name}.py" for name in ("backward", "gradient", "kernel", "naive", "ops")),
    "groups.py",
)
_PAIRS = (("reduce", "pair_tree"), ("accumulate", "float32"))
_ROPE_FILES = (*(f"rope/hopper/{name}.py" for name in ("kernel", "ops", "rotation")), "rope/naive.py")
_TABLE = (("table", "float64_to_float32"), ("length", LENGTH))

_ALL = (
    Function(
        id="embedding.lookup",
        version=1,
        kernels=(
            _cpu("embedding", "embedding", "vocab_parallel_embedding"),
            _sm90(
                "embedding",
                "embedding",
                "shard_lookup",
                "vocab_parallel_embedding",
                also=("embedding/naive.py", "groups.py"),
            ),
        ),
    ),
    Function(
        id="rms_norm.tree",
        version=1,
        kernels=(_cpu("rms_norm", "rms_norm", "add_rms_norm", "residual_add", "rms_norm_grad"),),
        fixed=(("reduce", "halving_tree"), ("accumulate", "float32")),
    ),
    Function(
        id="rms_norm.pairs",
        version=1,
        kernels=(_sm90("rms_norm", *_NORMS, also=("groups.py",)),),
        fixed=_PAIRS,
    ),
    Function(
        id="rms_norm.pairs_centred",
        version=1,
        kernels=(_sm90("rms_norm_centred", *_NORMS, also=_NORM_FILES),),
        fixed=_PAIRS,
    ),
    Function(
        id="rms_norm.pairs_gated",
        version=1,
        kernels=(_sm90("rms_norm_gated", "rms_norm", "rms_norm_grad", also=_NORM_FILES),),
        fixed=_PAIRS,
    ),
    Function(
        id="l2_norm.pairs",
        version=1,
        kernels=(_sm90("l2_norm", "l2_norm", also=_NORM_FILES),),
        fixed=_PAIRS,
    ),
    Function(
        id="linear.chain",
        version=1,
        kernels=(_cpu("linear", "pack_weight", "chain", "hand_off", "column_linear", "row_linear"),),
        fixed=(("row_tile", ROW_TILE), ("accumulate", "float32")),
        free=("k_block", "boundary"),
    ),
    Function(
        id="linear.mma_chain",
        version=1,
        kernels=(
            _sm90(
                "linear",
                "chain",
                "column_linear",
                "input_gradient",
                "linear",
                "outputs_shard",
                "row_linear",
                "weight_gradient",
            ),
        ),
        fixed=(("step", STEP), ("accumulate", "float32")),
        free=("boundary",),
    ),
    Function(
        id="linear.grouped_mma_chain",
        version=1,
        kernels=(
            _sm90(
                "grouped_linear",
                *("chain", "grouped_linear", "input_gradient", "row_grouped_linear", "weight_gradient"),
                also=_RELAY,
            ),
        ),
        fixed=(("step", STEP), ("accumulate", "float32")),
    ),
    Function(
        id="linear.grouped_chain",
        version=1,
        kernels=(
            _cpu(
                "grouped_linear",
                *("pack_weights", "chain", "hand_off", "grouped_linear", "row_grouped_linear"),
                also=("linear/ops.py", "linear/naive.py"),
            ),
        ),
        fixed=(("row_tile", ROW_TILE), ("accumulate", "float32")),
        free=("k_block",),
    ),
    Function(
        id="router.softmax_topk",
        version=1,
        kernels=(
            _cpu("router", "softmax_topk", also=("hopper/spec.py",)),
            _sm90("router", "softmax_topk", also=_ROUTER_FILES),
        ),
        fixed=_ROUTER,
    ),
    Function(
        id="router.sigmoid_topk",
        version=1,
        kernels=(
            _cpu("router.sigmoid", "sigmoid_topk", also=("hopper/spec.py", *_ROUTER_FILES)),
            _sm90(
                "router.sigmoid",
                "sigmoid_topk",
                also=(
                    "router/hopper/kernel.py",
                    "router/ops.py",
                    *(f"router/sigmoid/{name}.py" for name in ("naive", "ops")),
                ),
            ),
        ),
        fixed=(*_ROUTER, ("bias", "selection_only"), ("group_score", "sum_of_two_best")),
    ),
    Function(
        id="moe.dispatch",
        version=1,
        kernels=(
            _cpu("dispatch", "plan", "dispatch", "DispatchPlan", "by_slot"),
            _sm90(
                "dispatch",
                *("DevicePlan", "plan", "dispatch", "by_slot"),
                also=("dispatch/naive.py", "combine/hopper/kernel.py", "groups.py"),
            ),
        ),
        fixed=(("order", "expert_then_token"),),
    ),
    Function(
        id="moe.shared_gate",
        version=1,
        kernels=(_sm90("shared_gate", "shared_gate", also=("linear/hopper/naive.py",)),),
        fixed=(("step", STEP), ("accumulate", "float32")),
    ),
    Function(
        id="moe.combine",
        version=1,
        kernels=(
            _cpu("combine", "combine", also=("hopper/spec.py",)),
            _sm90("combine", "combine", "combine_rows", also=("combine/naive.py",)),
        ),
        fixed=(("order", "routing"), ("accumulate", "float32")),
    ),
    Function(
        id="bias.add",
        version=1,
        kernels=(_cpu("bias", "bias_add"), _sm90("bias", "bias_add", also=("bias/naive.py", "sums.py"))),
    ),
    Function(
        id="rope.neox_fp32",
        version=1,
        kernels=(
            _cpu("rope", "rope", "rope_grad"),
            _sm90(
                "rope",
                "rope",
                "rope_sections",
                "section_axes",
                "rotate",
                "table_digest",
                "tables",
                also=("rope/naive.py",),
            ),
        ),
        fixed=_TABLE,
    ),
    Function(
        id="rope.interleaved_fp32",
        version=1,
        kernels=(_sm90("rope_interleaved", "rope", "table_digest", "tables", also=_ROPE_FILES),),
        fixed=_TABLE,
    ),
    Function(
        id="rope.yarn_interleaved_fp32",
        version=1,
        kernels=(_sm90("rope_yarn", "Yarn", "rope", "table_digest", "tables", also=_ROPE_FILES),),
        fixed=_TABLE,
    ),
    Function(
        id="attention.segments",
        version=1,
        kernels=(_cpu("attention", "attention_varlen", "PagedPlan", "attention_paged"),),
        fixed=(("query_tile", QUERY_TILE),),
        free=("kv_segment",),
    ),
    Function(
        id="attention.mma_segments",
        version=1,
        kernels=(_sm90("attention", "Plan", "attention", "plan"),),
        free=("kv_segment",),
    ),
    Function(  # the same result, with cuDNN's gradient, which is another function's: `frontend` says why
        id="attention.mma_segments_cudnn",
        version=1,
        kernels=(_sm90("attention_cudnn", "Plan", "attention", "plan", also=_SEGMENTS),),
        fixed=(("gradient", "cudnn_deterministic"),),
        free=("kv_segment",),
    ),
    Function(  # the same over a row's last keys; only the own kernel has it
        id="attention.mma_window",
        version=1,
        kernels=(_sm90("window_attention", "Plan", "attention", "plan", also=_SEGMENTS),),
        free=("kv_segment", "window"),
    ),
    Function(
        id="attention.latent_segments",
        version=1,
        kernels=(
            _sm90(
                "latent_attention",
                *("Plan", "latent_attention", "plan"),
                also=(*_SEGMENTS, *_RELAY, "groups.py"),
            ),
        ),
        free=("kv_segment",),
    ),
    Function(id="silu_mul.exp", version=1, kernels=(_cpu("silu_mul", "silu_mul"),)),
    Function(id="silu_mul.poly", version=1, kernels=(_sm90("silu_mul", "silu_mul", "silu_mul_halves"),)),
    Function(id="gate.sigmoid_mul", version=1, kernels=(_sm90("sigmoid_mul", "sigmoid_mul"),)),
    Function(
        id="logprobs.leaves",
        version=1,
        kernels=(_cpu("logprobs", "entropy", "log_softmax", "temper", "token_logprobs"),),
        free=("vocab_leaves",),
    ),
    Function(
        id="logprobs.blocks",
        version=2,
        kernels=(_sm90("logprobs", "fresh", "joined", "own_leaves", *_LOGPROBS, also=("groups.py",)),),
        fixed=(("block", BLOCK),),
        free=("vocab_leaves",),
    ),
    Function(  # linear.mma_chain/1 to fp32 logits, then logprobs.blocks/2: their bits, without the logits
        id="linear_logprobs.mma_blocks",
        version=1,
        kernels=(
            _sm90(
                "linear_logprobs",
                "nodes",
                *(f"linear_{name.removeprefix('token_')}" for name in _LOGPROBS),
                also=_HEAD,
            ),
        ),
        fixed=(("step", STEP), ("accumulate", "float32"), ("block", BLOCK)),
        free=("vocab_leaves",),
    ),
    Function(
        id="grad_norm.exact",
        version=1,
        kernels=(
            _cpu("grad_norm", "exact_sq_sum"),
            _sm90("grad_norm", "exact_sq_sum", also=("grad_norm/naive.py",)),
        ),
        fixed=(("bits", BITS),),
    ),
)

FUNCTIONS: dict[str, Function] = {f.name: f for f in _ALL}


def _function(function_id: str) -> Function:
    if function_id not in FUNCTIONS:
        raise DomainError("registry", f"function {function_id!r}", f"the functions {sorted(FUNCTIONS)}")
    return FUNCTIONS[function_id]


@cache
def source_digest(function_id: str, arch: str | None = None) -> str:
    """`sha256:...` over a kernel's own source files and those all kernels of its arch share; `arch` as `Function.kernel`.

    File names are relative to their folder and line ends are normalised, so the digest does not depend on where or how the
    package is installed. It is read once a process: what runs is what was loaded.
    """
    kernel = _function(function_id).kernel(arch)
    if kernel.arch == "cpu":
        shared = [_ROOT / name for name in (*_SHARED, *kernel.also)]
    else:
        shared = [
            _ROOT / "domain.py",
            *(_ROOT / "hopper").glob("*.py"),
            *(_ROOT / name for name in kernel.also),
        ]
    folder = _ROOT / kernel.folder
    # an op's folder of the CPU holds that of another arch
    found = folder.iterdir() if kernel.arch == "cpu" else folder.rglob("*")
    own = [p for p in found if p.suffix in (".py", ".json")]
    files = {f"own/{p.relative_to(folder).as_posix()}": p for p in own}
    names = [p.name for p in shared]
    files |= {
        f"shared/{p.name if names.count(p.name) == 1 else p.relative_to(_ROOT).as_posix()}": p for p in shared
    }
    assert len(files) == len(own) + len(shared), f"{function_id} rests on two files of one name"
    return digest_of(
        {
            name: digest_bytes(b"\n".join(line.rstrip() for line in path.read_bytes().splitlines()))
            for name, path in files.items()
            if path.name not in _NO_BITS
        }
    )


def check_constants(function_id: str, constants: Mapping[str, Any]) -> None:
    """Raise `DomainError` where a contract's constants are not those this code computes with, or lack one it needs."""
    function = _function(function_id)
    fixed = dict(function.fixed)
    for name in set(constants) | set(fixed) | set(function.free):
        found = constants.get(name)
        if name in fixed:
            admitted = found == fixed[name]
            wanted = f"{name} {fixed[name]}"
        else:
            admitted = name in function.free and found is not None
            wanted = (
                f"{name} given"
                if name in function.free
                else f"the constants {sorted([*fixed, *function.free])}"
            )
        if not admitted:
            raise DomainError(function_id, f"{name} {found!r}", wanted)
