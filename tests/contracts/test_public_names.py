# SPDX-License-Identifier: Apache-2.0
"""What the package exports, that it is documented, and how errors read."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import isoexec.contracts
import isoexec.contracts.errors as errors


@pytest.mark.parametrize("name", isoexec.contracts.__all__)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    assert getattr(isoexec.contracts, name).__doc__


def test_public_names_are_sorted_and_an_unknown_one_is_refused() -> None:
    assert sorted(isoexec.contracts.__all__) == isoexec.contracts.__all__
    with pytest.raises(AttributeError, match="nonsense"):
        _ = isoexec.contracts.nonsense


def test_importing_errors_loads_neither_yaml_nor_numpy_nor_torch() -> None:
    code = "import sys, isoexec.contracts.errors; print({'yaml', 'numpy', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_every_error_is_in_the_tree_of_the_docstring() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.IsoExecError)
        assert name in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.ContractError("wrong", path="a.yaml", line=3, field="x.y", fix="mend it"), "a.yaml:3: x.y: wrong; mend it"),
        (errors.ContractError("wrong"), "contract: wrong"),
        (errors.TopologyError("PP", 2, "pinned 1", "engine"), "engine PP is 2, the contract admits pinned 1"),
        (errors.HandshakeError(["name: a has x, b has y"]), "name: a has x, b has y"),
        (errors.HaltedError("marker"), "marker"),
        (errors.HaltedError(None), "the run is halted; look at the cause"),
        (errors.InstallError("rope", "source a", "source b", "pin it"), "rope: wanted source a, found source b; pin it"),
    ],
)  # fmt: skip
def test_an_error_reads_as_a_sentence(error: errors.IsoExecError, text: str) -> None:
    assert text in str(error)


@pytest.mark.parametrize(
    "error", [errors.HandshakeError(["a.b differs"], "not alike"), errors.HaltedError("marker", "stopped")]
)
def test_an_error_reads_the_same_in_another_process(error: errors.IsoExecError) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301 - our own bytes
