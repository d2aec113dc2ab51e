# SPDX-License-Identifier: Apache-2.0
"""An adapter plans nothing that is not proven for this process, and says which field of the evidence does not hold."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isoexec.adapters.base import make_plan
from isoexec.contracts import evidence
from isoexec.contracts.errors import InstallError
from isoexec.contracts.evidence import Store
from isoexec.contracts.parts import EvidencePolicy
from isoexec.contracts.schema import Contract, library
from isoexec.kernels import registry
from isoexec.probes.attest import environment

DEGREES = {"TP": 2, "SP": 1, "PP": 1, "CP": 1, "EP": 1, "ETP": 1, "DP": 1}
ROPE = "rope.neox_fp32/1"


@pytest.fixture(scope="module")
def contract() -> Contract:
    return Contract.load(library("qwen3-dense-cpu"))


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies of the shipped records and of the user's, which stand in for them: what this machine has proven, it keeps."""
    folder = tmp_path / "shipped"
    shutil.copytree(evidence.shipped(), folder)
    if (own := evidence.default_store().paths[0]).is_dir():
        shutil.copytree(own, tmp_path / "own")
    monkeypatch.setattr(evidence, "shipped", lambda: folder)
    monkeypatch.setenv("ISOEXEC_EVIDENCE", str(tmp_path / "own"))
    return folder


def refusing(contract: Contract) -> Contract:
    claims = dataclasses.replace(contract.claims, evidence=EvidencePolicy())
    return dataclasses.replace(contract, claims=claims)


def record_of(contract: Contract, records: Path) -> Path:
    path = Store([records]).path(str(contract.region("rope").discharge.evidence))
    assert path is not None
    return path


def test_the_shipped_contract_is_proven_in_this_process(contract: Contract, records: Path) -> None:
    assert make_plan(contract, "trainer", DEGREES, "bfloat16").binding("rope") is not None


def test_a_contract_of_another_arch_is_refused_before_its_evidence_is_read() -> None:
    hopper = Contract.load(library("qwen3-dense-sm90"))
    with pytest.raises(InstallError, match=r"wanted a process on sm90, .*found cpu"):
        make_plan(hopper, "trainer", DEGREES)


def test_a_contract_of_another_arch_may_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOEXEC_ENFORCE", "off")
    hopper = Contract.load(library("qwen3-dense-sm90"))
    assert make_plan(hopper, "trainer", DEGREES).bindings == ()


def test_a_record_that_is_gone_is_refused(contract: Contract, records: Path) -> None:
    record_of(contract, records).unlink()
    with pytest.raises(
        InstallError, match=r"rope: wanted composition\[rope\]: discharge.evidence: the record sha256"
    ):
        make_plan(contract, "engine", DEGREES)


def test_a_record_with_one_byte_edited_is_refused(contract: Contract, records: Path) -> None:
    path = record_of(contract, records)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(InstallError, match=r"discharge.evidence: .* whose bytes are sha256:.* never edited"):
        make_plan(contract, "engine", DEGREES)


def test_a_record_past_its_expiry_is_refused(
    contract: Contract, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = time.time() + 10 * 365 * 86400
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(InstallError, match=r": expires: a time to come, found 20\d\d-.*isoexec gate run"):
        make_plan(refusing(contract), "engine", DEGREES)


def test_an_edited_kernel_is_refused(
    contract: Contract, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, edited = registry.source_digest, "sha256:" + "1" * 64
    monkeypatch.setattr(registry, "source_digest", lambda f, *a: edited if f == ROPE else real(f, *a))
    with pytest.raises(InstallError, match=rf"rope: wanted .*source sha256:.*, found .*{edited}"):
        make_plan(contract, "engine", DEGREES)
    # pinned to the edited source, the contract still has the evidence of the other one
    pinned = tuple(
        dataclasses.replace(p, source=edited) if p.function == ROPE else p for p in contract.providers
    )
    rope = tuple(b for b in contract.composition if b.region == "rope")
    contract = dataclasses.replace(refusing(contract), providers=pinned, composition=rope)
    with pytest.raises(InstallError, match=rf"rope: wanted .*provider.*{edited}"):
        make_plan(contract, "engine", DEGREES)


def test_evidence_of_another_torch_is_refused(
    contract: Contract, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = refusing(contract)
    # else as the record says, whichever processor this is
    attention = Store([records]).read(str(contract.region("attention").discharge.evidence))
    found = {**environment(), **attention.environment, "torch": "9.9.9"}
    monkeypatch.setattr("isoexec.adapters.proof.environment", lambda: found)
    with pytest.raises(InstallError, match=r"environment.torch: 9\.9\.9, which runs here, found 2\."):
        make_plan(contract, "engine", DEGREES)


def test_a_constant_nobody_proved_is_refused(contract: Contract, records: Path) -> None:
    other = tuple(
        dataclasses.replace(b, constants={**b.constants, "kv_segment": 48}) if b.region == "attention" else b
        for b in contract.composition
    )
    with pytest.raises(InstallError, match=r"attention: wanted .*checks\.\w+: a check with kv_segment 48"):
        make_plan(dataclasses.replace(refusing(contract), composition=other), "engine", DEGREES)


def test_what_is_only_observed_needs_no_evidence(
    contract: Contract, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(records)
    monkeypatch.setenv("ISOEXEC_ENFORCE", "observe")
    assert make_plan(contract, "engine", DEGREES).binding("rope") is not None


ELSEWHERE = """
import sys
from isoexec.adapters.base import make_plan
from isoexec.contracts.schema import Contract
plan = make_plan(Contract.load(sys.argv[1]), "engine", {a: 1 for a in ("TP", "SP", "PP", "CP", "EP", "ETP", "DP")})
print([b.region for b in plan.bindings])
"""


@pytest.mark.parametrize("policy", ["install", "refuse"])
def test_on_another_build_a_machine_certifies_itself_where_the_contract_lets_it(
    policy: str, tmp_path: Path
) -> None:
    text = library("qwen3-dense-cpu").read_text()
    path = tmp_path / "contract.yaml"
    path.write_text(text.replace("evidence: {certify: install}", f"evidence: {{certify: {policy}}}"))
    assert policy in path.read_text()
    env = {
        **os.environ,
        "ATEN_CPU_CAPABILITY": "default",  # torch's own code of another vector width: another build, with other bits
        "ISOEXEC_EVIDENCE": str(tmp_path / "own"),
        "ISOEXEC_STATE_DIR": str(tmp_path / "state"),
        "ISOEXEC_ENFORCE": "off,rope=install+refuse",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", ELSEWHERE, str(path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    if policy == "refuse":
        assert done.returncode != 0
        assert "environment.cpu_capability: " in done.stderr
        assert "which runs here, found AVX" in done.stderr
        assert not (tmp_path / "own").exists()
        return
    assert (done.returncode, done.stdout.strip().splitlines()[-1:]) == (0, ["['rope']"]), done.stderr
    (made,) = Store([tmp_path / "own"]).records()
    assert (made.function, made.profile) == (ROPE, "quick")
    assert not made.environment["cpu_capability"].startswith("AVX")
