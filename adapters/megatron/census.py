# SPDX-License-Identifier: Apache-2.0
"""The census of megatron-core: one forward of each trainer case through Megatron's own schedule, with the backward it has.

Run as a module it builds a model in a process of its own: ``python -m isoexec.adapters.megatron.census``, by `isoexec census`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from isoexec.adapters.census import Census, load_allowed, main
from isoexec.adapters.megatron import cpu
from isoexec.adapters.megatron.logprobs import model_inputs, output_processor, score, sequence_multiple
from isoexec.adapters.megatron.weights import unwrap
from isoexec.adapters.recorder import Recorder
from isoexec.contracts.schema import Contract

__all__ = ["ALLOWED", "ALLOWED_ON", "census"]

ALLOWED = Path(__file__).with_name("census.yaml")
ALLOWED_ON = {"sm90": Path(__file__).with_name("census_sm90.yaml")}
"""The list of an arch whose ops have other gradient nodes."""
_ROWS, _LENGTH = 2, 8


class _Gradient(torch.autograd.Function):
    """Stands for a loss, without any arithmetic of its own: a fixed gradient of every logprob."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor) -> Tensor:
        ctx.save_for_backward(torch.full_like(logprobs, 0.5))
        return logprobs.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        (gradient,) = ctx.saved_tensors
        return gradient


def census(model: Any, contract: Contract | None) -> Census:
    """The census of a model, of which every rank must call it: weights, gradients and settings stay as they were."""
    inner = unwrap(model)
    size = _LENGTH * sequence_multiple(model)
    device = next(inner.parameters()).device
    tokens = torch.arange(_ROWS * size, device=device).view(_ROWS, size) % inner.vocab_size
    cases: dict[str, Callable[[], None]] = {
        "trainer_fwd": lambda: _train(inner, tokens, recompute=False),
        "trainer_recompute": lambda: _train(inner, tokens, recompute=True),
        "trainer_score": lambda: _score(model, tokens),
    }
    wanted = contract.cases_of("trainer") if contract is not None else tuple(cases)
    if cpu.installed() and any(
        "attention" not in getattr(layer.self_attention.core_attention, "owns", ())
        for layer in inner.decoder.layers
    ):
        # Megatron's own attention asks for "cuda" when it is recomputed, where the shims cannot answer
        wanted = tuple(case for case in wanted if case != "trainer_recompute")
    recorders = []
    for case in wanted:
        recorder = Recorder(case, {"": inner})
        with _settled(inner), recorder.watching():
            cases[case]()
        recorders.append(recorder)
    return Census.judged(
        recorders,
        load_allowed(ALLOWED if contract is None else ALLOWED_ON.get(contract.arch, ALLOWED)),
        runtime="megatron",
        versions={"megatron-core": version("megatron-core"), "torch": torch.__version__},
        contract=contract.name if contract is not None else None,
    )


def _score(model: Any, tokens: Tensor) -> None:
    # or the schedule scales the auxiliary loss of experts, which no model under a contract has
    unwrap(model).config.calculate_per_token_loss = True
    score(model, tokens, microbatch=_ROWS)


def _train(inner: Any, tokens: Tensor, *, recompute: bool) -> None:
    config = inner.config
    if recompute:
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = (
            "full",
            "uniform",
            1,
        )
    else:
        config.recompute_granularity = None
    config.calculate_per_token_loss = True  # the schedule leaves such a loss as it is
    one = torch.ones((), dtype=torch.int, device=tokens.device)
    multiple = sequence_multiple(inner)
    process = output_processor(inner)

    def forward(batches: Iterator[Tensor], stage: Any) -> tuple[Tensor, Callable[..., Any]]:
        values = stage(**model_inputs(next(batches), multiple), output_processor=process)
        return values, lambda logprobs: (_Gradient.apply(logprobs), one, {})

    inner.train()
    get_forward_backward_func(pp_size=inner.pg_collection.pp.size())(
        forward_step_func=forward,
        data_iterator=iter([tokens]),
        model=[inner],
        num_microbatches=1,
        seq_length=tokens.shape[1],
        micro_batch_size=_ROWS,
        forward_only=False,
    )


_SETTINGS = (
    "calculate_per_token_loss",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "finalize_model_grads_func",  # what a trainer does after backward is not of the forward's cases
    "grad_scale_func",
    "grad_sync_func",
    "no_sync_func",
    "param_sync_func",
)


@contextmanager
def _settled(inner: Any) -> Iterator[None]:
    """Give back settings, mode and gradients afterwards; the stacks of the forward are kept for its backward."""
    config, mode = inner.config, inner.training
    settings = {name: getattr(config, name) for name in _SETTINGS if hasattr(config, name)}
    gradients = [(p, p.grad, getattr(p, "main_grad", None)) for p in inner.parameters()]
    kept = [(main, main.clone()) for _, _, main in gradients if main is not None]
    for p, _, _ in gradients:
        p.grad = None
    for name in settings:
        if name.endswith("_func"):
            setattr(config, name, None)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            torch.autograd.set_detect_anomaly(True, check_nan=False),
        ):
            yield
    finally:
        for name, value in settings.items():
            setattr(config, name, value)
        for p, gradient, _ in gradients:
            p.grad = gradient
        for main, before in kept:
            main.copy_(before)
        inner.train(mode)


def _take(folder: str, path: str | None, dtype: str) -> Census:
    """Build the model of a folder on one rank, on the CPU where there is no GPU, and take its census."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch._C._distributed_c10d import HashStore

    from isoexec.adapters.megatron.model import build

    if not torch.cuda.is_available():
        cpu.install()
    dist.init_process_group(
        "gloo" if not torch.cuda.is_available() else "nccl", store=HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=False)
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
    contract = Contract.load(path) if path else None
    try:
        return census(build(folder, dtype=getattr(torch, dtype), contract=contract), contract)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(_take)
