# SPDX-License-Identifier: Apache-2.0
"""Runs the real engine in processes of its own: what a process of the engine installed cannot be taken back in it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isoexec.contracts.schema import library

SCRIPT = Path(__file__).with_name("engine_script.py")
_ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "VLLM_PLUGINS": "isoexec",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_OURS = ("ISOEXEC_CONTRACT", "ISOEXEC_ENFORCE", "ISOEXEC_RUN", "ISOEXEC_STATE_DIR")

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two tiny checkpoints of one shape: ``first`` and, with every weight another, ``second``."""
    pytest.importorskip("vllm")
    from isoexec.adapters.demo.tiny import make_mimo, make_qwen3

    root = tmp_path_factory.mktemp("models")
    made = {name: str(make_qwen3(root / name, seed=seed)) for name, seed in (("first", 7), ("second", 8))}
    return made | {"mimo": str(make_mimo(root / "mimo", seed=9))}


@pytest.fixture(scope="session")
def pinned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped contract with the digests of the kernels in this checkout."""
    return _pinned(tmp_path_factory, "qwen3-dense-cpu")


@pytest.fixture(scope="session")
def pinned_mimo(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same of MiMo's contract."""
    return _pinned(tmp_path_factory, "mimo-dense-cpu")


@pytest.fixture(scope="session")
def pinned_moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same of the contract of a Qwen3 with experts."""
    return _pinned(tmp_path_factory, "qwen3-moe-cpu")


def _pinned(tmp_path_factory: pytest.TempPathFactory, name: str) -> str:
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("torch")
    from isoexec.kernels import registry

    data = yaml.safe_load(library(name).read_text())
    for provider in data["providers"]:
        provider["source"] = registry.source_digest(provider["function"])
    path = tmp_path_factory.mktemp("contract") / "pinned.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """``run(scenario, **arguments)`` -> what the scenario of ``engine_script.py`` found in a process of its own, once."""
    root = tmp_path_factory.mktemp("engine")
    server = subprocess.Popen(
        [sys.executable, "-P", str(SCRIPT)],
        env={k: v for k, v in os.environ.items() if k not in _OURS}
        | _ENGINE_ENV
        | {
            "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        },
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(root / "server").open("w"),
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    asking, answers = server.stdin, server.stdout

    @functools.cache
    def kept(scenario: str, arguments: str) -> dict[str, Any]:
        number = len(list(root.iterdir()))
        out, errors = root / f"{number}.json", root / f"{number}.log"
        question = {
            "scenario": scenario,
            "out": str(out),
            "errors": str(errors),
            "said": json.loads(arguments),
        }
        print(json.dumps(question), file=asking, flush=True)
        answer = answers.readline()
        if not out.exists():
            log = errors if errors.exists() else root / "server"
            return {"failed": f"{scenario} ended with {answer}:\n{log.read_text()[-6000:]}"}
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    def once(scenario: str, **arguments: Any) -> dict[str, Any]:
        found = kept(scenario, json.dumps(arguments, sort_keys=True))
        if "failed" in found:
            pytest.fail(found["failed"], pytrace=False)
        return found

    yield once
    asking.close()
    server.wait(timeout=60)


@pytest.fixture(scope="session")
def one_rank(run: Run, models: dict[str, str], pinned: str) -> Callable[[str], dict[str, Any]]:
    """What one rank under the contract does in a dtype."""

    def of(dtype: str) -> dict[str, Any]:
        paths = {"first": models["first"], "second": models["second"]}
        return {"dtype": dtype, **run("contract_bits", contract=pinned, dtype=dtype, **paths)}

    return of


@pytest.fixture(scope="session")
def native(run: Run, models: dict[str, str]) -> dict[str, Any]:
    """What one rank without a contract does, by dtype."""
    return run("native", first=models["first"], second=models["second"])
