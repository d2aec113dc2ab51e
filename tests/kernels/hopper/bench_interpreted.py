# SPDX-License-Identifier: Apache-2.0
"""Runs everything that `tests/bench/kernels.py` times at tiny sizes in Triton's interpreter, as its own loop would.

Prints as JSON what each op's results are to the native op's, and what became of them in the report. Nothing is timed: a captured
call is one call, and every call of a row has a time of its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
from dataclasses import replace as replaced
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gated  # type: ignore[import-not-found]  # first: it asks for the interpreter, and gives the ops CPU kernels
import torch
from gated import replace
from torch import Tensor

gated.smaller()
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import attention_stand_in  # type: ignore[import-not-found]  # noqa: E402
import experts  # type: ignore[import-not-found]  # noqa: E402
import heads  # type: ignore[import-not-found]  # noqa: E402
import linears  # type: ignore[import-not-found]  # noqa: E402
import report  # type: ignore[import-not-found]  # noqa: E402
import rows  # type: ignore[import-not-found]  # noqa: E402
import sequences  # type: ignore[import-not-found]  # noqa: E402
import subjects  # type: ignore[import-not-found]  # noqa: E402

from isoexec.kernels.grouped_linear.hopper import products  # noqa: E402
from isoexec.kernels.grouped_linear.hopper import table as grouped_table  # noqa: E402
from isoexec.kernels.linear.hopper import table, tuning  # noqa: E402

kernels: Any = import_module("kernels")  # the script, not the package

M = 5
TINY = subjects.Model(
    name="tiny",
    hidden=64,
    ffn=40,
    heads=(4, 2),
    width=64,
    turned=16,
    vocab=gated.HEAD[0],
    weights={"qkv": (32, 512), "down": (64, 512), "lm_head": gated.HEAD},
    experts=4,
    places=2,
    inner=32,
    gated=(3, 24),
    unit=(3, 24),
)
COPY = "a copy"
FOUND: dict[str, str] = {}


def _softmax(z: Tensor, dim: int) -> Tensor:
    return torch.softmax(z, dim)


def _norm(x: Tensor, w: Tensor, eps: float, r: Tensor | None = None) -> Any:
    h = x if r is None else x + r
    y = torch.nn.functional.rms_norm(h, w.shape, w, eps)
    return y if r is None else (y, h)


# what the benchmark takes of vLLM, in plain torch
PEERS = SimpleNamespace(
    matmul_persistent=torch.mm,
    log_softmax=torch.log_softmax,
    softmax_batch_invariant=_softmax,
    rms_norm_batch_invariant=_norm,
)


def _attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, rows: int, keys: int, **given: Any) -> Tensor:
    """In the place of the library by its own schedule: contiguous keys of one sequence, or pages of several."""
    out = torch.empty_like(q)
    for e in range(len(cu) - 1):
        own, own_k, own_v = q[cu[e] : cu[e + 1]], k, v
        if given.get("pages") is not None:
            pages = given["pages"][e].long()
            own_k, own_v = (x[pages].flatten(0, 1)[: given["used"][e]] for x in (k, v))
        assert (len(own), len(own_k)) == (rows, keys)
        both = [
            x.float().repeat_interleave(q.shape[1] // k.shape[-2], 1).transpose(0, 1) for x in (own_k, own_v)
        ]
        scores = own.float().transpose(0, 1) @ both[0].transpose(1, 2) * q.shape[-1] ** -0.5
        late = torch.arange(keys) > torch.arange(rows)[:, None] + keys - rows
        out[cu[e] : cu[e + 1]] = (scores.masked_fill(late, -math.inf).softmax(-1) @ both[1]).transpose(0, 1)
    return out


def _flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _compared(found: Any, want: Any) -> str:
    """What differs by more than rounding."""
    for a, b in zip(_flat(found), _flat(want), strict=True):
        if a.shape != b.shape:
            return f"shapes {list(a.shape)} and {list(b.shape)}"
        scale = max(1.0, float(b.double().abs().max()))
        most = float((a.double() - b.double()).abs().max()) / scale
        if not most < 0.03:
            return f"differs by {most:.3g} of the greatest"
    return ""


def _capture(call: Any, copies: int) -> Any:
    assert copies == 1
    return call(0)


def _replayed(results: list[Any], copies: int, **_: Any) -> list[float]:
    """In the place of times: compares what the calls gave, and gives times that tell them apart."""
    native, again, *others = results
    assert not _compared(again, native)
    bad = [why for one in others if one is not COPY and (why := _compared(one, native))]
    FOUND[NOW[0].op] = "; ".join(filter(None, [FOUND.get(NOW[0].op, ""), *bad]))
    return [10.0 + i for i in range(len(results))]


NOW: list[Any] = []
_timed = kernels.timed


def _one(one: Any, **free: Any) -> Any:
    NOW[:] = [one]
    return _timed(one, **free)


def _offsets(ids: Tensor, edges: Tensor) -> Tensor:
    return experts._native_plan(ids, edges)[1].int()


def everything() -> list[Any]:
    """All subjects, those whose native op is another function next to one that is the same."""
    natives = {"linear_logprobs": heads._apart, "plan": _offsets}
    return [
        replaced(one, native=natives[one.op]) if one.op in natives else one for _, one in kernels.every([M])
    ]


def tuned(folder: Path) -> dict[str, Any]:
    """What the trial of gradients and continued chains writes, as the linear's table reads it back."""
    small = gated.kernel.Tile(kind="maps", rows=16, columns=32, depth=32, warps=4, stages=2)
    large = gated.kernel.Tile(kind="maps", rows=64, columns=32, depth=32, warps=4, stages=2)
    path, said = folder / "table.json", list[str]()
    path.write_text(json.dumps({"weights": []}))
    replace(
        tuning,
        _DEVICE="cpu",
        WEIGHTS=(("tiny o", 32, 64), ("other o", 32, 32), ("tiny head", 64, 32)),
        HEAD=64,
        HEAD_ROWS=16,
        PRODUCT_BUCKETS={"input": (1, 16), "weight": (16, 40), "continue": (1, 40)},
        _usable=lambda products, _: {name: [small, large] for name in products},
        _LIBRARY=tuning._LIBRARY
        | {"forward": lambda x, w, _: x.float() @ w.float().t()},  # CPU has no wide result
        copies_for=lambda _: 1,
        capture=lambda call, _: call(0),
        replay_times=lambda graphs, *_, **__: [10.0, *(5.0 + i for i in range(len(graphs) - 1))],
    )

    def say(*words: object) -> None:
        said.append(" ".join(map(str, words)))

    tuning.extend_products(path, say, names=("tiny",))
    replace(table, PATH=path)
    table._read.cache_clear()
    table._chain_tiles.cache_clear()
    steps = {
        " ".join(map(str, at)): [(n, t and t.rows) for n, t in found]
        for at, found in table._chain_tiles().items()
    }
    tuning.extend_products(path, say, ends=-math.inf)
    return {"steps": steps, "said": said}


def main() -> None:
    """Everything through the benchmark's own loop, then through its report."""
    torch.manual_seed(0)
    for module in (subjects, linears, experts):
        replace(module, TRAINED=M)
    replace(heads, LEAVES=2)
    replace(sequences, native=_attend, SEGMENT=32, PAGE=8, CONTEXT=72, LENGTHS={M: (70,)}, BATCHES={M: (2,)})
    replace(rows, GLM=(3, 16), MIMO=40, NUMBERS=40)
    replace(subjects, _batch_invariant=lambda: PEERS)
    replace(products, _grouped=lambda a, b, ends: gated.own_weight(a.t(), b, torch.cat([ends[:1] * 0, ends])))
    listed = {
        **dict.fromkeys(TINY.weights.values(), ((8192, gated.TILE),)),
        gated.HEAD: ((8192, gated.HEAD_TILE),),
    }
    replace(table, tiles=lambda: listed)
    replace(grouped_table, weights=lambda: ((64, 64), (64, 32)))
    replace(
        kernels,
        MODELS=(TINY,),
        COPIED=M,
        capture=_capture,
        replay_times=_replayed,
        copies_for=lambda _: 1,
        copier=lambda *_: lambda _: COPY,
        timed=_one,
    )
    gated.cublaslt.claim()
    made = everything()
    bad, broken = made[0], made[1]
    planted = [
        replaced(bad, op="planted", ours=lambda x, w: bad.native(x, w) + 1),
        replaced(broken, op="broken", ours=lambda *_: 1 / 0),
    ]
    run = {"device": "none", "torch": torch.__version__, "cuda": "", "triton": ""}
    sources = dict.fromkeys(kernels.FUNCTIONS, "now")
    kept: dict[str, Any] = {"runs": [run], "sources": sources, "times": []}
    with (
        tempfile.TemporaryDirectory() as name,
        torch.no_grad(),
        contextlib.redirect_stdout(sys.stderr),
        attention_stand_in.stand_in(),
        attention_stand_in.quickly(),
    ):
        folder = Path(name)
        troubles = kernels.measured(made + planted, kept, folder, math.inf, inductor=False)
        written = json.loads((folder / f"{report.NAME}.json").read_text())
        page = (folder / f"{report.NAME}.md").read_text()
        cut: dict[str, Any] = {"runs": [dict(run)], "sources": sources, "times": []}
        kernels.measured(made, cut, folder, -math.inf, inductor=False)
        trial = tuned(folder)
        gated.cublaslt.check()  # what is timed beside ours leaves the switches as they were
    refused = ""
    try:
        kernels.chosen(["linear", "softmax"], [M])
    except SystemExit as why:
        refused = str(why)
    again = {"runs": [run], "sources": sources | {"silu_mul.poly/1": "later"}, "times": []}
    merged, left = report.merged([written, again])
    answer = {
        "rows": FOUND,
        "troubles": troubles,
        "absent": {row["op"]: row["absent"] for row in written["times"] if row["absent"]},
        "goals": report.goals(written["times"]),
        "lines": sum(page.count(f"\n| {op} | ") for op in FOUND),
        "written": len(written["times"]),
        "cut": cut["runs"][0].get("left_out", ""),
        "refused": refused,
        "tuned": trial,
        "chosen": sorted({one.op for one in kernels.chosen(["rope", "silu_mul+grad"], [M])}),
        "merged": len(merged["times"]),
        "left": left,
        "copied": sorted({row["op"] for row in written["times"] if "copy" in row["us"]}),
        "peers": {
            n: sorted({r["op"] for r in written["times"] if n in r["us"]}) for n in ("vllm", "leaf tree")
        },
        "functions": sorted(set(kernels.FUNCTIONS) - {row["function"] for row in written["times"]}),
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
