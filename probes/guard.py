# SPDX-License-Identifier: Apache-2.0
"""Stop a run at a step boundary when the daemon says so: every rank at the same step, after a checkpoint.

The daemon says so in a page on its own host, in a key of its NATS bucket, or as a Ray actor (`isoexec.probes.verdicts`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog
import torch
import torch.distributed as dist

from isoexec.contracts.errors import HaltedError
from isoexec.contracts.halting import HaltMarker, Lease, LeaseState, Policy, StateDirectory
from isoexec.contracts.modes import Mode, read_mode
from isoexec.probes.client import ProbeSettings
from isoexec.probes.verdicts import open_verdict

__all__ = ["Guard", "agree"]

_log = structlog.get_logger("isoexec.probes")
_GO, _HALT = 0, 1
_CONFIRM_SECONDS = 1.0
_LOOK_SECONDS = 0.05


class Guard:
    """Reads the lease of a run.  Making one raises HaltedError while the run's halt marker lies there and its mode is not off.

    A run has a lease once a process of it has said hello, so make the guard after ``Client.connect``.
    """

    def __init__(self, settings: ProbeSettings) -> None:
        self._run = settings.run
        self._state = StateDirectory(settings.state_dir)
        self._directory = self._state.run(settings.run)
        self._policy = Policy.FAIL_CLOSED if settings.policy == "fail_closed" else Policy.FAIL_OPEN
        self._lost = self._said_off = False
        marker = HaltMarker.read(self._directory.path)
        if marker is not None and not self._off():
            raise HaltedError(marker)
        self._page = open_verdict(settings)

    def check(self, step: int, *, group: Any = None, checkpoint: Callable[[], object] | None = None) -> None:
        """Go on, or raise HaltedError on every rank of ``group`` at this same step, after ``checkpoint``.

        Call it at each step boundary on every rank.  ``group`` is a torch process group; None means this process alone.  A
        ``checkpoint`` that raises is the halt's cause (``__cause__``) and halts all the same.  When
        the lease is lost (the daemon is dead or hung) the run's declared policy decides: fail_open goes on and says so,
        fail_closed halts with verdict ``unknown``.  A marker holds whether or not the daemon lives.  In mode off (see
        `isoexec.contracts.modes`) this rank asks for nothing; each host of a run has a state directory of its own to set it in.
        """
        local = _GO if self._page.fine() else self._decide()
        if agree(local, group) == _GO:
            return
        marker = self._marker(step)
        if checkpoint is not None:
            try:
                checkpoint()
            except Exception as error:
                # a halt that shows itself as a failed write would be taken for a fault, and the job tried again
                _log.critical("no checkpoint before the halt", run=self._run, step=step, error=str(error))
                raise HaltedError(marker) from error
        raise HaltedError(marker)

    def _off(self) -> bool:
        setting = read_mode(self._state, self._run)
        off = setting.mode is Mode.OFF
        if off and not self._said_off:
            _log.critical("mode off: no verdict stops this run", run=self._run, file=str(setting.path))
        self._said_off = off
        return off

    def _decide(self) -> int:
        if self._off():
            return _GO
        if self._directory.marker.exists():
            return _HALT
        lease = self._confirmed()
        if lease.state is LeaseState.HALT:
            return _HALT
        if _stands(lease):
            self._lost = False
            return _GO
        mode = read_mode(self._state, self._run).mode
        if self._policy is Policy.FAIL_CLOSED and mode is Mode.ENFORCE:
            return _HALT
        if not self._lost:
            why = "the policy is fail_open" if self._policy is Policy.FAIL_OPEN else f"the mode is {mode}"
            _log.critical(f"lease lost; {why}, so the run goes on unwatched", run=self._run)
            self._lost = True
        return _GO

    def _confirmed(self) -> Lease:
        """The lease, looked at for a while before it counts as lost: a busy host can keep a live daemon from its processor."""
        lease = self._page.read()
        deadline = time.monotonic() + (0.0 if self._lost else _CONFIRM_SECONDS)
        while not _stands(lease) and lease.state is not LeaseState.HALT and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            lease = self._page.read()
        return lease

    def _marker(self, step: int) -> HaltMarker:
        found = HaltMarker.read(self._directory.path)
        if found is not None:
            return found
        lease: Lease = self._page.read()
        if lease.state is LeaseState.HALT:
            rule, cause, verdict = lease.rule, lease.cause, "violation"
        elif self._decide() == _HALT:
            rule, verdict = "lease_lost", "unknown"
            why = lease.cause if lease.alive else "the daemon stopped renewing the lease (it is dead or hung)"
            cause = f"{why}, and the run's policy is fail_closed"
        else:
            rule, verdict = "fence", "unknown"
            cause = "another rank was told to halt; its host's marker has the rule and the cause"
        marker = HaltMarker(
            run=self._run, step=step, rule=rule, cause=cause, verdict=verdict, time=time.time()
        )
        try:
            marker.write(self._directory.path)
        except OSError as error:
            # what is lost is that the halt outlives a restart; the halt itself, and its checkpoint, are not
            _log.critical("marker cannot be written", run=self._run, step=step, error=str(error))
        return marker


def _stands(lease: Lease) -> bool:
    return lease.alive and lease.state is not LeaseState.UNKNOWN


def agree(local: int, group: Any) -> int:
    """The largest ``local`` of all ranks of ``group`` (None: this process alone); every one of them calls it."""
    if group is None or dist.get_world_size(group) == 1:
        return local
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    verdict = torch.tensor([local], dtype=torch.int32, device=device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=group)
    return int(verdict.item())
