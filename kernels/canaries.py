# SPDX-License-Identifier: Apache-2.0
"""A fixed input and the specification's answer for every function, to be run through whatever a runtime really bound.

Inputs come from integer arithmetic, not from a random generator, so they are the same under every torch version.
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from isoexec.contracts.digests import digest_bytes
from isoexec.kernels.attention import naive as attention
from isoexec.kernels.bias import naive as bias
from isoexec.kernels.combine import naive as combine
from isoexec.kernels.dispatch import naive as dispatch
from isoexec.kernels.domain import DomainError
from isoexec.kernels.embedding import naive as embedding
from isoexec.kernels.grad_norm import naive as grad_norm
from isoexec.kernels.grouped_linear import naive as grouped_linear
from isoexec.kernels.l2_norm.hopper import naive as l2_norm
from isoexec.kernels.linear import naive as linear
from isoexec.kernels.logprobs import naive as logprobs
from isoexec.kernels.logprobs.hopper import naive as hopper_logprobs
from isoexec.kernels.rms_norm import naive as rms_norm
from isoexec.kernels.rms_norm.hopper import naive as hopper_rms_norm
from isoexec.kernels.rms_norm_centred.hopper import naive as rms_norm_centred
from isoexec.kernels.rms_norm_gated.hopper import naive as rms_norm_gated
from isoexec.kernels.rope import naive as rope
from isoexec.kernels.rope_interleaved.hopper import naive as rope_interleaved
from isoexec.kernels.rope_yarn.hopper import naive as rope_yarn
from isoexec.kernels.router import naive as router
from isoexec.kernels.router.sigmoid import naive as sigmoid
from isoexec.kernels.shared_gate.hopper import naive as shared_gate
from isoexec.kernels.sigmoid_mul.hopper import naive as sigmoid_mul
from isoexec.kernels.silu_mul import naive as silu_mul
from isoexec.kernels.silu_mul.hopper import naive as hopper_silu_mul

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "Answer",
    "Asked",
    "canary",
    "canary_digest",
    "chosen",
    "differ",
    "expected_digest",
    "fill",
    "output_digest",
    "reference",
]

Inputs = dict[str, Any]

_SIZES: dict[str, dict[str, int]] = {
    "embedding.lookup/1": {"tokens": 19, "vocab": 64, "width": 32},
    "rms_norm.tree/1": {"tokens": 19, "width": 128},
    "linear.chain/1": {"tokens": 19, "K": 256, "N": 64},
    "bias.add/1": {"tokens": 19, "width": 100},
    "rope.neox_fp32/1": {"tokens": 19, "heads": 2, "head_dim": 32},
    "attention.segments/1": {"tokens": 75, "heads": 4, "kv_heads": 2, "head_dim": 32},
    "attention.mma_segments/1": {"tokens": 75, "heads": 4, "kv_heads": 2, "head_dim": 128},
    "attention.latent_segments/1": {"tokens": 75, "heads": 4},
    "silu_mul.exp/1": {"tokens": 19, "width": 100},
    "logprobs.leaves/1": {"tokens": 211, "vocab": 512},  # another sum shows in one logprob of twenty
    "grad_norm.exact/1": {"tokens": 19, "width": 100},
    "rms_norm.pairs/1": {"tokens": 19, "width": 128},
    "rms_norm.pairs_centred/1": {"tokens": 19, "width": 128},
    "rms_norm.pairs_gated/1": {"tokens": 19, "width": 128},
    "l2_norm.pairs/1": {"tokens": 19, "width": 128},
    "gate.sigmoid_mul/1": {"tokens": 19, "width": 100},
    "rope.interleaved_fp32/1": {"tokens": 19, "heads": 2, "head_dim": 32},
    "rope.yarn_interleaved_fp32/1": {"tokens": 19, "heads": 2, "head_dim": 64},
    "linear.grouped_chain/1": {"tokens": 19, "experts": 4, "K": 256, "N": 64},
    "linear.grouped_mma_chain/1": {
        "tokens": 19,
        "experts": 4,
        "K": 512,
        "N": 2048,
    },  # a weight that the table lists
    "moe.shared_gate/1": {"tokens": 19, "width": 2048},
    "router.softmax_topk/1": {"tokens": 19, "experts": 128, "places": 8},
    "router.sigmoid_topk/1": {"tokens": 19, "experts": 64, "places": 4, "groups": 8, "groups_chosen": 4},
    "moe.dispatch/1": {"tokens": 19, "experts": 16, "places": 4, "width": 100},
    "moe.combine/1": {"tokens": 19, "places": 4, "width": 100},
    "linear.mma_chain/1": {"tokens": 19, "K": 1024, "N": 4096},  # a weight that the arch's table lists
    "silu_mul.poly/1": {"tokens": 19, "width": 100},
    "logprobs.blocks/2": {"tokens": 211, "vocab": 512},
    "linear_logprobs.mma_blocks/1": {"tokens": 211, "K": 1024, "N": 4096},
}
_ON_GPU = (  # a tensor core's last bit has no other specification
    "linear.mma_chain/1",
    "linear.grouped_mma_chain/1",
    "linear_logprobs.mma_blocks/1",
    "moe.shared_gate/1",
    "attention.mma_segments/1",
    "attention.latent_segments/1",
)


def fill(*shape: int, salt: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Values in [-scale, scale) from a multiplicative hash of the index; the same on every machine and torch version."""
    count = 1
    for size in shape:
        count *= size
    mixed = (torch.arange(1, count + 1, dtype=torch.int64) * 2654435761 + salt * 40503) % 2**32
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 2**32
    mixed = mixed ^ (mixed >> 13)
    centred = (mixed >> 8) - 2**23  # 24 bits, exact in float32
    return (centred.to(torch.float32) * (scale / 2**23)).view(shape).to(dtype)


def _ids(count: int, below: int, salt: int) -> Tensor:
    return (torch.arange(count, dtype=torch.int64) * 7919 + salt * 104729) % below


def _scores(tokens: int, experts: int) -> Tensor:
    """Router logits of which the first half lie on a coarse grid: a token in two has ties."""
    x = fill(tokens, experts, salt=20, scale=4.0)
    x[: tokens // 2] = (x[: tokens // 2] * 2).round() / 2
    return x


def chosen(weights: Tensor, experts: Tensor) -> Tensor:
    """What is compared of a router: weights beside experts, `[tokens, 2 * places]` in fp32."""
    return torch.cat([weights, experts.to(torch.float32)], 1)


def canary(
    function_id: str,
    constants: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    sizes: Mapping[str, int] | None = None,
    device: str = "cpu",
) -> Inputs:
    """The function's canary input by argument name, on `device`.

    `sizes` overrides the sizes that a bound object fixes (`_SIZES` names them): a layer with 8 heads gets 8 heads.
    Raises `DomainError` for an unknown function or size.
    """
    if function_id not in _SIZES:
        raise DomainError("canary", f"function {function_id!r}", f"the functions {sorted(_SIZES)}")
    own = _SIZES[function_id]
    unknown = set(sizes or ()) - set(own)
    if unknown:
        raise DomainError("canary", f"sizes {sorted(unknown)} for {function_id}", f"the sizes {sorted(own)}")
    n = {**own, **(sizes or {})}
    made = _made(function_id, tuple(sorted(n.items())), dtype, device)
    return {name: _copied(value) for name, value in made.items()}


@lru_cache(maxsize=64)
def _made(function_id: str, sizes: tuple[tuple[str, int], ...], dtype: torch.dtype, device: str) -> Inputs:
    # a look at every layer of a model asks for the same numbers hundreds of times, and millions of them take a while
    made = _inputs(function_id, dict(sizes), dtype)
    return {name: _there(value, device) for name, value in made.items()}


def _there(value: Any, device: str) -> Any:
    # a list's tensors stay on the host: its function takes them from there
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _copied(value: Any) -> Any:
    """A copy of its own of a tensor or of a list of them; anything else as it is."""
    if isinstance(value, list):
        return [one.clone() for one in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def _inputs(function_id: str, n: Mapping[str, int], dtype: torch.dtype) -> Inputs:
    tokens = n["tokens"]
    match function_id.partition("/")[0]:
        case "embedding.lookup":
            w = fill(n["vocab"], n["width"], salt=1, dtype=dtype)
            w[:, 0] = -0.0  # the sign a sum over shards would lose
            return {"ids": _ids(tokens, n["vocab"], 2), "w": w}
        case "rms_norm.tree" | "rms_norm.pairs" | "rms_norm.pairs_centred":
            x = fill(tokens, n["width"], salt=3, dtype=dtype, scale=3.0)
            return {"x": x, "w": fill(n["width"], salt=4, dtype=dtype), "eps": 1e-6}
        case "rms_norm.pairs_gated":
            x = fill(tokens, n["width"], salt=3, dtype=dtype, scale=3.0)
            gate = fill(tokens, n["width"], salt=12, dtype=dtype, scale=8.0)
            return {"x": x, "w": fill(n["width"], salt=4, dtype=dtype), "gate": gate, "eps": 1e-6}
        case "l2_norm.pairs":
            return {"x": fill(tokens, n["width"], salt=3, dtype=dtype, scale=3.0), "eps": 1e-6}
        case "gate.sigmoid_mul":
            return {
                "x": fill(tokens, n["width"], salt=13, dtype=dtype),
                "gate": fill(tokens, n["width"], salt=12, dtype=dtype, scale=8.0),
            }
        case "linear.chain" | "linear.mma_chain":
            return {
                "x": fill(tokens, n["K"], salt=5, dtype=dtype),
                "w": fill(n["N"], n["K"], salt=6, dtype=dtype),
            }
        case "linear_logprobs.mma_blocks":
            return {
                "x": fill(tokens, n["K"], salt=5, dtype=torch.bfloat16),
                "w": fill(n["N"], n["K"], salt=6, dtype=torch.bfloat16, scale=0.25),
                "target": _ids(tokens, n["N"], 15),
            }
        case "linear.grouped_chain" | "linear.grouped_mma_chain":
            load = torch.tensor([tokens // 2, 0, 1, tokens - tokens // 2 - 1][: n["experts"]])
            load = torch.cat([load, torch.zeros(max(0, n["experts"] - 4), dtype=torch.int64)])
            counted = torch.int64 if function_id == "linear.grouped_chain/1" else torch.int32
            return {
                "x": fill(int(load.sum()), n["K"], salt=5, dtype=dtype),
                "w": fill(n["experts"], n["N"], n["K"], salt=6, dtype=dtype),
                "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), load.cumsum(0)]).to(counted),
            }
        case "moe.shared_gate":
            return {
                "y": fill(tokens, n["width"], salt=25, dtype=dtype),
                "x": fill(tokens, n["width"], salt=26, dtype=dtype),
                "w": fill(1, n["width"], salt=27, dtype=dtype),
            }
        case "router.softmax_topk":
            return {"logits": _scores(tokens, n["experts"]), "k": n["places"]}
        case "router.sigmoid_topk":
            return {
                "logits": _scores(tokens, n["experts"]),
                "bias": fill(n["experts"], salt=21, scale=0.3),
                "k": n["places"],
                "groups": n["groups"],
                "groups_chosen": n["groups_chosen"],
                "scale": 2.5,
            }
        case "moe.dispatch":
            scores = _scores(tokens, n["experts"])
            return {
                "x": fill(tokens, n["width"], salt=22, dtype=dtype),
                "experts": scores.sort(dim=1, descending=True, stable=True).indices[:, : n["places"]],
                "count": n["experts"],
            }
        case "moe.combine":
            return {
                "y": fill(tokens * n["places"], n["width"], salt=23, dtype=dtype, scale=3.0),
                "weights": fill(tokens, n["places"], salt=24).abs(),
            }
        case "bias.add":
            return {
                "x": fill(tokens, n["width"], salt=18, dtype=dtype, scale=4.0),
                "bias": fill(n["width"], salt=19, dtype=dtype),
            }
        case "rope.neox_fp32" | "rope.interleaved_fp32":
            x = fill(tokens, n["heads"], n["head_dim"], salt=7, dtype=dtype)
            return {"x": x, "positions": _ids(tokens, rope.LENGTH, 8), "base": 1000000.0}
        case "rope.yarn_interleaved_fp32":
            x = fill(tokens, n["heads"], n["head_dim"], salt=7, dtype=dtype)
            yarn = rope_yarn.Yarn(factor=40.0, original=4096, mscale=1.0, mscale_all_dim=0.5)
            return {"x": x, "positions": _ids(tokens, rope.LENGTH, 8), "base": 10000.0, "yarn": yarn}
        case "attention.segments" | "attention.mma_segments":
            shape = (1, tokens, n["kv_heads"], n["head_dim"])
            return {
                "q": fill(1, tokens, n["heads"], n["head_dim"], salt=9, dtype=dtype, scale=4.0),
                "k": fill(*shape, salt=10, dtype=dtype, scale=4.0),
                "v": fill(*shape, salt=11, dtype=dtype),
                "scale": n["head_dim"] ** -0.5,
            }
        case "attention.latent_segments":
            made = partial(fill, dtype=torch.bfloat16, scale=2.0)  # the only dtype of tensor cores' attention
            return {
                "q_rope": made(tokens, n["heads"], 64, salt=28),
                "q_latent": made(tokens, n["heads"], 512, salt=29),
                "k_rope": made(tokens, 64, salt=30),
                "latent": made(tokens, 512, salt=31),
                "scale": 192**-0.5,
            }
        case "silu_mul.exp" | "silu_mul.poly":
            return {
                "gate": fill(tokens, n["width"], salt=12, dtype=dtype, scale=8.0),
                "up": fill(tokens, n["width"], salt=13, dtype=dtype),
            }
        case "logprobs.leaves" | "logprobs.blocks":
            return {
                "logits": fill(tokens, n["vocab"], salt=14, scale=8.0),
                "target": _ids(tokens, n["vocab"], 15),
            }
    return {
        "tensors": [
            fill(tokens, n["width"], salt=16, dtype=dtype),
            fill(n["width"], salt=17, dtype=dtype, scale=1e-3),
        ]
    }


def reference(function_id: str, constants: Mapping[str, Any]) -> Callable[..., Tensor]:
    """The specification under these constants: takes `canary`'s inputs by name, returns the one output that is compared."""
    match function_id.partition("/")[0]:
        case "embedding.lookup":
            return embedding.embedding
        case "rms_norm.tree":
            return rms_norm.rms_norm
        case "linear.chain":
            out_dtype = torch.float32 if constants.get("boundary", "model") == "float32" else None
            return lambda x, w: linear.linear(x, w, k_block=constants["k_block"], out_dtype=out_dtype)
        case "linear.grouped_chain":
            return lambda x, w, offsets: grouped_linear.grouped_linear(
                x, w, offsets, k_block=constants["k_block"]
            )
        case "linear.grouped_mma_chain":
            from isoexec.kernels.grouped_linear.hopper.kernel import reference as of_experts  # needs triton

            return of_experts
        case "moe.shared_gate":
            from isoexec.kernels.linear.hopper.kernel import reference as one_tile

            def gated(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
                beside = torch.cat([w, torch.zeros_like(w).repeat(15, 1)])  # columns that are not this one
                return shared_gate.gated(y, one_tile(x, beside, torch.float32)[:, 0])

            return gated
        case "router.softmax_topk":
            return lambda logits, k: chosen(*router.softmax_topk(logits, k))
        case "router.sigmoid_topk":
            return lambda **inputs: chosen(*sigmoid.sigmoid_topk(**inputs))
        case "moe.dispatch":
            return _dispatched
        case "moe.combine":
            return combine.combine
        case "linear.mma_chain":
            from isoexec.kernels.linear.hopper.kernel import reference as one_tile  # needs triton

            wide = torch.float32 if constants.get("boundary", "model") == "float32" else torch.bfloat16
            return lambda x, w: one_tile(x, w, wide)
        case "linear_logprobs.mma_blocks":
            from isoexec.kernels.linear.hopper.kernel import reference as one_tile  # needs triton

            return lambda x, w, target: hopper_logprobs.token_logprobs(
                one_tile(x, w, torch.float32), target, vocab_leaves=constants["vocab_leaves"]
            )
        case "rms_norm.pairs":
            return hopper_rms_norm.rms_norm
        case "rms_norm.pairs_centred":
            return rms_norm_centred.rms_norm
        case "rms_norm.pairs_gated":
            return rms_norm_gated.rms_norm
        case "l2_norm.pairs":
            return l2_norm.l2_norm
        case "gate.sigmoid_mul":
            return sigmoid_mul.sigmoid_mul
        case "rope.interleaved_fp32":
            return rope_interleaved.rope
        case "rope.yarn_interleaved_fp32":
            return rope_yarn.rope
        case "silu_mul.poly":
            return hopper_silu_mul.silu_mul
        case "logprobs.blocks":
            return lambda logits, target: hopper_logprobs.token_logprobs(
                logits, target, vocab_leaves=constants["vocab_leaves"]
            )
        case "bias.add":
            return bias.bias_add
        case "rope.neox_fp32":
            return rope.rope
        case "attention.segments":
            return lambda q, k, v, scale: attention.attention(
                q, k, v, scale, kv_segment=constants["kv_segment"]
            )
        case "attention.mma_segments":
            from isoexec.kernels.attention.hopper import ops  # needs triton
            from isoexec.kernels.attention.hopper.reference import reference as by_triton

            def attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
                made = by_triton(
                    q[0], k[0], v[0], scale, kv_segment=constants["kv_segment"], hardware=ops.HARDWARE
                )
                return made[0].unsqueeze(0)

            return attended
        case "attention.latent_segments":
            from isoexec.kernels.latent_attention.hopper import reference as latent  # needs triton

            return lambda **given: latent.reference(**given, kv_segment=constants["kv_segment"])[0]
        case "silu_mul.exp":
            return silu_mul.silu_mul
        case "logprobs.leaves":
            return lambda logits, target: logprobs.token_logprobs(
                logits, target, vocab_leaves=constants["vocab_leaves"]
            )
        case "grad_norm.exact":
            return lambda tensors: torch.tensor(grad_norm.exact_sq_sum(tensors), dtype=torch.float64)
    raise DomainError("reference", f"function {function_id!r}", f"the functions {sorted(_SIZES)}")


def _dispatched(x: Tensor, experts: Tensor, count: int) -> Tensor:
    made = dispatch.plan(experts, 0, count)
    return dispatch.dispatch(x, made.slots, made.places)


def output_digest(out: Tensor) -> str:
    """`sha256:...` of a tensor's bytes in row-major order."""
    return digest_bytes(out.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


class Answer(NamedTuple):
    """What an object gave to a canary: ``out``, and one-element bools on its device of which any that is set voids it."""

    out: Tensor
    void: tuple[Tensor, ...] = ()

    @classmethod
    def where_equal(cls, out: Tensor, *pairs: tuple[Tensor, Tensor]) -> Answer:
        """``out``, void unless both tensors of each pair have the same bits; the host waits for nothing."""
        return cls(out, tuple(differ(one, other) for one, other in pairs))


class Asked:
    """A function's canary, put to several objects, whose answers are awaited together."""

    def __init__(
        self,
        function_id: str,
        constants: Mapping[str, Any],
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self._function, self._constants = function_id, constants
        self._dtype, self._device = dtype, device

    @torch.no_grad()
    def ask(self, call: Callable[..., Tensor | Answer], sizes: Mapping[str, int] | None = None) -> Answer:
        """Run `call` on the canary input (by argument name); its answer, in memory of its own, is not waited for."""
        inputs = canary(self._function, self._constants, dtype=self._dtype, sizes=sizes, device=self._device)
        given = call(**inputs)
        answer = given if isinstance(given, Answer) else Answer(given)
        if not isinstance(answer.out, torch.Tensor):
            raise TypeError(f"it gives {type(answer.out).__qualname__}, not a tensor")
        return answer._replace(out=answer.out.detach().clone())

    def digests(self, answers: Sequence[Answer]) -> list[str]:
        """Digest of each answer's output, that of a zero where it is void.

        The host waits for all of them once, and for each output that is not the one before it.
        """
        flags = [differ(one.out, other.out) for one, other in pairwise(answers)]
        told = _read([*flags, *(flag for answer in answers for flag in answer.void)])
        void = iter(told[len(flags) :])
        found, known = [], ""
        for answer, new in zip(answers, (True, *told[: len(flags)]), strict=False):
            if new:
                known = output_digest(answer.out)
            broken = [next(void) for _ in answer.void]
            found.append(output_digest(answer.out.new_zeros(())) if any(broken) else known)
        return found

    def digest(self, call: Callable[..., Tensor | Answer], sizes: Mapping[str, int] | None = None) -> str:
        """Run `call` on the canary input and digest its output."""
        return self.digests([self.ask(call, sizes)])[0]


def differ(a: Tensor, b: Tensor) -> Tensor:
    """Whether two tensors differ in a bit, in shape, dtype or device: a bool of one element, which the host does not wait for."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return torch.tensor(True)
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (a.contiguous().view(word) != b.contiguous().view(word)).any()


def _read(flags: Sequence[Tensor]) -> list[bool]:
    found = [False] * len(flags)
    for device in {flag.device for flag in flags}:
        of = [index for index, flag in enumerate(flags) if flag.device == device]
        for index, flag in zip(of, torch.stack([flags[i] for i in of]).tolist(), strict=True):
            found[index] = bool(flag)
    return found


def canary_digest(
    call: Callable[..., Tensor],
    function_id: str,
    constants: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    sizes: Mapping[str, int] | None = None,
    device: str = "cpu",
) -> str:
    """Run `call` on the canary input (by argument name, on `device`) and digest its output."""
    return Asked(function_id, constants, dtype=dtype, device=device).digest(call, sizes)


def expected_digest(
    function_id: str,
    constants: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float32,
    sizes: Mapping[str, int] | None = None,
) -> str:
    """What `canary_digest` gives for a faithful implementation on this machine: the specification, run here.

    On the CPU, but for tensor-core chains, whose specification is a kernel.
    """
    device = "cuda" if function_id in _ON_GPU else "cpu"
    call = reference(function_id, constants)
    return canary_digest(call, function_id, constants, dtype=dtype, sizes=sizes, device=device)
