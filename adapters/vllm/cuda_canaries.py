# SPDX-License-Identifier: Apache-2.0
"""The canaries of the regions that vLLM binds otherwise on CUDA: attention through its own metadata, logprobs in the sampler."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isoexec.adapters.vllm.cuda_attention import PAGES, IsoExecMetadata, IsoExecMetadataBuilder
from isoexec.adapters.vllm.hooks import refuse_unless
from isoexec.kernels.canaries import Answer

__all__ = ["Attention", "logprobs"]

LOGPROBS = "vllm.v1.worker.gpu.sample.logprob"
CALLERS = (
    "vllm.v1.worker.gpu.sample.sampler",
    "vllm.v1.worker.gpu.sample.prompt_logprob",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
)
CALLED = ("compute_topk_logprobs", "compute_topk_scores")  # of vLLM 0.25, of 0.26


class _Step(NamedTuple):
    rows: slice
    slots: Tensor
    metadata: IsoExecMetadata


class Attention:
    """A prompt in two chunks, three drafted rows and decoded tokens, past the first segment's end, in scattered blocks.

    As in the engine every layer is called with the steps' metadata, which are made once; the cache is each layer's own.
    """

    def __init__(self, kv_segment: int) -> None:
        self._page = PAGES[0]
        self._total = kv_segment + 3 * self._page + 5
        self._made: list[_Step] = []

    def of(self, layer: Any) -> tuple[dict[str, int], Callable[..., Tensor]]:
        """The sizes of a layer's canary, and the call that puts it through the layer."""
        impl = layer.impl
        sizes = {
            "tokens": self._total,
            "heads": int(impl.num_heads),
            "kv_heads": int(impl.num_kv_heads),
            "head_dim": int(impl.head_size),
        }

        def call(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            q, k, v = q[0], k[0], v[0]
            blocks = -(-self._total // self._page)
            cache = torch.zeros(blocks + 1, 2, self._page, *k.shape[1:], dtype=k.dtype, device=k.device)
            out = torch.zeros_like(q)
            kept, impl.scale = impl.scale, scale
            try:
                for rows, slots, metadata in self._steps(k.device):
                    impl.do_kv_cache_update(layer, k[rows], v[rows], cache, slots)
                    impl.forward(layer, q[rows], k[rows], v[rows], cache, metadata, out[rows])
            finally:
                impl.scale = kept
            return out.unsqueeze(0)

        return sizes, call

    def _steps(self, device: torch.device) -> list[_Step]:
        """Metadata come from a builder as the engine's own do, those of the decoded tokens from one that a graph would hold.

        Each decoded token has a builder of its own, for what a graph holds is filled where it lies; the last one's is made for
        another token first, as for a capture.
        """
        if self._made:
            return self._made
        total, page = self._total, self._page
        blocks = -(-total // page)
        # backwards, block 0 unused
        table = torch.arange(blocks, 0, -1, dtype=torch.int32, device=device)[None]
        at = torch.arange(total, device=device)
        slots = table[0].long()[at // page] * page + at % page

        def common(first: int, rows: int) -> SimpleNamespace:
            return SimpleNamespace(
                num_reqs=1,
                num_actual_tokens=rows,
                max_query_len=rows,
                max_seq_len=first + rows,
                query_start_loc=torch.tensor([0, rows], dtype=torch.int32, device=device),
                seq_lens=torch.tensor([first + rows], dtype=torch.int32, device=device),
                block_table_tensor=table,
                positions=at[first : first + rows],
                causal=True,
            )

        def builder() -> IsoExecMetadataBuilder:
            config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=total))
            return IsoExecMetadataBuilder(SimpleNamespace(block_size=page), [], config, device)

        prompt, decoded, again = builder(), builder(), builder()
        again.build_for_cudagraph_capture(common(total - 2, 1))
        half = total // 2
        metadata = {
            (0, half): prompt.build(0, common(0, half)),
            (half, total - 5): prompt.build(0, common(half, total - 5 - half)),
            (total - 5, total - 2): prompt.build(0, common(total - 5, 3)),
            (total - 2, total - 1): decoded.build_for_cudagraph_capture(common(total - 2, 1)),
            (total - 1, total): again.build_for_cudagraph_capture(common(total - 1, 1)),
        }
        self._made = [_Step(slice(*of), slots[slice(*of)], made) for of, made in metadata.items()]
        return self._made


def logprobs(sampler: Any) -> Callable[..., Answer]:
    """The engine's own function for a sampled token and the best ones, as the sampler and the prompt's worker call it."""

    def call(logits: Tensor, target: Tensor) -> Answer:
        callers = dict.fromkeys((type(sampler).__module__, *CALLERS))
        found = [_called(name)(logits.clone(), 1, target).logprobs for name in callers]
        first = found[0]
        # where they differ no digest of it can match
        return Answer.where_equal(first[:, 0], *((first, other) for other in found[1:]))

    return call


def _called(module: str) -> Callable[..., Any]:
    """What a caller of the runner's logprobs calls: the function in its own module, which a patch may have exchanged there."""
    own = vars(importlib.import_module(module))
    found = [own[name] for name in CALLED if name in own]
    refuse_unless(
        len(found) == 1,
        "logprobs",
        f"one of {' and '.join(CALLED)} in {module}",
        f"{len(found)} of them",
        "use a build of the engine that this release was tried with",
    )
    made: Callable[..., Any] = found[0]
    return made
