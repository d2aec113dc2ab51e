# SPDX-License-Identifier: Apache-2.0
"""The layers bound into vLLM 0.25 and 0.26 for CUDA (V2 model runner, compiled, graphs), one per region, and how they get there.

===================  ==========================================================================  ==================
region               extension point                                                             where it is missing
===================  ==========================================================================  ==================
column_linear        ``quantization="isoexec"`` (``register_quantization_config``)               engine refuses
qkv_bias             the same                                                                    engine refuses
row_linear           the same, and ``RowParallelLinear.register_oot`` for the hand-off           engine refuses
lm_head              the same; of a tied head by the embedding's method                          engine refuses
embedding            the same, and ``VocabParallelEmbedding.register_oot``                       engine refuses
norm, qk_norm        ``RMSNorm.register_oot``                                                    runs natively
rope                 ``RotaryEmbedding.register_oot``                                            runs natively
silu_mul             ``SiluAndMul.register_oot``                                                 runs natively
attention            ``register_backend(CUSTOM, ...)`` and ``attention_backend="CUSTOM"``        engine refuses
logprobs             ``worker_cls`` (`isoexec.adapters.vllm.cuda_worker`)                        engine refuses
===================  ==========================================================================  ==================

Every region is one opaque op of the ``isoexec`` library, so what the compiler makes of a forward are calls of these ops and
views.  A forward is traced once: it must have no side effect, and what it must refuse is refused when the model is loaded
(`check`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    LinearBase,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from isoexec.adapters.base import Plan
from isoexec.adapters.vllm import state
from isoexec.adapters.vllm.cuda_graphs import SampleGraphs
from isoexec.adapters.vllm.hooks import (
    Hooks,
    IsoExecQuantization,
    LookupMethod,
    refuse_unless,
    refuse_unowned_bias,
)
from isoexec.kernels.bias.hopper.ops import bias_add
from isoexec.kernels.embedding.hopper import ops as _embedding
from isoexec.kernels.groups import name_of, size_of
from isoexec.kernels.linear.hopper import ops as _linear
from isoexec.kernels.linear.hopper.table import known
from isoexec.kernels.rms_norm.hopper.ops import add_rms_norm, rms_norm
from isoexec.kernels.rope.hopper.ops import rope, tables
from isoexec.kernels.silu_mul.hopper.ops import silu_mul_halves

__all__ = [
    "ATTENTION",
    "HeadMethod",
    "IsoExecCUDAConfig",
    "IsoExecRMSNorm",
    "TableMethod",
    "check",
    "install",
    "registered",
    "remove",
]

ATTENTION = "isoexec.adapters.vllm.cuda_attention.IsoExecAttentionBackend"


def _with_bias(out: Tensor, bias: Tensor | None, ours: bool) -> Tensor:
    """The rounded product [tokens, N] plus its bias: the contract's, or torch's where a process does not install it."""
    if bias is None:
        return out
    return bias_add(out, bias) if ours else out + bias


@register_weight_loader_v2_supported_method
class IsoExecBiasMethod(UnquantizedLinearMethod):
    """The engine's own linear with the contract's bias, where a process installs ``qkv_bias`` and not ``column_linear``."""

    def create_weights(self, layer: Any, *args: Any, **extra: Any) -> None:
        refuse_unowned_bias(layer, "qkv_bias", getattr(layer, "prefix", type(layer).__name__))
        super().create_weights(layer, *args, **extra)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return _with_bias(super().apply(layer, x, None), bias, True)


@register_weight_loader_v2_supported_method
class IsoExecLinearMethod(UnquantizedLinearMethod):
    """A linear of the contract, ``layer.weight`` [N, K] kept as loaded."""

    def __init__(self, region: str) -> None:
        self.region = region
        self.bias_is_ours = state.installs("qkv_bias")

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args: Any,
        **extra: Any,
    ) -> None:
        """As the engine does; DomainError for a weight that no evidence is of, before any is loaded."""
        refuse_unowned_bias(layer, self.region, getattr(layer, "prefix", type(layer).__name__))
        known(sum(output_partition_sizes), input_size_per_partition)
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *args, **extra)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the weight as it is: nothing is packed."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` [tokens, K] bf16 -> [tokens, N] bf16, rounded once, and once more after a bias."""
        return _with_bias(_linear.linear(x, layer.weight), bias, self.bias_is_ours)


def _logits(layer: Any, x: Tensor, bias: Tensor | None, graphs: SampleGraphs | None) -> Tensor:
    """``x`` [tokens, K] bf16 -> fp32 logits [tokens, N] of a rank's part of the vocabulary."""
    refuse_unless(bias is None, "lm_head", "a head without bias", "a bias")
    held = None if graphs is None else graphs.logits(layer.weight, x)
    return _linear.linear(x, layer.weight, fp32_out=True) if held is None else held


class HeadMethod(UnquantizedEmbeddingMethod):
    """The output head: the same chain, fp32 logits that are never rounded to the model dtype."""

    graphs: SampleGraphs | None = None

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args: Any,
        **extra: Any,
    ) -> None:
        """As the engine does; DomainError for a head that no evidence is of, before any is loaded."""
        known(sum(output_partition_sizes), input_size_per_partition)
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *args, **extra)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the weight as it is: nothing is packed."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` [tokens, K] -> fp32 logits [tokens, N]."""
        return _logits(layer, x, bias, self.graphs)


class TableMethod(LookupMethod):
    """The input embedding, and the output head of a model that ties the two."""

    graphs: SampleGraphs | None = None

    def __init__(self) -> None:
        self.head_is_ours = state.installs("lm_head")

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` [tokens, K] -> fp32 logits [tokens, N]."""
        return _logits(layer, x, bias, self.graphs) if self.head_is_ours else super().apply(layer, x, bias)


class IsoExecVocabParallelEmbedding(VocabParallelEmbedding):
    """Vocabulary-parallel look-up; each row has one owner and the ranks' rows are joined exactly."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.isoexec_group = name_of(get_tp_group().device_group)

    def forward(self, input_: Tensor) -> Tensor:
        if not isinstance(self.quant_method, LookupMethod):
            return super().forward(input_)
        start, rows = self.shard_indices.org_vocab_start_index, self.weight.shape[0]
        if not self.isoexec_group:
            return _embedding.vocab_parallel_embedding(input_, self.weight, vocab_start=start, group=None)
        # by the group's name: the compiler cannot hold a process group
        return torch.ops.isoexec.sm90_embedding.default(
            input_, self.weight, start, rows * self.tp_size, self.isoexec_group, False
        )


class IsoExecRowParallelLinear(RowParallelLinear):
    """Row-parallel linear: each rank goes on with the fp32 accumulator of the rank before it."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.isoexec_group = name_of(get_tp_group().device_group)

    def forward(self, input_: Tensor) -> Any:
        if not isinstance(self.quant_method, IsoExecLinearMethod):
            return super().forward(input_)
        if not self.isoexec_group:
            out = _linear.linear(input_, self.weight)
        else:
            out = torch.ops.isoexec.sm90_row_linear.default(
                input_, self.weight, None, self.isoexec_group, False
            )
        return (out, None) if self.return_bias else out


class IsoExecRMSNorm(RMSNorm):
    """RMSNorm with or without the residual add; the residual is rounded to the model dtype before it is normalised."""

    isoexec_region = "norm"  # q_norm and k_norm are marked once the model is built
    isoexec_native = False  # where a process installs only one of the two regions

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if self.isoexec_native:
            return super().forward_cuda(x, residual)
        if residual is None:
            return rms_norm(x, self.weight.data, self.variance_epsilon)
        return add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)


class IsoExecRotaryEmbedding(RotaryEmbedding):
    """Neox rotation over the whole head with the contract's own table, made on the host before anything is traced."""

    isoexec_cos: Tensor
    isoexec_sin: Tensor

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        device = torch.get_default_device()
        with torch.device("cpu"):  # the loader's default device is the GPU, whose cosine has other bits
            cos, sin = tables(self.rotary_dim, float(self.base), device)
        self.register_buffer("isoexec_cos", cos, persistent=False)
        self.register_buffer("isoexec_sin", sin, persistent=False)

    def forward_cuda(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        """``positions`` [tokens], ``query`` and ``key`` [tokens, heads * head_dim] -> the same shapes, turned."""
        return self._turn(query, positions), None if key is None else self._turn(key, positions)

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        heads = x.view(x.shape[0], -1, self.head_size)
        return rope(heads, positions, self.isoexec_cos, self.isoexec_sin).view(x.shape)


class IsoExecSiluAndMul(SiluAndMul):
    """SiLU of the gate half times the up half, rounded once."""

    def forward_cuda(self, x: Tensor) -> Tensor:
        """``x`` [tokens, 2 * width], gate first -> [tokens, width]."""
        return silu_mul_halves(x)


class IsoExecCUDAConfig(IsoExecQuantization):
    """Owner of every matmul.  At module level: with several ranks the engine pickles it to its workers."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            refuse_unless(
                not isinstance(layer, ReplicatedLinear), "column_linear", "column and row linears", prefix
            )
            region = "row_linear" if isinstance(layer, RowParallelLinear) else "column_linear"
            if state.installs(region):
                return IsoExecLinearMethod(region)
            own_bias = isinstance(layer, QKVParallelLinear) and state.installs("qkv_bias")
            return IsoExecBiasMethod() if own_bias else UnquantizedLinearMethod()
        if isinstance(layer, ParallelLMHead):
            return HeadMethod() if state.installs("lm_head") else UnquantizedEmbeddingMethod()
        if isinstance(layer, VocabParallelEmbedding):
            return TableMethod() if state.installs("embedding") else UnquantizedEmbeddingMethod()
        return None


_HOOKS = Hooks(
    config=IsoExecCUDAConfig,
    swaps=(
        (("row_linear",), RowParallelLinear, IsoExecRowParallelLinear),
        (("embedding",), VocabParallelEmbedding, IsoExecVocabParallelEmbedding),
        (("norm", "qk_norm"), RMSNorm, IsoExecRMSNorm),
        (("rope",), RotaryEmbedding, IsoExecRotaryEmbedding),
        (("silu_mul",), SiluAndMul, IsoExecSiluAndMul),
    ),
    backend=AttentionBackendEnum.CUSTOM,
    attention=ATTENTION,
)
remove = _HOOKS.remove


def install(plan: Plan) -> None:
    """Register the hooks of the regions ``plan`` installs; idempotent.

    Raises InstallError for a region that nothing here serves, and where somebody else already replaced a class.
    """
    served = {"logprobs", "qk_norm", *_HOOKS.registered()}
    beyond = [b.region for b in plan.bindings if b.enforcement.installs and b.region not in served]
    refuse_unless(
        not beyond,
        beyond[0] if beyond else "engine",
        f"regions that are bound in vLLM for CUDA: {', '.join(sorted(served))}",
        ", ".join(beyond),
        "use a release that binds them, or say ISOEXEC_ENFORCE=REGION=off to run one natively",
    )
    _HOOKS.install(plan)


def registered() -> dict[str, str]:
    """Region -> what vLLM's registries hold for it in this process; an intention, never evidence of what runs."""
    return _HOOKS.registered()


def check(model: nn.Module) -> None:
    """Refuse, once a model is loaded, a layer whose settings the contract has no function for: its forward cannot."""
    for name, module in model.named_modules():
        match module:
            case IsoExecRMSNorm():
                region = module.isoexec_region
                module.isoexec_native = not state.installs(region)
                refuse_unless(
                    module.isoexec_native or (module.variance_size_override is None and module.has_weight),
                    region,
                    "a whole-width RMSNorm with a weight",
                    f"{name}: {module.extra_repr()}",
                )
            case IsoExecRotaryEmbedding():
                refuse_unless(
                    module.is_neox_style and module.rotary_dim == module.head_size,
                    "rope",
                    "neox rotation of the whole head",
                    f"{name}: {module.extra_repr()}",
                )
            case IsoExecRowParallelLinear() if isinstance(module.quant_method, IsoExecLinearMethod):
                refuse_unless(
                    module.input_is_parallel
                    and module.reduce_results
                    and module.bias is None
                    and module.tp_size == size_of(module.isoexec_group),
                    "row_linear",
                    "a reduced row-parallel linear without bias, input already split",
                    f"{name}: {module.extra_repr()}",
                )
            case VocabParallelEmbedding() if isinstance(module.quant_method, LookupMethod | HeadMethod):
                refuse_unless(
                    module.num_embeddings_padded == module.org_vocab_size,
                    "lm_head" if isinstance(module.quant_method, HeadMethod) else "embedding",
                    "one plain vocabulary in equal parts, without padding",
                    f"{name}: {module.org_vocab_size} of {module.num_embeddings_padded} rows",
                )
