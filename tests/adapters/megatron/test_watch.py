# SPDX-License-Identifier: Apache-2.0
"""A real trainer under a real daemon whose contract file is edited between two weight syncs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from isoexec.adapters.megatron.logprobs import score
from isoexec.adapters.megatron.watch import Watch
from isoexec.contracts.errors import HandshakeError
from isoexec.contracts.halting import HaltMarker, StateDirectory
from isoexec.contracts.schema import Contract
from isoexec.contracts.window import Window
from isoexec.daemon.journal import Journal
from isoexec.probes.client import Client, ProbeSettings
from isoexec.probes.logprobs import LogprobTap, ScoredSequence

pytestmark = pytest.mark.megatron

FIELD = "composition[attention].constants.kv_segment"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Path]:
    """A daemon's state directory, while it runs."""
    state = tmp_path / "state"
    state.mkdir()
    code = "import sys; from isoexec.daemon.cli import run; sys.exit(run())"
    with (tmp_path / "daemon.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, "--state-dir", str(state), "--http", "127.0.0.1:0"],
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("isoexec daemon: "), (tmp_path / "daemon.log").read_text()
            yield state
        finally:
            process.terminate()
            process.wait(15)
            process.stdout.close()


def first_window(daemon: Path, run: str) -> Window:
    deadline = time.monotonic() + 60
    while True:
        journal = Journal.open(StateDirectory(daemon).journal)
        rows = journal.windows(run)
        journal.close()
        if rows:
            return Window.from_dict(rows[0]["window"])
        assert time.monotonic() < deadline, "no window within 60 s"
        time.sleep(0.2)


def test_a_pack_is_cut_into_the_sequences_that_the_engine_reported_each_with_its_place(
    launch: Callable[..., Any], make: Callable[..., Any], contract: Contract, one: Any, daemon: Path
) -> None:
    edges, prompts, ids = [0, 5, 9, 16], [2, 1, 3], torch.arange(100, 118)  # two tokens of padding at the end
    logprobs = -torch.rand(ids.numel(), generator=torch.Generator().manual_seed(0))

    def train() -> list[int]:
        settings = ProbeSettings(run="packed", state_dir=daemon, regime="bitwise", contract=contract)
        engine, trainer = Client(settings, "engine"), Client(settings, "trainer")
        for client in (engine, trainer):
            client.connect(30)
        LogprobTap(engine).record(
            "engine_decode",
            [
                ScoredSequence(
                    prompt=ids[at : at + prompt].tolist(),
                    response=ids[at + prompt : end].tolist(),
                    logprobs=logprobs[at + prompt : end].numpy(),
                )
                for at, end, prompt in zip(edges[:-1], edges[1:], prompts, strict=True)
            ],
            step=1,
            weight_version=1,
            logprobs_mode="processed_logprobs",
        )
        watch = Watch(make(one, torch.bfloat16, contract), trainer)
        named: dict[str, Any] = {"step": 1, "weight_version": 1}
        sent = [
            watch.record_packed("trainer_score", ids, logprobs, prompts, torch.tensor(edges), **named),
            watch.record_packed("trainer_fwd", ids, logprobs.double(), prompts, edges, **named),
        ]
        for client in (engine, trainer):
            client.flush(30)
            client.close()
        return sent

    assert launch(train) == [[10, 10]]
    pairs = first_window(daemon, "packed").pairs
    assert [(pair.pair[1], pair.tokens, pair.bitwise_equal, dict(pair.unpaired)) for pair in pairs] == [
        ("trainer_fwd", 10, 10, {}),
        ("trainer_score", 10, 10, {}),
    ]
    for pair in pairs:
        assert pair.detail is not None
        placed = {bucket.label: bucket.tokens for bucket in pair.detail.buckets if bucket.by == "pack_index"}
        assert placed == {"0": 3, "1": 3, "2-3": 4}


def test_each_replica_s_rows_are_sent_once_by_the_first_of_its_ranks(
    launch: Callable[..., Any],
    make: Callable[..., Any],
    contract: Contract,
    replicated: Callable[[Contract], Contract],
    layout_of: Callable[..., Any],
    daemon: Path,
) -> None:
    layout, wider = layout_of(tp=2, dp=2), replicated(contract)
    tokens = torch.arange(100, 128).view(4, 7)
    prompts, lengths = [2, 3, 2, 1], [7, 6, 7, 5]
    named: dict[str, Any] = {"step": 1, "weight_version": 1}

    def work() -> tuple[int, int]:
        settings = ProbeSettings(run="replicas", state_dir=daemon, regime="bitwise", contract=wider)
        model, rank = make(layout, torch.bfloat16, wider), torch.distributed.get_rank()
        logprobs = score(model, tokens)
        clients = [
            Client(settings, "trainer", rank=rank, world=4),
            *([Client(settings, "engine")] * (rank == 0)),
        ]
        for client in clients:
            client.connect(30)
        if rank == 0:
            rows = zip(tokens.tolist(), logprobs.numpy(), prompts, lengths, strict=True)
            LogprobTap(clients[1]).record(
                "engine_decode",
                [
                    ScoredSequence(prompt=ids[:p], response=ids[p:end], logprobs=values[p:end])
                    for ids, values, p, end in rows
                ],
                logprobs_mode="processed_logprobs",
                **named,
            )
        watch = Watch(model, clients[0])
        replica = model.pg_collection.dp.rank()
        mine = slice(0, 3) if replica == 0 else slice(3, 4)
        sent = watch.record(
            "trainer_score", tokens[mine], logprobs[mine], prompts[mine], lengths[mine], **named
        )
        torch.distributed.barrier()  # nobody says goodbye before all are there
        for client in clients:
            client.flush(30)
            client.close()
        return replica, sent

    assert launch(work, layout) == [(0, 13), (0, 0), (1, 4), (1, 0)]
    (pair,) = first_window(daemon, "replicas").pairs
    assert (pair.tokens, pair.bitwise_equal, dict(pair.unpaired)) == (17, 17, {})


def test_a_contract_edited_between_two_syncs_stops_the_trainer_and_the_run_by_its_fields(
    launch: Callable[..., Any],
    make: Callable[..., Any],
    contract: Contract,
    one: Any,
    daemon: Path,
    tmp_path: Path,
) -> None:
    path = tmp_path / "contract.yaml"
    path.write_text(yaml.safe_dump(contract.to_dict()))

    def train() -> dict[str, Any]:
        model = make(one, torch.bfloat16, contract)
        settings = ProbeSettings(
            run="edited", state_dir=daemon, regime="bitwise", contract=contract, contract_path=path
        )
        client = Client(settings, "trainer")
        client.connect(30)
        watch = Watch(model, client)
        watch.synced(1, step=1)
        path.write_text(path.read_text().replace("kv_segment: 32", "kv_segment: 64"))
        try:
            watch.synced(2, step=2)
            said = "went on"
        except HandshakeError as error:
            said = str(error)
        client.flush(30)
        client.close()
        return {"said": said}

    (found,) = launch(train)
    assert "contract.yaml was edited since this process greeted the daemon: 1 field differs" in found["said"]
    assert f"{FIELD}: the file has 64, the hello has 32" in found["said"]
    deadline = time.monotonic() + 30
    while (marker := HaltMarker.read(StateDirectory(daemon).run("edited").path)) is None:
        assert time.monotonic() < deadline, "no halt within 30 s"
        time.sleep(0.05)
    assert marker.rule == "handshake"
    first = marker.evidence["first"][0]
    assert first["path"].startswith(f"{FIELD} (")
    assert (first["engine"], first["trainer"]) == (64, 32)
