# SPDX-License-Identifier: Apache-2.0
"""Runs the registry's canary through the object that is bound in a region, as the engine itself calls it.

A layer gets the canary's weight for the length of the call, so that the layer, its hooks and whatever it hands its arithmetic to
answer, and not a copy of them.  Workers are idle then: the engine answers ``collective_rpc`` between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group

from isoexec.adapters.base import Binding, expected_canary
from isoexec.kernels import registry
from isoexec.kernels.canaries import Answer, chosen
from isoexec.kernels.dispatch import plan
from isoexec.kernels.rope.naive import table

Call = Callable[..., Tensor | Answer]

__all__ = ["Asked", "Canary", "borrowed"]

_SQUARE = 4096  # the side of a square weight that the table of the sm90 linear lists
_BLOCKS = 3  # cache blocks of the attention canary; one stays unused


@contextmanager
def borrowed(bound: Any, **values: Any) -> Iterator[None]:
    """Give attributes and parameters of a live object other values for the length of a block."""
    parameters = getattr(bound, "_parameters", {})
    kept = {name: parameters[name] if name in parameters else getattr(bound, name) for name in values}
    try:
        for name, value in values.items():
            _put(bound, name, value, name in parameters)
        yield
    finally:
        for name, value in kept.items():
            _put(bound, name, value, name in parameters)


def _put(bound: Any, name: str, value: Any, parameter: bool) -> None:
    if parameter:
        plain = value is None or isinstance(value, nn.Parameter)
        bound._parameters[name] = value if plain else nn.Parameter(value, requires_grad=False)
    else:
        setattr(bound, name, value)


class Asked(NamedTuple):
    """What an object was asked: its answer, and the digest of a faithful one's output."""

    answer: Answer
    expected: str

    @property
    def bytes(self) -> int:
        """Memory that the answer holds."""
        return self.answer.out.numel() * self.answer.out.element_size()


class Canary:
    """The canary of one region's function at the model's dtype."""

    def __init__(self, binding: Binding, dtype: torch.dtype, device: str = "cpu") -> None:
        self._region = binding.region
        self._function = binding.function
        self._constants = dict(binding.constants)
        group = get_tp_group()
        self._rank, self._ranks = group.rank_in_group, group.world_size
        self._device = device
        # one rounding to bfloat16 would hide the order in which a few rows are added
        self._inputs = torch.float32 if self._region == "combine" else dtype
        self._asked = registry.Asked(self._function, self._constants, dtype=self._inputs, device=device)
        self._steps: Any = None  # of attention on CUDA, made for the first layer

    def ask(self, bound: Any) -> Asked:
        """Put the canary to a bound object; its output is not waited for."""
        sizes, call = getattr(self, f"_{self._region}")(bound)
        expected = expected_canary(self._function, self._constants, self._inputs, sizes)
        return Asked(self._asked.ask(call, sizes), expected)

    def digests(self, asked: Sequence[Asked]) -> list[tuple[str, str]]:
        """For each object asked, digest of its output and the one a faithful object gives; the host waits once for all."""
        found = self._asked.digests([one.answer for one in asked])
        return [(digest, one.expected) for digest, one in zip(found, asked, strict=True)]

    def stale(self, bound: Any) -> str | None:
        """In words, what the object computes with that is not its own: a copy of an older weight, or the loan of a bias."""
        if self._region == "qkv_bias" and bound.bias is None:
            return "no bias of its own"
        packed = getattr(bound, "isoexec_packed", None)
        return None if packed is None or packed.fresh(bound.weight) else "a packed copy of an older weight"

    def _embedding(self, layer: Any) -> tuple[dict[str, int], Call]:
        vocab = 64 * self._ranks

        def call(ids: Tensor, w: Tensor) -> Tensor:
            shard = layer._get_indices(vocab, vocab, vocab, vocab, self._rank, self._ranks)
            rows = w[shard.org_vocab_start_index : shard.org_vocab_end_index].clone()
            with borrowed(layer, weight=rows, shard_indices=shard):
                return layer(ids)

        return {"vocab": vocab}, call

    def _norm(self, layer: Any) -> tuple[dict[str, int], Call]:
        def call(x: Tensor, w: Tensor, eps: float) -> Answer:
            half = (x * 0.4990234375).contiguous()
            rest = x - half  # rounded: their sum is x only after one more rounding
            whole = half + rest
            with borrowed(layer, weight=w, variance_epsilon=eps):
                summed, kept = layer(half.clone(), rest.clone())
                plain, alone = layer(torch.cat([x, whole])).split(len(x))
            # another residual add: no digest of it can match
            return Answer.where_equal(plain, (summed, alone), (kept, whole))

        return {"width": int(layer.weight.shape[0])}, call

    def _qk_norm(self, layer: Any) -> tuple[dict[str, int], Call]:
        def call(x: Tensor, w: Tensor, eps: float) -> Tensor:
            with borrowed(layer, weight=w, variance_epsilon=eps):
                return layer(x.clone())

        return {"width": int(layer.weight.shape[0])}, call

    def _k(self) -> dict[str, int]:
        """The canary's K where a chain is cut in blocks; where it is not, its own weight is one the kernel's table lists."""
        if "k_block" not in self._constants:
            return {}
        return {"K": 2 * int(self._constants["k_block"]) * max(2, self._ranks)}

    def _linear(self, layer: Any, w: Tensor, bias: Tensor | None = None) -> Any:
        """The loan of a weight and bias; a layer of ours gets an empty pack beside it and keeps its own."""
        packed = getattr(layer, "isoexec_packed", None)
        beside: dict[str, Any] = {} if packed is None else {"isoexec_packed": type(packed)(packed.k_block)}
        if packed is None and bias is not None and hasattr(layer, "cpu_linear"):
            beside["cpu_linear"] = (
                torch.nn.functional.linear
            )  # the engine's own holds a packed copy of the weight
        if bias is not None or getattr(layer, "bias", None) is not None:
            beside["bias"] = bias
        return borrowed(layer, weight=w.contiguous(), **beside)

    def _column_linear(self, layer: Any) -> tuple[dict[str, int], Call]:
        def call(x: Tensor, w: Tensor) -> Tensor:
            with self._linear(layer, w):
                return _first(layer(x))

        return self._k(), call

    def _qkv_bias(self, layer: Any) -> tuple[dict[str, int], Call]:
        """The whole layer, with a weight that hands its input on unchanged."""
        packed = getattr(layer, "isoexec_packed", None)
        square = _SQUARE if self._device == "cuda" else 128
        width = square if packed is None else 2 * int(packed.k_block)

        def call(x: Tensor, bias: Tensor) -> Tensor:
            with self._linear(layer, torch.eye(width, dtype=x.dtype, device=x.device), bias):
                return _first(layer(x))

        return {"width": width}, call

    def _row_linear(self, layer: Any) -> tuple[dict[str, int], Call]:
        def call(x: Tensor, w: Tensor) -> Tensor:
            width = x.shape[-1] // self._ranks
            own = slice(self._rank * width, (self._rank + 1) * width)
            with self._linear(layer, w[:, own]):
                return _first(layer(x[:, own].contiguous()))

        return self._k(), call

    def _lm_head(self, layer: Any) -> tuple[dict[str, int], Call]:
        def call(x: Tensor, w: Tensor) -> Tensor:
            with self._linear(layer, w):
                return layer.quant_method.apply(layer, x, bias=None)

        return self._k(), call

    def _router(self, layer: Any) -> tuple[dict[str, int], Call]:
        return self._column_linear(layer)

    def _routing(self, router: Any) -> tuple[dict[str, int], Call]:
        def call(logits: Tensor, k: int) -> Tensor:
            with borrowed(router, top_k=k, capture_fn=None, _routing_replay_out=None):
                return chosen(*router.select_experts(logits, logits))

        return {"experts": int(router.global_num_experts), "places": int(router.top_k)}, call

    def _dispatch(self, module: Any) -> tuple[dict[str, int], Call]:
        """There and back again: each rank's rows are its part of the answer, and every rank gets every row."""
        group = module.group
        rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)

        def call(x: Tensor, experts: Tensor, count: int) -> Answer:
            own = count // ranks
            with borrowed(module, first=rank * own, count=own):
                rows, planned = module(x, experts)
                slots = module.back(rows, planned)
            whole = plan(experts, 0, count)
            out = slots[whole.slots]
            first, end = whole.offsets[[rank * own, (rank + 1) * own]].tolist()
            return Answer.where_equal(out, (rows, out[first:end]))

        return {"experts": 8 * ranks}, call

    def _expert_linear(self, module: Any) -> tuple[dict[str, int], Call]:
        group, packed = module.group, module.isoexec_packed
        rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)

        def call(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
            width = x.shape[-1] // ranks
            own = slice(rank * width, (rank + 1) * width)
            with borrowed(module, isoexec_packed=type(packed)(packed.k_block)):
                return module(x[:, own].contiguous(), w[..., own].contiguous(), offsets)

        return self._k(), call

    def _combine(self, module: Any) -> tuple[dict[str, int], Call]:
        return {}, module

    def _rope(self, layer: Any) -> tuple[dict[str, int], Call]:
        def call(x: Tensor, positions: Tensor, base: float) -> Answer:
            flat = x.reshape(x.shape[0], -1)
            loan: dict[str, Any] = {"base": base}
            if hasattr(layer, "isoexec_cos"):  # tables made with the layer, on its device
                cos, sin = table(int(layer.head_size), base)
                loan |= {"isoexec_cos": cos.to(x.device), "isoexec_sin": sin.to(x.device)}
            with borrowed(layer, **loan):
                query, key = layer(positions, flat.clone(), flat.clone())
            return Answer.where_equal(query.view(x.shape), (query, key))

        return {"head_dim": int(layer.head_size)}, call

    def _silu_mul(self, layer: Any) -> tuple[dict[str, int], Call]:
        return {}, lambda gate, up: layer(torch.cat([gate, up], -1))

    def _attention(self, layer: Any) -> tuple[dict[str, int], Call]:
        """A prompt in two chunks and one decoded token, over scattered blocks of a cache of its own."""
        impl = layer.impl
        if self._device == "cuda":
            from isoexec.adapters.vllm.cuda_canaries import Attention

            self._steps = self._steps or Attention(int(self._constants["kv_segment"]))
            return self._steps.of(layer)
        block = 2 * int(self._constants["kv_segment"])

        def call(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            q, k, v = q[0], k[0], v[0]
            total = q.shape[0]
            cache = torch.zeros(_BLOCKS, k.shape[1], block, 2 * k.shape[2], dtype=k.dtype)
            table = torch.tensor([[2, 0]], dtype=torch.int32)
            at = torch.arange(total)
            slots = table[0].long()[at // block] * block + at % block
            out = torch.zeros_like(q)
            with borrowed(impl, scale=scale):
                for first, end in ((0, total // 2), (total // 2, total - 1), (total - 1, total)):
                    step = slice(first, end)
                    impl.do_kv_cache_update(layer, k[step], v[step], cache, slots[step])
                    metadata = SimpleNamespace(
                        num_actual_tokens=end - first,
                        query_start_loc=torch.tensor([0, end - first], dtype=torch.int32),
                        seq_lens=torch.tensor([end], dtype=torch.int32),
                        block_table=table,
                        slot_mapping=slots[step],
                        causal=True,
                        dynamic_causal=None,
                        scheduler_metadata=None,
                    )
                    part = torch.zeros_like(q[step])
                    impl.forward(layer, q[step], k[step], v[step], cache, metadata, part)
                    out[step] = part
            return out.unsqueeze(0)

        heads = {
            "heads": int(impl.num_heads),
            "kv_heads": int(impl.num_kv_heads),
            "head_dim": int(impl.head_size),
        }
        return {**heads, "tokens": 2 * block - 5}, call

    def _logprobs(self, sampler: Any) -> tuple[dict[str, int], Call]:
        if self._device == "cuda":
            from isoexec.adapters.vllm.cuda_canaries import logprobs

            return {}, logprobs(sampler)

        def call(logits: Tensor, target: Tensor) -> Answer:
            out = sampler.compute_logprobs(logits.clone())
            pairs = []
            if sampler.logprobs_mode == "processed_logprobs":
                with torch.random.fork_rng(devices=[]):  # the draw must not move the run's generator
                    _, processed = sampler.topk_topp_sampler(logits.clone(), {}, None, None)
                pairs.append((processed, out))
            return Answer.where_equal(out.gather(-1, target.unsqueeze(-1)).squeeze(-1), *pairs)

        return {}, call


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result
