# SPDX-License-Identifier: Apache-2.0
"""What the hooks of every engine have in common: how they get into vLLM's registries and out again, and refusals in words."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.quantization import (
    _CUSTOMIZED_METHOD_TO_QUANT_CONFIG,
    QUANTIZATION_METHODS,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from isoexec.adapters.base import Plan, regions_of
from isoexec.adapters.vllm import state
from isoexec.contracts.errors import InstallError

__all__ = [
    "QUANTIZATION",
    "Hooks",
    "IsoExecQuantization",
    "LookupMethod",
    "mimo",
    "refuse_unless",
    "refuse_unowned_bias",
]

QUANTIZATION = "isoexec"


def refuse_unless(holds: bool, region: str, wanted: str, found: object, fix: str = "") -> None:
    """Raise InstallError in words unless ``holds``."""
    if not holds:
        raise InstallError(
            region=region, wanted=wanted, found=str(found), fix=fix or "this contract has no function for it"
        )


def refuse_unowned_bias(layer: Any, region: str, name: str) -> None:
    """Refuse a bias no region of the contract owns: every one but that of a query, key and value projection."""
    if getattr(layer, "has_bias", False):
        owned = isinstance(layer, QKVParallelLinear) and "qkv_bias" in regions_of(
            state.required(region).contract, "engine"
        )
        refuse_unless(owned and not layer.skip_bias_add, region, "a linear without bias", f"a bias in {name}")


def mimo() -> ModuleType:
    """The module of one model family, which imports that family's classes."""
    return importlib.import_module("isoexec.adapters.vllm.mimo")


class LookupMethod(UnquantizedEmbeddingMethod):
    """The input embedding, its weight as loaded; the look-up itself is the layer's own forward."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the weight as it is: nothing is packed."""

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        refuse_unless(
            False,
            "embedding",
            "VocabParallelEmbedding replaced by the contract's",
            type(layer).__name__,
            "the plugin is only half installed in this process",
        )
        return input_


class IsoExecQuantization(QuantizationConfig):
    """What vLLM asks of the owner of every matmul; an engine's own class chooses the methods."""

    def get_name(self) -> str:
        return QUANTIZATION

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> IsoExecQuantization:
        del config  # everything comes from the contract of this process
        return cls()


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """One engine's entries in vLLM's registries.

    ``swaps`` are (regions, the engine's class, the class that takes its place), ``backend`` the attention backend that stands for
    the class at ``attention``.
    """

    config: type[IsoExecQuantization]
    swaps: tuple[tuple[tuple[str, ...], Any, type], ...]
    backend: AttentionBackendEnum
    attention: str

    def install(self, plan: Plan) -> None:
        """Register what the regions ``plan`` installs need; idempotent.

        Raises InstallError where somebody else already replaced a class the contract needs.
        """
        register_quantization_config(QUANTIZATION)(self.config)
        for regions, base, ours in self.swaps:
            if not any(plan.installs(r) for r in regions):
                continue
            there = op_registry_oot.get(base.__name__)
            if there is None:
                base.register_oot(ours)
            else:
                refuse_unless(
                    there is ours,
                    regions[0],
                    f"{base.__name__} free to replace",
                    f"{there.__module__}.{there.__qualname__}",
                    "remove the other out-of-tree plugin, or lower the region's enforcement",
                )
        if plan.installs("attention"):
            register_backend(self.backend, self.attention)
        if plan.installs("norm") and "MiMoForCausalLM" in plan.contract.model.architectures:
            mimo().install()

    def remove(self) -> None:
        """Undo `install`."""
        for _, base, ours in self.swaps:
            if op_registry_oot.get(base.__name__) is ours:
                del op_registry_oot[base.__name__]
        if self._attention() == self.attention:
            self.backend.clear_override()
        mimo().remove()
        if QUANTIZATION in QUANTIZATION_METHODS:
            QUANTIZATION_METHODS.remove(QUANTIZATION)
            _CUSTOMIZED_METHOD_TO_QUANT_CONFIG.pop(QUANTIZATION, None)
            if QUANTIZATION in (supported := current_platform.supported_quantization):
                supported.remove(QUANTIZATION)

    def registered(self, more: Iterable[str] = ()) -> dict[str, str]:
        """Region -> what vLLM's registries hold for it in this process; an intention, never evidence of what runs.

        ``more`` are regions beside the dense ones that the quantization's methods serve.
        """
        config = _CUSTOMIZED_METHOD_TO_QUANT_CONFIG.get(QUANTIZATION)
        owner = f"{config.__module__}.{config.__qualname__}" if config is not None else "native"
        found = dict.fromkeys(("column_linear", "qkv_bias", "lm_head", *more), owner)
        for regions, base, _ in self.swaps:
            there = op_registry_oot.get(base.__name__, base)
            found |= dict.fromkeys(regions, f"{there.__module__}.{there.__qualname__}")
        found["attention"] = self._attention()
        return found

    def _attention(self) -> str:
        native = self.backend.value or "native"
        return self.backend.get_path() if self.backend.is_overridden() else str(native)
