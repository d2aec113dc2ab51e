# SPDX-License-Identifier: Apache-2.0
"""The job that is halted: one rank of a trainer over gloo, whatever starts it, and an engine that breaks the contract.

A step is a sleep and an all_reduce, noted as it begins. A checkpoint is the SHA-256 of its bytes, a line break and the bytes;
its weights are those of its step, so that one that was torn, mixed or is of another step is seen.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from common import peer_class  # type: ignore[import-not-found]  # beside this folder

from isoexec.contracts import wire
from isoexec.contracts.errors import HaltedError
from isoexec.contracts.halting import LeasePage, LeaseState, StateDirectory
from isoexec.contracts.schema import Contract, library
from isoexec.probes.client import Client, ProbeSettings
from isoexec.probes.guard import Guard

__all__ = ["CONTRACT", "RUN", "arguments", "engine_main", "loaded", "rank_main", "settings_of"]

STEP_SECONDS = 0.05
EVERY = 20
"""Steps between two checkpoints that nobody asked for."""
CONTRACT = "qwen3-dense-cpu"
RUN = "r"


def settings_of(folder: Path, policy: str) -> ProbeSettings:
    contract = Contract.load(library(CONTRACT))
    return ProbeSettings(
        run=RUN, state_dir=folder / "state", regime="bitwise", policy=policy, contract=contract
    )


def save(path: Path, step: int, weights: Any) -> None:
    out = io.BytesIO()
    torch.save({"step": step, "weights": weights}, out)
    raw = out.getvalue()
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with draft.open("wb") as file:
        file.write(hashlib.sha256(raw).hexdigest().encode() + b"\n" + raw)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def loaded(path: Path, world: int) -> tuple[int, str]:
    """Give the step of a checkpoint and what is wrong with it, or nothing."""
    digest, _, raw = path.read_bytes().partition(b"\n")
    if hashlib.sha256(raw).hexdigest().encode() != digest:
        return -1, f"{path.name}: its digest does not hold"
    found = torch.load(io.BytesIO(raw))
    step, weights = int(found["step"]), found["weights"]
    wanted = torch.full((1000,), float(step * world))
    return step, "" if torch.equal(
        weights, wanted
    ) else f"{path.name}: its weights are not those of step {step}"


def rank_main(
    folder: Path,
    policy: str,
    *,
    deaf: bool = False,
    immune: bool = False,
    stuck: bool = False,
    full: bool = False,
) -> None:
    """Run one rank until it is stopped.

    deaf: no guard is asked. immune: SIGTERM is ignored. stuck: a collective whose peer died hangs, as NCCL's does, and does
    not raise. full: there is no room for the checkpoint before the halt.
    """
    if immune:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for name, theirs in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS")):
        os.environ.setdefault(name, os.environ.get(theirs, ""))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    settings = settings_of(folder, policy)
    (folder / f"start{rank}-{os.getpid()}").touch()
    client = Client(settings, "trainer", rank=rank, world=world)
    client.connect(timeout=60)
    guard = Guard(settings)
    dist.init_process_group("gloo")
    weights = torch.zeros(1000)
    notes = (folder / f"steps{rank}").open("a", buffering=1)
    path = folder / f"checkpoint{rank}"

    def checkpoint(step: int) -> None:
        if full:
            raise OSError(28, "No space left on device")
        save(path, step, weights)

    step = -1
    while True:
        step += 1
        try:
            if not deaf:
                try:
                    guard.check(step, group=dist.group.WORLD, checkpoint=lambda: checkpoint(step))  # noqa: B023
                except HaltedError:
                    (folder / f"halted{rank}").write_text(f"{step} {time.time()}")
                    raise
            notes.write(f"{step} {time.time()}\n")
            if step % EVERY == 0:
                save(path, step, weights)
            time.sleep(STEP_SECONDS)
            gradient = torch.ones(1000)
            dist.all_reduce(gradient)
            weights += gradient
        except HaltedError:
            raise
        except RuntimeError:
            if not stuck:
                raise
            while True:
                time.sleep(1)


def engine_main(folder: Path, policy: str) -> None:
    """An engine of the run in a process of its own: breaks the contract when told to, ends when the lease says halt."""
    contract = Contract.load(library(CONTRACT))
    identities = contract.identities.to_dict()
    state = StateDirectory(folder / "state")
    hello = {
        "monitor_only": False,
        "policy": policy,
        "contract": contract.to_dict(),
        "identities": identities,
    }
    kind = peer_class()
    engine = kind(state.path, "engine", run=RUN, **hello)
    (folder / "engine").touch()
    sent = False
    with LeasePage.open(state.run(RUN).lease) as page:
        while page.read().state is not LeaseState.HALT:
            time.sleep(0.002)
            if sent or not (folder / "strike").exists():
                continue
            degrees = {"TP": 2, "SP": 1, "PP": 1, "CP": 2, "EP": 1, "ETP": 1, "DP": 1}
            fields = {"topology": degrees, "environment": {"arch": "cpu"}, "identities": identities}
            try:
                engine.send(wire.Attestation, reason="sync", step=1, weight_version=1, **fields)
                sent = True
            except OSError:  # the daemon it spoke to is gone: speak to the one that is there
                with contextlib.suppress(OSError):
                    engine = kind(state.path, "engine", run=RUN, **hello)


def arguments(folder: Path, policy: str, *flags: str) -> list[str]:
    """The command line after the interpreter that runs a rank."""
    return [__file__, "--folder", str(folder), "--policy", policy, *(f"--{flag}" for flag in flags)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--policy", default="fail_open")
    for flag in ("deaf", "immune", "stuck", "full"):
        parser.add_argument(f"--{flag}", action="store_true")
    given = vars(parser.parse_args())
    rank_main(given.pop("folder"), given.pop("policy"), **given)


if __name__ == "__main__":
    main()
