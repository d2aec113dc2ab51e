# SPDX-License-Identifier: Apache-2.0
"""The worker of vLLM for CUDA under a contract: claims the switches, judges its groups, binds logprobs, probes the compiler."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu_worker import Worker

from isoexec.adapters.base import Plan
from isoexec.adapters.vllm import state
from isoexec.adapters.vllm.boundary import check_family, given_plan, mark_norms, plan_worker
from isoexec.adapters.vllm.cuda import HeadMethod, IsoExecRMSNorm, TableMethod, check
from isoexec.adapters.vllm.cuda_attention import IsoExecAttentionImpl
from isoexec.adapters.vllm.cuda_canaries import LOGPROBS
from isoexec.adapters.vllm.cuda_graphs import SampleGraphs
from isoexec.adapters.vllm.hooks import refuse_unless
from isoexec.adapters.vllm.objects import bound_objects
from isoexec.adapters.vllm.worker import IsoExecExtension
from isoexec.kernels.linear.hopper import cublaslt
from isoexec.kernels.logprobs.hopper.ops import token_logprobs

__all__ = ["IsoExecCUDAWorker", "bind_logprobs"]

_REGION = "logprobs"
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_ROWS = (1, 19)  # rows of the probes of compiled code: a single one has providers of its own


def bind_logprobs(plan: Plan, graphs: SampleGraphs) -> None:
    """Put the contract's function where the engine's runner takes every logprob: sampled, of the prompt, the best, of drafts.

    The runner has no extension point for it.  What its callers then give is asked by the region's canary, at each report.
    ``graphs`` serve a decode step once they are recorded.
    """
    leaves = int(plan.constant(_REGION, "vocab_leaves"))
    inside = state.Inside(_REGION)

    def compute_token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
        """``logits`` [rows, vocabulary], ``token_ids`` [rows, n] -> fp32 [rows, n]."""
        with inside:
            ids = token_ids.long()
            if ids.shape[1] == 1:  # of the sampled token alone, at every step
                ids = ids.reshape(-1)
                held = graphs.logprobs(logits, ids)
                own = token_logprobs(logits, ids, vocab_leaves=leaves) if held is None else held
                return own.unsqueeze(1)
            columns = [column.contiguous() for column in ids.unbind(1)]
            return torch.stack([token_logprobs(logits, one, vocab_leaves=leaves) for one in columns], 1)

    module: Any = importlib.import_module(LOGPROBS)
    refuse_unless(
        hasattr(module, "compute_token_logprobs"),
        _REGION,
        f"{LOGPROBS}.compute_token_logprobs to replace",
        "no such function",
        "use a build of the engine that this release was tried with",
    )
    module.compute_token_logprobs = compute_token_logprobs


def _refuse_beyond(config: Any) -> None:
    """Refuse what only this engine cannot do under a contract."""
    mode = config.compilation_config.mode
    refuse_unless(
        mode in (None, CompilationMode.NONE, CompilationMode.VLLM_COMPILE),
        "engine",
        "no compilation, or vLLM's own",
        f"compilation mode {mode}",
    )
    custom = list(config.compilation_config.custom_ops)
    refuse_unless(
        "all" in custom and not any(name.startswith("-") for name in custom),
        "engine",
        "custom_ops all: what the compiler makes of a native layer is no op of the contract",
        f"custom_ops {custom}",
        "leave compilation_config to engine_args",
    )
    refuse_unless(
        not config.cache_config.calculate_kv_scales, "attention", "an unscaled cache", "calculate_kv_scales"
    )


class IsoExecCUDAWorker(Worker, IsoExecExtension):
    """``worker_cls`` of a contract run: the engine stops at its start where this class or the plugin is missing.

    The engine's class comes first: vLLM adds extensions behind a worker class, and only so do both orders agree.
    """

    def init_device(self) -> None:
        """Start the groups, claim the switches of every matmul, plan anew from the live sizes, and bind the logprobs."""
        super().init_device()
        given_plan()
        kind = type(self.model_runner)
        refuse_unless(
            kind.__module__ == _RUNNER,
            "engine",
            "the V2 model runner",
            f"{kind.__module__}.{kind.__qualname__}",
            "unset VLLM_USE_V2_MODEL_RUNNER, and leave out what the engine's log says V2 does not support",
        )
        cublaslt.claim()
        cublaslt.probe()
        plan = plan_worker(self.vllm_config, _refuse_beyond)
        self._isoexec_graphs = SampleGraphs()
        if plan.installs(_REGION):
            bind_logprobs(plan, self._isoexec_graphs)

    def load_model(self, **given: Any) -> None:
        """Load the model, tell each norm which region it serves, and refuse layers the contract has no function for."""
        super().load_model(**given)
        model = self.model_runner.get_model()
        check_family(model)
        mark_norms(model, IsoExecRMSNorm)
        check(model)

    def compile_or_warm_up_model(self) -> Any:
        """The last thing an engine does before it serves: what it is then is what it must stay."""
        cublaslt.check()  # before graphs are captured: they hold whatever computes now
        result = super().compile_or_warm_up_model()
        cublaslt.check()
        self._isoexec_record()
        self._isoexec_remember()
        problem = self._isoexec_disagrees()
        refuse_unless(
            problem is None,
            "engine",
            "compiled code with the bits of the layers that are bound",
            str(problem),
            "remove VLLM_CACHE_ROOT's torch_compile_cache; if it stays so, pass enforce_eager=True and report it",
        )
        return result

    @torch.inference_mode()
    def _isoexec_record(self) -> None:
        """Record head and logprobs for the rows that the engine has graphs for itself, and use them where it samples."""
        config, runner = self.vllm_config.compilation_config, self.model_runner
        heads = [bound for _, bound in bound_objects(runner)["lm_head"]]
        if config.cudagraph_mode == CUDAGraphMode.NONE or not heads or not state.installs("lm_head"):
            return
        refuse_unless(len(heads) == 1, "lm_head", "one output head", f"{len(heads)} of them")
        head = heads[0]
        assert isinstance(head.quant_method, HeadMethod | TableMethod)
        # of a head in parts, logprobs are of what these are joined to
        whole, plan = state.installs(_REGION) and head.tp_size == 1, state.required(_REGION)
        leaves = int(plan.constant(_REGION, "vocab_leaves")) if whole else None
        self._isoexec_graphs.record(head, config.cudagraph_capture_sizes or (), leaves)
        head.quant_method.graphs = self._isoexec_graphs
        refuse_unless(
            hasattr(runner, "sample"),
            "lm_head",
            f"{_RUNNER}.sample, inside of which a step's graphs are used",
            "no such method",
            "use a build of the engine that this release was tried with, or pass enforce_eager=True",
        )
        runner.sample = self._isoexec_graphs.sampling(runner.sample)

    def _isoexec_tables(self) -> list[Tensor]:
        layers = {(int(r.head_size), float(r.base)): r for _, r in bound_objects(self.model_runner)["rope"]}
        return [
            t.cpu()
            for shape in sorted(layers)
            for t in (layers[shape].isoexec_cos, layers[shape].isoexec_sin)
        ]

    @torch.inference_mode()
    def _isoexec_disagrees(self) -> str | None:
        """Where compiled code, which captured graphs hold, has other bits than the bound layers called one by one, or a graph of
        the head.

        All read the same rows; attention hands on its queries, and keeps what every layer gave it.  The layers are called with
        the most rows only: no bit of a row may depend on how many come with it, and where compiled code takes another provider
        for few rows, it is held to that as well.
        """
        graphs = self._isoexec_graphs.disagrees()
        if graphs is not None or self.vllm_config.compilation_config.mode in (None, CompilationMode.NONE):
            return graphs
        layered = self._isoexec_forward(max(_ROWS), True)
        passes = [(rows, self._isoexec_forward(rows, False)) for rows in _ROWS]
        return _disagreement(layered, passes)

    def _isoexec_forward(self, rows: int, layered: bool) -> list[Tensor]:
        """What reached each attention, [rows, width], then the hidden states."""
        runner = self.model_runner
        model = runner.get_model()
        device = runner.device
        ids = (torch.arange(rows, device=device) * 7919 % runner.vocab_size).int()
        positions = torch.arange(rows, device=device)
        with (
            _watched(model) as seen,
            set_forward_context(
                None, self.vllm_config, num_tokens=rows, slot_mapping={}, skip_compiled=layered
            ),
        ):
            hidden = model(input_ids=ids, positions=positions, inputs_embeds=None, intermediate_tensors=None)
        # beside the last layer's, those of others that a model which drafts asks for
        last, *others = hidden if isinstance(hidden, tuple) else (hidden,)
        own = (*(others[0] if others else ()), last)
        return [*seen, *(one.clone(memory_format=torch.contiguous_format) for one in own)]


def _disagreement(layered: list[Tensor], passes: list[tuple[int, list[Tensor]]]) -> str | None:
    """The first place in which a pass of so many rows has other bits than the first rows of ``layered``; one wait for all."""
    counts, places = [], []
    for rows, compiled in passes:
        if len(layered) != len(compiled):
            return f"compiled code hands on {len(compiled)} tensors, the layers {len(layered)}"
        for place, (whole, other) in enumerate(zip(layered, compiled, strict=True)):
            one = whole[:rows]
            layer = f"attention {place}" if place < len(layered) - 1 else "the last layer"
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                told = [f"{x.dtype} {list(x.shape)}" for x in (other, one)]
                return f"compiled code gives {told[0]} before {layer}, the layers {told[1]}"
            counts.append((one.view(torch.int16) != other.view(torch.int16)).sum())
            places.append((layer, rows))
    for count, (layer, rows) in zip(torch.stack(counts).tolist(), places, strict=True):
        if count:
            return f"compiled code differs from the layers in {count} elements before {layer}, {rows} rows"
    return None


@contextmanager
def _watched(model: torch.nn.Module) -> Iterator[list[Tensor]]:
    """Let every attention of a model keep what it is given, and give back its queries."""
    seen: list[Tensor] = []

    def forward(*args: Any, output: Tensor, **scales: Any) -> Tensor:
        _, query, key, value, *_ = args
        assert not any(scale is not None for scale in scales.values())
        seen.append(torch.cat([x.reshape(len(x), -1) for x in (query, key, value)], 1))
        return output.copy_(query)

    modules: Any = model.modules()
    impls = [m.impl for m in modules if isinstance(getattr(m, "impl", None), IsoExecAttentionImpl)]
    for impl in impls:
        impl.forward = forward
    try:
        yield seen
    finally:
        for impl in impls:
            del impl.forward
