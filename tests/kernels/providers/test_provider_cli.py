# SPDX-License-Identifier: Apache-2.0
"""`isoexec provider`: what it prints and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isoexec.contracts.errors import EvidenceError
from isoexec.contracts.evidence import Store
from isoexec.kernels.providers import versions
from isoexec.kernels.providers.cli import run


def test_list_names_kernels_and_libraries_with_what_they_are_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["list", "--format", "json", "--store", str(tmp_path)]) == 0
    rows = {(r["provider"], r["arch"]): r for r in json.loads(capsys.readouterr().out)}
    assert rows["isoexec.kernels.linear.hopper", "sm90"]["identity"].startswith("sha256:")
    assert rows["torch.embedding", "cpu"]["identity"].startswith("torch ")
    assert {r["evidence"] for r in rows.values()} == {None}


def test_certify_writes_a_record_that_list_and_show_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = ["--arch", "cpu", "--store", str(tmp_path)]
    assert run(["certify", "torch.embedding", "--quick", *where]) == 0
    assert "has the bits of embedding.lookup/1 on cpu: sha256:" in capsys.readouterr().out
    (digest,) = Store([tmp_path]).digests()
    assert run(["show", "torch.embedding", *where]) == 0
    assert digest in capsys.readouterr().out
    assert run(["list", *where]) == 0
    assert digest[7:19] in capsys.readouterr().out


def test_certify_ends_with_1_where_bits_differ(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["certify", "torch.linear", "--quick", "--store", str(tmp_path)]) == 1
    assert "wanted the bits of linear.chain/1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unknown_name_ends_with_1_and_wrong_usage_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "nobody"]) == 1
    assert "there are" in capsys.readouterr().err
    assert run(["certify"]) == 2


def test_a_library_that_is_not_loaded_has_no_version() -> None:
    with pytest.raises(EvidenceError, match="one libnowhere loaded in this process"):
        versions.loaded_library("libnowhere")


def test_a_loaded_library_is_found_by_what_is_mapped() -> None:
    found = versions.loaded_library("libtorch_cpu")
    assert Path(found._name).name.startswith("libtorch_cpu.so")
