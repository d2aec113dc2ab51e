# SPDX-License-Identifier: Apache-2.0
"""Eight real ranks for checks on CPU, whose groups of 2, 4 and 8 talk over gloo.

The pool of `Run.ranks` has four, and `ranks.py` is part of every gate's digest: another number there would make every record of
a GPU one of an older gate.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

from isoexec.kernels.gates import ranks
from isoexec.kernels.gates.ranks import launch

__all__ = ["DEGREES", "on_ranks"]

WORLD = 8
DEGREES = (1, 2, 4, 8)  # of an axis, as checks run them
_NAME = "cpu, eight"


def on_ranks(size: int, worker: Callable[..., Any], *args: object) -> list[Any]:
    """`worker(rank, size, group, *args)` in `size` processes of one group, or here with no group for 1; by rank.

    `worker` is a module's function, and returns tensors in dicts, lists and tuples. Raises `RankError`.
    """
    if size == 1:
        return [worker(0, 1, None, *args)]
    if _NAME not in ranks._pools:
        ranks._pools[_NAME] = _pool()
    return launch(size, worker, args, _NAME)


def _pool() -> ranks._Pool:
    # what the first gradient of a process imports, once for all that are forked
    forkserver.set_forkserver_preload([ranks.__name__, "torch.fx.experimental.symbolic_shapes"])
    forkserver.ensure_running()
    kept, ranks.WORLD = ranks.WORLD, WORLD  # a pool reads it once, as it starts
    try:
        return ranks._Pool("cpu")
    finally:
        ranks.WORLD = kept
