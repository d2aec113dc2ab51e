# SPDX-License-Identifier: Apache-2.0
"""What a training loop adds to be watched: ``Watch(model, client)`` once a rank, then ``record``, ``synced`` and ``boundary``.

::

    watch = Watch(model, client)                           # this rank proves what it binds, or this raises
    for step in range(steps):
        watch.boundary(step, checkpoint=save)              # raises HaltedError on every rank when the run is halted
        logprobs = score(model, tokens)
        watch.record("trainer_score", tokens, logprobs, prompt_lengths, lengths, step=step, weight_version=version)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from isoexec.adapters.base import Report
from isoexec.adapters.megatron.slots import topology_of
from isoexec.adapters.megatron.weights import unwrap, weight_partials
from isoexec.probes.attest import send_attestation
from isoexec.probes.client import Client
from isoexec.probes.contract import SAME, contract_now
from isoexec.probes.guard import Guard
from isoexec.probes.logprobs import LogprobTap, ScoredSequence, from_packed, from_padded
from isoexec.probes.timing import VerifyPeriod

__all__ = ["Watch"]


class Watch:
    """One rank of the trainer as the daemon sees it; every rank makes one, with a connected client of its own.

    The logprobs are sent by the first rank of the last pipeline stage of each data-parallel replica, whose bits are every rank's
    of that replica: record on each the rows that it computed, and no others.  ``one_in`` records every n-th sequence, the same
    ones as the engine.
    """

    def __init__(self, model: Any, client: Client, *, one_in: int = 1, weight_version: int = 0) -> None:
        self._model = unwrap(model)
        self._client = client
        self._tap = LogprobTap(client, one_in=one_in)
        self._guard = Guard(client.settings)
        self._period = VerifyPeriod()
        self._weight_version = weight_version
        self.attest("start", step=0, weight_version=weight_version)

    def boundary(self, step: int, *, checkpoint: Callable[[], object] | None = None) -> None:
        """The step boundary, on every rank: go on, or HaltedError on all ranks at this step, after ``checkpoint``.

        A rank last looked at ``ISOEXEC_VERIFY_SECONDS`` ago is attested again; the daemon judges it, and halts every rank.
        """
        if self._period.due:
            self.attest("periodic", step=step, weight_version=self._weight_version)
        self._guard.check(step, group=dist.group.WORLD, checkpoint=checkpoint)

    def record(
        self,
        case: str,
        tokens: Tensor,
        logprobs: Tensor,
        prompt_lengths: Sequence[int],
        lengths: Sequence[int],
        *,
        step: int,
        weight_version: int,
        temperature: float = 1.0,
        padding: Sequence[int] | None = None,
        pack_index: Sequence[int] | None = None,
    ) -> int:
        """Send token logprobs of right-padded rows: ``tokens`` int [n, L], ``logprobs`` fp32 [n, L] aligned with them.

        ``temperature`` is what the logits were divided by.  ``padding`` and ``pack_index``, one a row, say how the row was
        computed where it was left-padded or in a pack (see `from_padded`); a mismatch is broken down by them.  Returns how many
        tokens were sent; 0 on the ranks that leave it to another.
        """
        if not self._sends():
            return 0
        rows = from_padded(
            tokens.detach().cpu().numpy(),
            logprobs.detach().float().cpu().numpy(),
            prompt_lengths,
            lengths,
            padding=padding,
            pack_index=pack_index,
        )
        return self._send(case, rows, step, weight_version, temperature)

    def record_packed(
        self,
        case: str,
        tokens: Tensor,
        logprobs: Tensor,
        prompt_lengths: Sequence[int],
        cu_seqlens: Sequence[int] | Tensor,
        *,
        step: int,
        weight_version: int,
        temperature: float = 1.0,
    ) -> int:
        """Send token logprobs of one pack: ``tokens`` int [T], ``logprobs`` fp32 [T] aligned with them.

        ``cu_seqlens`` [n + 1] are the edges of its sequences, as in Megatron's ``PackedSeqParams.cu_seqlens_q``; each goes with
        its place in the pack.  Otherwise as `record`.
        """
        if not self._sends():
            return 0
        rows = from_packed(
            tokens.detach().cpu().numpy(),
            logprobs.detach().float().cpu().numpy(),
            prompt_lengths,
            cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens,
        )
        return self._send(case, rows, step, weight_version, temperature)

    def _sends(self) -> bool:
        groups = self._model.pg_collection
        last = groups.pp.rank() == groups.pp.size() - 1
        return bool(last and groups.tp.rank() == 0)

    def _send(
        self, case: str, rows: list[ScoredSequence], step: int, weight_version: int, temperature: float
    ) -> int:
        return self._tap.record(
            case,
            rows,
            step=step,
            weight_version=weight_version,
            temperature=temperature,
            logprobs_mode="processed_logprobs",  # of the policy that is trained, at its temperature
        )

    def attest(self, reason: str, *, step: int, weight_version: int) -> Report | None:
        """Report what this rank really binds and its live degrees; None where no contract is installed.

        ``reason`` is start, sync or periodic.  Raises HandshakeError, naming the fields, where the contract installed, or the
        contract's file, is no longer the one this process greeted the daemon with; the daemon is told first.
        """
        adapter = getattr(self._model, "isoexec_adapter", None)
        report = adapter.verify()[0] if adapter is not None else None
        topology = (
            report.topology
            if report is not None
            else topology_of(self._model.pg_collection, self._model.config)
        )
        installed = SAME if adapter is None else adapter.contract
        held = contract_now(self._client.settings, installed, who="the trainer's model")
        send_attestation(
            self._client,
            contract=held,
            reason=reason,
            step=step,
            weight_version=weight_version,
            topology=topology,
            regions={r.region: r.to_dict() for r in report.regions} if report is not None else {},
            environment_found=report.environment if report is not None else None,
            problem=report.changed if report is not None else None,
        )
        self._period.done()
        self._weight_version = weight_version
        if not held.agrees:
            self._client.flush()  # what is raised here may end the process, and the daemon must know why
        held.require()
        return report

    def synced(self, weight_version: int, *, step: int, attest: bool = True) -> None:
        """After a weight sync: send the digests of this rank's live shards as ``weight_version``, and attest.

        A loop that samples while its trainer waits takes ``attest=False`` and calls `attest` then: it costs no time there.
        """
        found = weight_partials(self._model)
        self._client.send_weights(
            weight_version=weight_version,
            step=step,
            tensors=found.tensors,
            numel=found.numel,
            total=found.total,
            zero=found.zero,
        )
        self._weight_version = weight_version
        if attest:
            self.attest("sync", step=step, weight_version=weight_version)
