# SPDX-License-Identifier: Apache-2.0
"""`isoexec gate` on the real kernels: quick gates of every CPU function, broken ones, interrupted ones, and their records."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isoexec.contracts.discharge import families_for
from isoexec.contracts.evidence import EvidenceRecord, Store, moment
from isoexec.contracts.schema import Contract, library
from isoexec.kernels import registry
from isoexec.kernels.gates import found, ranks, verifying
from isoexec.kernels.gates.checking import GateError, Value
from isoexec.kernels.gates.cli import run as command
from isoexec.kernels.gates.running import single_thread
from isoexec.kernels.linear import column_linear
from isoexec.kernels.silu_mul import gate as silu_gate
from isoexec.kernels.silu_mul import silu_mul

QWEN = "qwen3-dense-cpu"
NOW = time.time()
SILU = "silu_mul.exp/1"


def start(*args: str) -> subprocess.Popen[str]:
    code = "import sys; from isoexec.kernels.gates.cli import run; sys.exit(run(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module", autouse=True)
def _ends() -> Iterator[None]:
    yield
    ranks.close()


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Path]:
    """(store, what the run said, a contract that names its records): one quick run of every CPU gate."""
    folder = tmp_path_factory.mktemp("gates")
    pinned = folder / "pinned.yaml"
    shutil.copy(library(QWEN), pinned)
    store = folder / "store"
    ran = start("run", "--quick", "--store", str(store), "--work", str(folder / "work"), "--pin", str(pinned))
    said = ran.communicate(timeout=280)[0]
    assert ran.returncode == 0, said
    return store, said, pinned


@pytest.fixture(scope="module")
def records(quick: tuple[Path, str, Path]) -> dict[str, EvidenceRecord]:
    return {record.function: record for record in Store([quick[0]]).records()}


def cpu_functions() -> list[str]:
    bound = {b.function for c in found.contracts_for("cpu") for b in c.composition}
    return sorted(bound)


@pytest.mark.parametrize("function", cpu_functions())
def test_every_function_of_the_shipped_cpu_contracts_is_proven(
    function: str, records: dict[str, EvidenceRecord]
) -> None:
    record = records[function]
    assert record.provider.source == registry.source_digest(function, "cpu")
    assert record.profile == "quick"
    for contract in found.contracts_for("cpu"):
        for binding in contract.composition:
            if binding.function != function:
                continue
            for family in ("conformance", *families_for(contract, binding)):
                check = record.check(family, binding.constants)
                assert check is not None, family
                assert check.failures() == []
                assert check.elements > 0
                own = {one.name for one in check.controls} - {"one_bit_of_the_result", "unwritten_memory"}
                assert own, f"{family} plants no fault of its own"
                assert all(one.differing > 0 for one in check.controls)


def test_a_run_says_how_much_was_compared_and_writes_records_by_their_digest(
    quick: tuple[Path, str, Path], records: dict[str, EvidenceRecord]
) -> None:
    store, said, _ = quick
    total = sum(record.elements for record in records.values())
    assert total > 10_000_000
    assert f"{len(records)} gates hold, 0 fail; {total:,} elements compared as integers" in said
    for record in records.values():
        assert (store / f"{record.digest.removeprefix('sha256:')}.json").read_bytes() == record.to_bytes()
        assert record.digest in said


def test_the_pinned_contract_is_discharged_by_its_records(quick: tuple[Path, str, Path]) -> None:
    store, _, pinned = quick
    contract = Contract.load(pinned)
    with single_thread():
        assert verifying.refused(contract, Store([store]), now=NOW) == []
    named = set(verifying.names(contract))
    assert named <= set(Store([store]).digests())
    assert len(named) == len({binding.function for binding in contract.composition})


def verify(capsys: pytest.CaptureFixture[str], store: Path, *more: str) -> tuple[int, str]:
    code = command(["verify", "--store", str(store), *more])
    return code, capsys.readouterr().out


def test_verify_passes_and_a_sample_run_again_has_the_same_counts(
    quick: tuple[Path, str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    store, _, pinned = quick
    code, out = verify(capsys, store, str(pinned), "--rerun", "3", "--seed", "7")
    assert code == 0, out
    assert out.count("the same counts") == 3
    assert "all as they must be" in out


@pytest.fixture
def copied(quick: tuple[Path, str, Path], tmp_path: Path) -> tuple[Path, Path]:
    """A store and a contract of one's own to spoil."""
    shutil.copytree(quick[0], tmp_path / "store")
    return tmp_path / "store", quick[2]


def test_what_a_contract_says_is_unproven_is_said_and_is_no_failure(
    quick: tuple[Path, str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, _, pinned = quick
    honest = tmp_path / "honest.yaml"
    lines = pinned.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if "region: silu_mul" in line)
    at = next(i for i in range(at, len(lines)) if "discharge" in lines[i])
    lines[at] = "    discharge: {kind: none}"
    honest.write_text("\n".join(lines) + "\n")
    code, out = verify(capsys, store, str(honest))
    assert code == 0, out
    assert "unproven, as it says: silu_mul" in out


def test_one_edited_byte_of_a_record_is_named(
    copied: tuple[Path, Path], records: dict[str, EvidenceRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    store, pinned = copied
    path = store / f"{records[SILU].digest.removeprefix('sha256:')}.json"
    path.write_bytes(path.read_bytes().replace(b'"differing":0', b'"differing":1', 1))
    code, out = verify(capsys, store, str(pinned))
    assert code == 1
    assert f"wanted the record {records[SILU].digest}" in out
    assert "IX040" in out


def test_a_record_past_its_time_is_named(
    copied: tuple[Path, Path], records: dict[str, EvidenceRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    store, pinned = copied
    assert moment(records[SILU].expires) - moment(records[SILU].made) == 365 * 86400
    code, out = verify(capsys, store, str(pinned), "--at", "2199-01-01T00:00:00Z")
    assert code == 1
    assert f"expires: wanted later than 2199-01-01T00:00:00Z, found {records[SILU].expires}" in out
    assert "IX043" in out


def test_one_edited_byte_of_a_kernels_source_or_gate_is_named(
    copied: tuple[Path, Path],
    records: dict[str, EvidenceRecord],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, pinned = copied
    root = tmp_path / "kernels"
    shutil.copytree(registry._ROOT, root, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("ops.py", "gate.py"):
        path = root / "silu_mul" / name
        path.write_bytes(path.read_bytes().replace(b"silu", b"silU", 1))
    monkeypatch.setattr(registry, "_ROOT", root)
    monkeypatch.setattr(silu_gate, "GATE", type(silu_gate.GATE)(SILU, "cpu"))
    registry.source_digest.cache_clear()
    try:
        edited = registry.source_digest(SILU, "cpu")
        code, out = verify(capsys, store, str(pinned))
    finally:
        monkeypatch.undo()
        registry.source_digest.cache_clear()
    assert code == 1
    assert (
        f"provider.source: wanted {edited}, which is installed here, found {records[SILU].provider.source}"
        in out
    )
    assert "  gate: wanted sha256:" in out
    assert out.count("FAILS") == 1, "the other functions are as they were"


def test_a_record_of_another_environment_is_named(
    copied: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store, pinned = copied
    here = found.environment("cpu")
    monkeypatch.setattr(verifying, "environment", lambda _: {**here, "torch": "9.9"})
    code, out = verify(capsys, store, str(pinned))
    assert code == 1
    assert "environment.torch: wanted 9.9, which is here, found " + torch.__version__ in out


def test_a_record_that_says_more_than_a_run_finds_is_caught_by_running_it_again(
    copied: tuple[Path, Path], records: dict[str, EvidenceRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    store, _ = copied
    for path in store.iterdir():
        path.unlink()
    value = json.loads(records[SILU].to_bytes())
    value["checks"] = [one for one in value["checks"] if one["family"] == "conformance"]
    value["checks"][0]["elements"] += 1000
    Store([store]).write(
        EvidenceRecord.from_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())
    )
    code, out = verify(capsys, store, QWEN, "--rerun", "1")
    assert code == 1
    assert "elements: wanted" in out


def test_a_store_that_proves_nothing_here_cannot_be_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = verify(capsys, tmp_path, "--rerun", "1")
    assert code == 1
    assert "no record of this source" in out


def one_bit(out: Tensor) -> Tensor:
    if out.numel():
        view = out.detach().view(-1).view({2: torch.int16, 4: torch.int32}[out.element_size()])
        view[out.numel() // 3] ^= 1
    return out


def run_silu(tmp_path: Path, *more: str) -> int:
    args = ["run", "--quick", "--fresh", "--store", str(tmp_path / "store"), "--work", str(tmp_path / "work")]
    return command([*args, "--function", SILU, *more])


def test_a_gate_over_a_broken_kernel_says_what_differs_and_writes_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(silu_gate, "silu_mul", lambda gate, up: one_bit(silu_mul(gate, up)))
    assert run_silu(tmp_path, "--function", "bias.add/1") == 1
    out = capsys.readouterr().out
    assert f"{SILU}: fails, no evidence is written" in out
    conformance = next(line for line in out.splitlines() if line.startswith("  conformance"))
    assert "36 differ" in conformance  # one element of each shape
    assert "FAILS: 36 of 165,120 elements differ".replace(",", "") in conformance.replace(",", "")
    written = [record.function for record in Store([tmp_path / "store"]).records()]
    assert written == ["bias.add/1"], "another gate of the same run has its record"


def test_a_control_that_passes_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(silu_gate, "nudged", lambda x: x)
    assert run_silu(tmp_path) == 1
    assert "control one_ulp_of_the_gate passed: 122880 elements, none differs" in capsys.readouterr().out
    assert Store([tmp_path / "store"]).digests() == []


def test_a_check_that_breaks_fails_the_run_and_the_others_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(silu_gate, "company", None)
    assert run_silu(tmp_path) == 1
    out = capsys.readouterr().out
    assert "FAILS: batch_invariance: TypeError" in out
    assert "backward" in out


class Faults:
    """What is wrong with each kernel, and the family that must see it."""

    @staticmethod
    def by_size(gate: Tensor, up: Tensor) -> Tensor:
        out = silu_mul(gate, up)
        return one_bit(out) if gate.dim() == 2 and 1 < len(gate) < 4 else out

    @staticmethod
    def detached(gate: Tensor, up: Tensor) -> Tensor:
        return silu_mul(gate, up.detach()) + 0.0 * up

    @staticmethod
    def not_itself(gate: Tensor, up: Tensor) -> Tensor:
        Faults.calls += 1
        out = silu_mul(gate, up)
        return one_bit(out) if Faults.calls % 5 == 3 else out

    @staticmethod
    def with_gradient(gate: Tensor, up: Tensor) -> Tensor:
        out = silu_mul(gate, up)
        return out + 2.0**-20 * out if torch.is_grad_enabled() else out

    @staticmethod
    def unwritten(gate: Tensor, up: Tensor) -> Tensor:
        out = torch.empty(gate.shape, dtype=gate.dtype)
        out.view(-1)[: max(0, gate.numel() - 1)] = silu_mul(gate, up).reshape(-1)[: max(0, gate.numel() - 1)]
        return out

    calls = 0


@pytest.mark.parametrize(
    ("fault", "family"),
    [
        (Faults.by_size, "batch_invariance"),
        (Faults.detached, "backward"),
        (Faults.not_itself, "rerun_determinism"),
        (Faults.with_gradient, "case_parity"),
        (Faults.unwritten, "degenerate_shapes"),
    ],
)
def test_each_family_sees_the_fault_it_is_for(
    fault: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = silu_gate.GATE.run(family, {}, full=False)
    assert right.failures() == []
    monkeypatch.setattr(silu_gate, "silu_mul", fault)
    assert silu_gate.GATE.run(family, {}, full=False).differing > 0


def test_a_sum_of_rank_sums_and_a_stale_page_are_not_taken_for_the_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from isoexec.kernels.attention import gate as attention_gate
    from isoexec.kernels.linear import gate as linear_gate

    constants: dict[str, Value] = {
        "k_block": 64,
        "row_tile": 16,
        "accumulate": "float32",
        "boundary": "model",
    }

    def split_k(x: Tensor, w: Tensor, **of: Any) -> Tensor:
        if w.shape[1] % 128:
            return column_linear(x, w, **of)
        return linear_gate._split_k(x, w, 64, of.get("out_dtype") or x.dtype)

    monkeypatch.setattr(linear_gate, "column_linear", split_k)
    assert linear_gate.GATE.run("conformance", constants, full=False).differing > 0

    original = attention_gate.Cache.write

    def forgets(self: Any, sequence: int, first: int, kv: Tensor) -> None:
        original(self, sequence, first, kv[:-1])

    monkeypatch.setattr(attention_gate.Cache, "write", forgets)
    stale = attention_gate.GATE.run("resume_exactness", {"kv_segment": 32, "query_tile": 16}, full=False)
    assert stale.differing > 0


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    work, store = tmp_path / "work", tmp_path / "store"
    args = ["run", "--quick", "--function", "rope.neox_fp32/1", "--store", str(store), "--work", str(work)]
    first = start(*args)
    until = time.monotonic() + 120
    while len(list(work.glob("*.json"))) < 3 and time.monotonic() < until:
        assert first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    done = len(list(work.glob("*.json")))
    assert 3 <= done < 7
    assert not store.exists(), "half a gate is no evidence"
    second = start(*args)
    said = second.communicate(timeout=200)[0]
    assert second.returncode == 0, said
    assert f"{done} checks kept from an earlier run" in said
    (record,) = Store([store]).records()
    assert len(record.checks) == 7
    assert list(work.glob("*.json")) == [], "what is in a record is not kept twice"


def test_results_of_another_source_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from isoexec.contracts.evidence import Subject
    from isoexec.kernels.gates import running
    from isoexec.kernels.gates.running import Job

    job = Job(gate=silu_gate.GATE, family="conformance", constants={}, full=False)
    here = job.key({"torch": "1"})
    assert job.key({"torch": "2"}) != here
    assert Job(gate=silu_gate.GATE, family="conformance", constants={}, full=True).key({"torch": "1"}) != here
    other = Subject(name="isoexec.kernels.silu_mul", kind="kernel", source="sha256:" + "1" * 64)
    monkeypatch.setattr(running, "subject", lambda *_: other)
    assert job.key({"torch": "1"}) != here


def test_one_family_alone_writes_no_record_and_is_kept_for_the_next_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [
        "run",
        "--quick",
        "--function",
        SILU,
        "--store",
        str(tmp_path / "store"),
        "--work",
        str(tmp_path / "work"),
    ]
    assert command([*args, "--family", "conformance"]) == 0
    assert Store([tmp_path / "store"]).digests() == []
    capsys.readouterr()
    assert command(args) == 0
    assert "1 checks kept from an earlier run" in capsys.readouterr().out
    assert len(Store([tmp_path / "store"]).digests()) == 1
    assert command([*args, "--missing"]) == 0
    assert f"{SILU}: proven by sha256:" in capsys.readouterr().out
    assert len(Store([tmp_path / "store"]).digests()) == 1


def test_signed_records_satisfy_a_contract_that_wants_their_signer(
    quick: tuple[Path, str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cryptography")
    store = tmp_path / "store"
    shutil.copytree(quick[0], store)
    assert command(["key", str(tmp_path / "key.pem")]) == 0
    public = capsys.readouterr().out.split()[-1]
    demanding = tmp_path / "demanding.yaml"
    demanding.write_text(
        quick[2]
        .read_text()
        .replace("evidence: {certify: install}", f'evidence: {{signers: ["{public}"]}}', 1)
    )
    code, out = verify(capsys, store, str(demanding))
    assert code == 1
    assert "IX049" in out
    digests = Store([store]).digests()
    assert command(["sign", str(tmp_path / "key.pem"), *digests, "--store", str(store)]) == 0
    code, out = verify(capsys, store, str(demanding))
    assert code == 0, out
    assert "signed by 1" in out


def test_list_and_show_print_what_is_there(
    quick: tuple[Path, str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(quick[0])
    assert command(["list", "--arch", "cpu", "--store", store]) == 0
    out = capsys.readouterr().out
    assert all(function in out for function in cpu_functions())
    assert command(["list", "--arch", "cpu", "--store", store, "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert all(one["evidence"] for one in listed if one["constants"])
    assert command(["show", "--store", store]) == 0
    assert SILU in capsys.readouterr().out
    assert command(["show", SILU, "--store", store]) == 0
    out = capsys.readouterr().out
    assert "elements, 0 differ" in out
    assert "control stock_silu" in out
    assert command(["show", SILU, "--store", store, "--format", "json"]) == 0
    (value,) = json.loads(capsys.readouterr().out)
    assert value["function"] == SILU
    digest = next(one for one in Store([quick[0]]).records() if one.function == SILU).digest
    assert command(["show", digest[:20], "--store", store]) == 0
    assert digest in capsys.readouterr().out


def test_wrong_usage_is_told_apart() -> None:
    assert command(["run", "--valid-days", "0"]) == 2
    assert command(["run", "--family", "nothing"]) == 2
    assert command([]) == 2


def test_a_machine_without_the_arch_refuses_its_gates() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(GateError, match=r"a GPU of compute capability 9\.0, found no GPU"):
        found.device_for("sm90")
    with pytest.raises(GateError, match="no GPU"):
        command(["run", "--arch", "sm90", "--quick"])


def test_a_switch_that_is_not_as_the_contracts_claim_refuses_a_run() -> None:
    # in a process of its own: a pool of two threads stays, and a process forked beside it waits for ever for the second
    script = "import torch; torch.set_num_threads(2); from isoexec.kernels.gates import found; found.hold_switches('cpu')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert "GateError" in done.stderr
    assert "num_threads" in done.stderr
