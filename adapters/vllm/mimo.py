# SPDX-License-Identifier: Apache-2.0
"""MiMo's model class under a contract: its last residual add by the norm that is bound, as in Qwen2.

vLLM's MiMo keeps the unnormed sum for its draft layers: it adds in the model's forward and norms with the logits.  That
addition belongs to no layer, so no bound object would answer for it.  Without draft layers, which a contract run refuses, the
two forms give the same bits.
"""

from __future__ import annotations

from typing import Any

from vllm import ModelRegistry
from vllm.model_executor.models.mimo import MiMoForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM, Qwen2Model

from isoexec.contracts.errors import InstallError

__all__ = ["ARCHITECTURE", "IsoExecMiMoForCausalLM", "check", "install", "remove"]

ARCHITECTURE = "MiMoForCausalLM"
_native: list[Any] = []


class IsoExecMiMoForCausalLM(MiMoForCausalLM):
    """MiMo, its weights and its names, with Qwen2's layers, forward and logits."""

    compute_logits = Qwen2ForCausalLM.compute_logits

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        # MiMo's own would build a model whose forward is compiled as it is written, whatever is put in its place later
        Qwen2ForCausalLM.__init__(self, vllm_config=vllm_config, prefix=prefix)


def install() -> None:
    """Register the class by the engine's model registry; idempotent."""
    if not _native:
        _native.append(ModelRegistry.models[ARCHITECTURE])
        ModelRegistry.register_model(ARCHITECTURE, IsoExecMiMoForCausalLM)


def remove() -> None:
    """Give the registry the engine's own class back."""
    while _native:
        ModelRegistry.models[ARCHITECTURE] = _native.pop()


def check(model: Any) -> None:
    """Refuse a MiMo of the engine's own class."""
    if isinstance(model, MiMoForCausalLM) and not (
        type(model) is IsoExecMiMoForCausalLM and type(model.model) is Qwen2Model
    ):
        raise InstallError(
            region="norm",
            wanted="the last residual add in the norm that is bound",
            found=f"{type(model).__module__}.{type(model).__qualname__}, which adds outside of every layer",
            fix="the plugin is only half installed in this process",
        )
