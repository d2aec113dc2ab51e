# SPDX-License-Identifier: Apache-2.0
"""The canaries of the regions that vLLM binds otherwise on CUDA: attention through its own metadata, logprobs in the sampler."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from isoexec.adapters.vllm.cuda_attention import PAGES, IsoExecMetadataBuilder

__all__ = ["attention", "logprobs"]

LOGPROBS = "vllm.v1.worker.gpu.sample.logprob"
CALLERS = (
    "vllm.v1.worker.gpu.sample.sampler",
    "vllm.v1.worker.gpu.sample.prompt_logprob",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
)


def attention(layer: Any, kv_segment: int) -> tuple[dict[str, int], Callable[..., Tensor]]:
    """A prompt in two chunks, three drafted rows and decoded tokens, past the first segment's end, in scattered blocks.

    Metadata come from a builder as the engine's own do, those of the decoded tokens from one that a graph would hold.
    """
    impl = layer.impl
    page = PAGES[0]
    total = kv_segment + 3 * page + 5
    sizes = {
        "tokens": total,
        "heads": int(impl.num_heads),
        "kv_heads": int(impl.num_kv_heads),
        "head_dim": int(impl.head_size),
    }

    def call(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = q[0], k[0], v[0]
        blocks = -(-total // page)
        cache = torch.zeros(blocks + 1, 2, page, *k.shape[1:], dtype=k.dtype, device=k.device)
        table = torch.arange(blocks, 0, -1, dtype=torch.int32, device=k.device)[
            None
        ]  # backwards, block 0 unused
        at = torch.arange(total, device=k.device)
        slots = table[0].long()[at // page] * page + at % page
        spec = SimpleNamespace(block_size=page)
        config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=total))
        builder = IsoExecMetadataBuilder(spec, [], config, k.device)
        out = torch.zeros_like(q)
        kept, impl.scale = impl.scale, scale
        try:
            first = 0
            for rows in (total // 2, total - total // 2 - 5, 3, 1, 1):
                step = slice(first, first + rows)
                first += rows
                common = SimpleNamespace(
                    num_reqs=1,
                    num_actual_tokens=rows,
                    max_query_len=rows,
                    max_seq_len=first,
                    query_start_loc=torch.tensor([0, rows], dtype=torch.int32, device=k.device),
                    seq_lens=torch.tensor([first], dtype=torch.int32, device=k.device),
                    block_table_tensor=table,
                    positions=at[step],
                    causal=True,
                )
                captured = builder.build_for_cudagraph_capture
                metadata = captured(common) if rows == 1 else builder.build(0, common)
                impl.do_kv_cache_update(layer, k[step], v[step], cache, slots[step])
                impl.forward(layer, q[step], k[step], v[step], cache, metadata, out[step])
        finally:
            impl.scale = kept
        return out.unsqueeze(0)

    return sizes, call


def logprobs(sampler: Any) -> Callable[..., Tensor]:
    """The engine's own function for a sampled token and the best ones, as the sampler and the prompt's worker call it."""

    def call(logits: Tensor, target: Tensor) -> Tensor:
        callers = dict.fromkeys((type(sampler).__module__, *CALLERS))
        found = [
            importlib.import_module(name).compute_topk_logprobs(logits.clone(), 1, target).logprobs
            for name in callers
        ]
        first = found[0]
        if any(not torch.equal(first.view(torch.int32), one.view(torch.int32)) for one in found):
            return first.new_zeros(())  # they differ: no digest of it can match
        return first[:, 0].contiguous()

    return call
