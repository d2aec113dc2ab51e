# SPDX-License-Identifier: Apache-2.0
"""At every attestation a process says which contract it is held to now, and where it changed, the fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isoexec.contracts import wire
from isoexec.contracts.errors import ContractError, HandshakeError
from isoexec.contracts.schema import Contract, library
from isoexec.probes.attest import send_attestation
from isoexec.probes.client import Client, ProbeSettings
from isoexec.probes.contract import contract_now

TEXT = library("qwen3-dense-cpu").read_text()
EDITED = TEXT.replace("kv_segment: 32", "kv_segment: 64")
FIELD = "composition[attention].constants.kv_segment"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProbeSettings:
    """A process that read its contract from a file, when it started."""
    path = tmp_path / "contract.yaml"
    path.write_text(TEXT)
    monkeypatch.setenv("ISOEXEC_CONTRACT", str(path))
    monkeypatch.setenv("ISOEXEC_STATE_DIR", str(tmp_path))
    return ProbeSettings.from_env()


def edit(job: ProbeSettings, text: str) -> None:
    assert job.contract_path is not None
    job.contract_path.write_text(text)


def attest(client: Client, listener: Any, count: int, **fields: Any) -> wire.Attestation:
    send_attestation(client, reason="sync", step=1, weight_version=1, topology={}, regions={}, **fields)
    found = listener.wait(wire.Attestation, count)[-1]
    assert isinstance(found, wire.Attestation)
    return found


def test_a_contract_that_stands_is_named_and_not_sent_again(job: ProbeSettings, listener: Any) -> None:
    client = Client(job, "engine")
    client.connect()
    edit(job, "# a comment changes nothing\n" + TEXT)
    now = contract_now(job, job.contract)
    now.require()
    found = attest(client, listener, 1, contract=now)
    assert job.contract is not None
    assert (found.identities, found.contract) == (job.contract.identities.to_dict(), None)


def test_a_file_edited_between_two_syncs_is_attested_and_refused_by_its_fields(
    job: ProbeSettings, listener: Any
) -> None:
    client = Client(job, "engine")
    client.connect()
    assert attest(client, listener, 1).contract is None
    edit(job, EDITED)
    found = attest(client, listener, 2)
    assert job.contract_path is not None
    today = Contract.load(job.contract_path)
    assert (found.contract, found.identities) == (today.to_dict(), today.identities.to_dict())
    with pytest.raises(HandshakeError) as caught:
        contract_now(job).require()
    assert "contract.yaml was edited since this process greeted the daemon: 1 field differs" in str(
        caught.value
    )
    assert f"{FIELD}: the file has 64, the hello has 32" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "schema_version: 2\n", TEXT.replace("kv_segment: 32", "kv_segment: 3.2")]
)
def test_a_file_that_cannot_be_read_any_more_is_unknown_and_refused(
    job: ProbeSettings, listener: Any, text: str
) -> None:
    client = Client(job, "engine")
    client.connect()
    edit(job, text)
    found = attest(client, listener, 1)
    assert (found.identities, found.contract) == (None, None)
    with pytest.raises(ContractError):
        contract_now(job).require()


def test_what_a_worker_installed_counts_more_than_the_file(job: ProbeSettings) -> None:
    other = Contract.from_dict(dict(Contract.load(library("qwen3-dense-cpu")).to_dict(), arch="sm90"))
    now = contract_now(job, other, who="the worker of rank 1")
    assert now.changed == other.to_dict()
    with pytest.raises(HandshakeError, match="arch: the worker of rank 1 has sm90, the hello has cpu"):
        now.require()
    none = contract_now(job, None, who="the worker of rank 1")
    assert (none.identities, none.changed) == (None, None)
    with pytest.raises(HandshakeError, match=r"contract: the worker of rank 1 has \(absent\)"):
        none.require()


def test_a_process_that_only_monitors_has_no_contract_to_look_at(tmp_path: Path) -> None:
    now = contract_now(ProbeSettings(run="r", state_dir=tmp_path), None)
    now.require()
    assert (now.identities, now.changed, now.agrees) == (None, None, True)
