# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny byte model and keeps what its last layer says under each fault: `logits.npz`, read by `streams.py`.

`.venv/bin/python tests/daemon/streams/make_logits.py [--text FILE]` needs torch and half a minute; the streams and the
classifier do not. The model is a decoder of two layers with rotary positions and routed experts. Kept are the final hidden
states of 32 sequences of 64 tokens and the head, so that logits are `hidden @ head`, and per variant the move of the
hidden states, which is what the engine's fault did to a real policy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

HERE = Path(__file__).resolve().parent
WIDTH, HEADS, LAYERS, EXPERTS, LENGTH, ROWS, VOCABULARY = 32, 4, 2, 8, 64, 32, 256


class Block(nn.Module):
    """Attention with rotary positions, then one of `EXPERTS` experts a token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, x: Any, stretch: float, window: int, router: Any, route: Any) -> tuple[Any, Any]:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        place = torch.arange(length, dtype=torch.float32)[:, None] * stretch
        angle = place * 0.5 ** torch.arange(q.shape[-1] // 2, dtype=torch.float32)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

        def turn(t: Any) -> Any:
            a, b = t.chunk(2, -1)
            return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

        far = torch.arange(length)[:, None] - torch.arange(length)[None]
        seen = (far >= 0) & (far < window)
        mixed = functional.scaled_dot_product_attention(turn(q), turn(k), v, attn_mask=seen)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        flat = self.norm2(x)
        scores = functional.linear(flat.to(router), self.router.weight.to(router)).float().softmax(-1)
        chosen = scores.argmax(-1) if route is None else route
        gate = scores.gather(-1, chosen[..., None])[..., 0]
        hidden = torch.einsum("btd,edf->btef", flat, self.up)
        made = torch.einsum("btef,efd->bted", functional.gelu(hidden), self.down)
        picked = made.gather(2, chosen[..., None, None].expand(-1, -1, 1, WIDTH))[:, :, 0]
        return x + picked * gate[..., None].to(x.dtype), chosen


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.routes: list[Any] = []
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def hidden(
        self, ids: Any, stretch: float = 1.0, window: int = LENGTH, router: Any = None, routes: Any = None
    ) -> Any:
        x = self.embed(ids)
        self.routes = []
        for index, block in enumerate(self.blocks):
            x, chosen = block(
                x, stretch, window, router or x.dtype, None if routes is None else routes[index]
            )
            self.routes.append(chosen)
        return self.norm(x)


def train(model: Model, data: Any, steps: int, rate: float, seed: int) -> None:
    picks = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), rate)
    for _ in range(steps):
        at = torch.randint(0, len(data) - LENGTH - 1, (8,), generator=picks)
        rows = torch.stack([data[i : i + LENGTH + 1] for i in at])
        logits = model.head(model.hidden(rows[:, :-1]))
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    print(f"loss {loss.item():.3f}")


def fp8(model: Model) -> Model:
    """Round every matrix to e4m3 under one scale each."""
    other = Model()
    state = {}
    for name, value in model.state_dict().items():
        if value.dim() > 1 and "head" not in name and "embed" not in name:
            scale = value.abs().max() / 448
            value = (value / scale).to(torch.float8_e4m3fn).float() * scale  # noqa: PLW2901
        state[name] = value
    other.load_state_dict(state)
    return other


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, default=HERE.parents[2] / "dashboards" / "runbook.md")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = torch.tensor(list(chosen.text.read_bytes()), dtype=torch.long)
    model = Model()
    train(model, data, 400, 5e-3, 1)
    stride = len(data) // (ROWS + 1)
    ids = torch.stack([data[i * stride : i * stride + LENGTH] for i in range(ROWS)])
    later = Model()
    later.load_state_dict(model.state_dict())
    with torch.no_grad():
        base = model.hidden(ids).double()
        routes = list(model.routes)  # replayed where routing is not the fault
        low = Model()
        low.load_state_dict(model.state_dict())
        low = low.to(torch.bfloat16)
        variants: dict[str, Callable[[], Any]] = {
            "bf16": lambda: low.hidden(ids, routes=routes),
            "flips": lambda: low.hidden(ids),
            "router": lambda: model.hidden(ids, router=torch.bfloat16),
            "fp8": lambda: fp8(model).hidden(ids, routes=routes),
            "rope": lambda: model.hidden(ids, stretch=1.02, routes=routes),
            "window": lambda: model.hidden(ids, window=LENGTH // 2, routes=routes),
        }
        moves = {name: make().double() - base for name, make in variants.items()}
    train(later, data, 12, 3e-4, 2)
    with torch.no_grad():
        moves["stale"] = later.hidden(ids).double() - base
        head_move = (later.head.weight - model.head.weight).double()
    kept: dict[str, Any] = {
        "hidden": base.numpy().astype(np.float32),
        "head": model.head.weight.detach().numpy(),
    }
    kept["stale_head"] = head_move.numpy().astype(np.float32)
    for name, move in moves.items():
        size = float(move.abs().max())
        kept[f"{name}_scale"] = np.float32(size)
        kept[name] = (move / size).numpy().astype(np.float16)
        print(
            name,
            f"rms {move.pow(2).mean().sqrt():.2e}",
            f"by quarter {[f'{q.abs().mean():.1e}' for q in move.chunk(4, 1)]}",
        )
    np.savez_compressed(HERE / "logits.npz", **kept)
    print(f"{(HERE / 'logits.npz').stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
