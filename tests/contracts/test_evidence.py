# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from isoexec.contracts.errors import ContractError, EvidenceError
from isoexec.contracts.evidence import EvidenceRecord, Store, default_store, moment, shipped, stamp
from isoexec.contracts.schema import Contract, library

Make = Callable[[Contract, str, str], EvidenceRecord]


@pytest.fixture
def record(make_record: Make) -> EvidenceRecord:
    return make_record(Contract.load(library("qwen3-dense-cpu")), "rope.neox_fp32/1", "isoexec.kernels.rope")


def test_a_record_s_file_is_named_by_the_sha256_of_its_bytes(record: EvidenceRecord, tmp_path: Path) -> None:
    digest = Store([tmp_path]).write(record)
    (file,) = tmp_path.iterdir()
    assert file.stem == hashlib.sha256(file.read_bytes()).hexdigest() == digest.removeprefix("sha256:")
    assert Store([tmp_path]).read(digest).to_dict() == record.to_dict()
    assert Store([tmp_path / "none", tmp_path]).read(digest).digest == digest


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"quick"', b'"slow"', "expected one of quick, full"),
        (b'{"arch":"cpu",', b'{"arch":"cpu","more":1,', "unknown field"),
        (b'{"arch":"cpu",', b'{"arch":"cpu","arch":"cpu",', "the same key twice"),
        (b'{"arch":"cpu",', b'{ "arch":"cpu",', "not the canonical bytes"),
        (b'"elements":1000', b'"elements":1000.0', "a raw float"),
        (b'"torch"', b'"tork"', "which torch ran"),
        (b"{", b"", "not a record"),
    ],
)
def test_bytes_that_are_no_record_are_refused(
    record: EvidenceRecord, old: bytes, new: bytes, words: str
) -> None:
    data = dataclasses.replace(record, profile="quick").to_bytes()
    assert old in data
    with pytest.raises(ContractError, match=words):
        EvidenceRecord.from_bytes(data.replace(old, new, 1))


def test_a_record_cannot_expire_before_it_was_made(record: EvidenceRecord) -> None:
    other = dataclasses.replace(record, expires=record.made)
    with pytest.raises(ContractError, match="expires before it was made"):
        EvidenceRecord.from_bytes(other.to_bytes())


def test_a_deeply_nested_record_is_refused_and_not_a_crash() -> None:
    with pytest.raises(ContractError):
        EvidenceRecord.from_bytes(b"[" * 100_000)


def test_find_gives_the_newest_first_and_skips_what_cannot_be_read(
    record: EvidenceRecord, tmp_path: Path
) -> None:
    store = Store([tmp_path])
    newer = dataclasses.replace(record, made=stamp(moment(record.made) + 60))
    store.write(record)
    store.write(newer)
    (tmp_path / ("0" * 64 + ".json")).write_text("{}")
    found = store.find(function="rope.neox_fp32/1", provider="isoexec.kernels.rope", arch="cpu")
    assert [one.made for one in found] == [newer.made, record.made]
    with pytest.raises(EvidenceError, match="whose bytes are"):
        list(store.records())


def test_the_default_store_reads_the_user_s_folders_and_then_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOEXEC_EVIDENCE", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    assert default_store().paths == (tmp_path / "a", tmp_path / "b", shipped())
    monkeypatch.delenv("ISOEXEC_EVIDENCE")
    monkeypatch.setenv("ISOEXEC_STATE_DIR", str(tmp_path))
    assert default_store().paths == (tmp_path / "evidence", shipped())


def test_times_go_both_ways() -> None:
    assert stamp(moment("2026-11-30T01:02:03Z")) == "2026-11-30T01:02:03Z"
