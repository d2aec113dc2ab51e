# SPDX-License-Identifier: Apache-2.0
"""Spare the forward that makes `old_logprobs`: under a contract that holds, the rollout's logprobs have its bits.

The contract must say that both are equal bit for bit, both sides' census must be clean, and the daemon's verdict must be ok.
One sequence in ``one_in`` is scored all the same, chosen by its digest as sampling is, and compared as integers.  Once one token
differs the skip has ended, and once it has begun a verdict that is not ok or evidence that is unknown ends it too: it says why,
in the run's directory, and no restart takes it up again before `ScoreSkip.clear`.

::

    skip = ScoreSkip(client.settings, one_in=16, census={"engine": True, "trainer": True})  # every rank
    chosen = skip.choose(sequences, step=step, rollout_version=v, trainer_version=v, group=group)    # rows to score
    if not skip.check(rollout[chosen], scored, step=step): ...                           # score the other rows now
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from isoexec.contracts.halting import LeaseError, LeaseState, StateDirectory
from isoexec.contracts.modes import Mode, read_mode
from isoexec.contracts.schema import Contract
from isoexec.probes.client import ProbeSettings
from isoexec.probes.guard import agree
from isoexec.probes.pairing import sampled, sequence_digest
from isoexec.probes.verdicts import VerdictSource, open_verdict

__all__ = ["ScoreSkip", "not_claimed", "padded"]

Logprobs = np.ndarray[Any, np.dtype[np.float32]]
_log = structlog.get_logger("isoexec.probes")
_SKIP, _WAIT, _END = 0, 1, 2
_ROLES = ("engine", "trainer")
_CASES = ("engine_decode", "trainer_score")


def not_claimed(contract: Contract | None) -> str | None:
    """Why a contract does not let the rollout's logprobs stand for the trainer's; None where it does."""
    if contract is None:
        return "no contract is in force"
    if any(set(_CASES) <= set(group) for group in contract.claims.bitwise):
        return None
    return f"contract {contract.name} does not claim {' and '.join(_CASES)} to be bitwise equal"


def padded(values: Sequence[Logprobs], prompt_lengths: Sequence[int], width: int) -> Logprobs:
    """Logprobs of responses, one array a row, as float32 [n, width] aligned with right-padded tokens; 0 elsewhere."""
    out = np.zeros((len(values), width), np.float32)
    for row, (first, found) in enumerate(zip(prompt_lengths, values, strict=True)):
        out[row, first : first + len(found)] = found
    return out


class ScoreSkip:
    """One trainer rank's part in the skip; every rank makes one with the same arguments, after ``Client.connect``.

    ``census`` is, by role, whether a census of that runtime was clean; what it does not hold, or is None, is unknown.
    ``proving`` steps are scored whole, and compared, before the first one is not.  Record logprobs with the same ``one_in`` on
    both sides, or what the trainer did not score counts as unpaired.
    """

    def __init__(
        self,
        settings: ProbeSettings,
        *,
        one_in: int = 16,
        proving: int = 2,
        census: Mapping[str, bool | None],
        verdict: VerdictSource | None = None,
    ) -> None:
        if one_in < 1 or proving < 1:
            raise ValueError(
                f"one_in and proving must be at least 1, found {one_in} and {proving}: a skip proves itself"
            )
        self.one_in = one_in
        self.checked = self.skipped = 0
        """Tokens compared and equal, and tokens whose scoring was spared."""
        self._settings = settings
        self._census = dict(census)
        self._proving = proving
        self._proven: set[int] = set()
        self._begun = False
        self._state = StateDirectory(settings.state_dir)
        self._path = self._state.run(settings.run).path / "skip-ended.json"
        self._verdict = verdict
        self.waiting: str | None = "nothing was checked yet"
        """Why the last step was scored whole; None where it was not."""
        self.ended: str | None = _read(self._path)
        """Why the skip has ended; None while it has not."""

    def choose(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        step: int,
        rollout_version: int,
        trainer_version: int,
        group: Any = None,
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Bool [n]: which of the sequences (prompt and response token ids) are to be scored in this step; never none of them.

        Every rank of ``group`` (a torch process group; None: this process alone) calls it, and gets the same answer.
        """
        every = np.ones(len(sequences), np.bool_)
        if len(sequences) == 0:
            return every
        why = self.ended or self._missing()
        local = _SKIP if why is None else (_END if self.ended or self._begun else _WAIT)
        if why is None and rollout_version != trainer_version:  # nothing is broken: such a step is off-policy
            why = f"the rollout is of weights {rollout_version}, the trainer has {trainer_version}"
            local = _WAIT
        found = agree(local, group)
        if found > local:
            why = "another rank scores everything; its log says why"
        self.waiting = why
        if found == _END:
            self._end(why or "another rank ended it", step)
            return every
        if found == _WAIT:
            return every
        digests = [sequence_digest(ids) for ids in sequences]
        chosen = np.array([sampled(digest, self.one_in) for digest in digests], np.bool_)
        if not chosen.any():  # a step of which nothing is checked would be believed for its silence
            chosen[digests.index(min(digests))] = True
        self._begun = True
        return chosen

    def check(self, rollout: Sequence[Logprobs], trainer: Sequence[Logprobs], *, step: int) -> bool:
        """Compare logprobs of the same sequences as integers: True where every token is equal and finite.

        Otherwise the skip has ended, and the step's other sequences must be scored before anything is learnt from them.
        """
        for row, (mine, theirs) in enumerate(zip(trainer, rollout, strict=True)):
            why = _difference(mine, theirs)
            if why is not None:
                self._end(f"step {step}, sequence {row} of those scored: {why}", step)
                return False
        tokens = sum(len(one) for one in rollout)
        self.checked += tokens
        if tokens:
            self._proven.add(step)
        return True

    def clear(self) -> bool:
        """Let the skip be proven again from the start; False where it had not ended."""
        ended, self.ended = self.ended, None
        self._begun = False
        self._proven.clear()
        self._path.unlink(missing_ok=True)
        return ended is not None

    def _missing(self) -> str | None:
        """What is lacking for a skip now."""
        why = not_claimed(self._settings.contract)
        if why is not None:
            return why
        for role in _ROLES:
            clean = self._census.get(role)
            if not clean:
                return (
                    f"no census of the {role}" if clean is None else f"the census of the {role} is not clean"
                )
        mode = read_mode(self._state, self._settings.run).mode
        if mode is not Mode.ENFORCE:
            return f"the run's mode is {mode}: its verdicts stop nothing"
        why = self._not_ok()
        if why is None and len(self._proven) < self._proving:
            return f"{len(self._proven)} of {self._proving} steps compared"
        return why

    def _not_ok(self) -> str | None:
        try:
            self._verdict = self._verdict or open_verdict(self._settings)
        except LeaseError as error:
            return str(error)
        lease = self._verdict.read()
        if not lease.alive:
            return "the verdict is unknown: nobody renews it"
        if lease.state is not LeaseState.OK:
            said = ", ".join(filter(None, (lease.rule, lease.cause)))
            return f"the verdict is {lease.state.name.lower()}" + (f" ({said})" if said else "")
        return "no step was judged yet" if lease.step < 0 else None

    def _end(self, why: str, step: int) -> None:
        if self.ended is not None:
            return
        self.ended = self.waiting = why
        _log.critical(
            "old_logprobs are scored again", run=self._settings.run, step=step, why=why, file=str(self._path)
        )
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"why": why, "step": step, "time": time.time()}) + "\n")
            part.replace(self._path)
        except OSError as error:
            # what is lost is that the end outlives a restart, which proves itself anew before it skips
            _log.critical("the end of the skip cannot be written", run=self._settings.run, error=str(error))


def _read(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_text())["why"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path} cannot be read ({error}); remove it to prove the skip again"


def _difference(trainer: Logprobs, rollout: Logprobs) -> str | None:
    if trainer.dtype != np.float32 or rollout.dtype != np.float32 or trainer.shape != rollout.shape:
        return (
            f"wanted float32 {list(rollout.shape)} of both, found {trainer.dtype} {list(trainer.shape)} "
            f"of the trainer and {rollout.dtype} of the rollout"
        )
    a, b = (np.ascontiguousarray(x).view(np.int32) for x in (trainer, rollout))
    unequal = np.flatnonzero((a != b) | ~np.isfinite(trainer))
    if not unequal.size:
        return None
    at = int(unequal[0])
    return (
        f"token {at} of its response is {rollout[at]!r} in the rollout and {trainer[at]!r} in the trainer "
        f"(0x{int(b[at]) & 0xFFFFFFFF:08x}, 0x{int(a[at]) & 0xFFFFFFFF:08x}); {unequal.size} of its tokens differ or are "
        f"not finite"
    )
