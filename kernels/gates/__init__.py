# SPDX-License-Identifier: Apache-2.0
"""Gates: what proves that a kernel computes its function, and that the proof could have failed.

A gate is a module `gate.py` beside the kernel it judges (`kernels/linear/gate.py`; `kernels/linear/hopper/gate.py` for
another arch), found by its place. It makes one `Gate` named `GATE` and hangs a check on it for each family::

    GATE = Gate("silu_mul.exp/1", "cpu")

    @GATE.check("conformance")
    def _conformance(run: Run) -> None:
        for dtype in run.over("dtype", DTYPES):  # what a check loops over is what its record says it covered
            gate, up = fill(7, 100, salt=1, dtype=dtype), fill(7, 100, salt=2, dtype=dtype)
            run.equal(silu_mul(gate, up), naive.silu_mul(gate, up))
            run.control("stock_silu", (F.silu(gate.float()) * up.float()).to(dtype), naive.silu_mul(gate, up))

The gate is run once for each set of constants that a shipped contract of its arch binds to its function (`run.constants`).
Everything is compared as integers. Each check plants faults of its own (`run.control`), each of which must show itself; one
that does not makes the check count for nothing. `recipes.py` holds what checks of several ops have in common, `ranks.py`
real process groups on a CPU, `sharing.py` those on GPUs, which ranks may share. How a gate is edited is part of its records
(`Gate.digest`), and no part of its kernel's source digest.
"""

from __future__ import annotations

from isoexec.kernels.gates.checking import Gate, Run

__all__ = ["Gate", "Run"]
