# SPDX-License-Identifier: Apache-2.0
"""Process switches are read by what they do, and a change of any of them has a name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from isoexec.contracts.schema import Contract, library
from isoexec.kernels import switches

FLIPS: dict[str, tuple[str, str]] = {
    # what a job says -> the name that must be reported
    "torch.set_flush_denormal(True)": ("flush_denormal", "True"),
    "torch.set_float32_matmul_precision('medium')": ("float32_matmul_precision", "medium"),
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": ("mkldnn.matmul.fp32_precision", "bf16"),
    "torch.backends.mkldnn.enabled = False": ("mkldnn.enabled", "False"),
    "torch.use_deterministic_algorithms(True)": ("deterministic_algorithms", "True"),
    "torch.use_deterministic_algorithms(True, warn_only=True)": (
        "deterministic_algorithms.warn_only",
        "True",
    ),
    "torch.utils.deterministic.fill_uninitialized_memory = False": (
        "deterministic_algorithms.fill_uninitialized",
        "False",
    ),
    "torch.set_num_threads(3)": ("num_threads", "3"),
    "torch.set_default_dtype(torch.bfloat16)": ("default_dtype", "bfloat16"),
    "torch.set_autocast_enabled('cpu', True)": ("autocast.cpu", "True"),
    "torch.backends.cuda.matmul.allow_tf32 = True": ("cuda.matmul.allow_tf32", "True"),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False": (
        "cuda.matmul.bf16_reduced_precision",
        "False",
    ),
    "torch._C._set_cublas_allow_bf16_reduced_precision_reduction(False, False)": (
        "cuda.matmul.bf16_split_k",
        "False",
    ),
    "torch._C._set_cublas_allow_fp16_reduced_precision_reduction(False, False)": (
        "cuda.matmul.fp16_split_k",
        "False",
    ),
    "torch.backends.cuda.matmul.allow_fp16_accumulation = True": ("cuda.matmul.fp16_accumulation", "True"),
    "torch.backends.cudnn.benchmark = True": ("cudnn.benchmark", "True"),
    "torch.backends.cudnn.deterministic = True": ("cudnn.deterministic", "True"),
    "torch.backends.cuda.enable_flash_sdp(False)": ("sdp.flash", "False"),
    "os.environ['OMP_NUM_THREADS'] = '7'": ("OMP_NUM_THREADS", "7"),
    "os.environ['ONEDNN_MAX_CPU_ISA'] = 'AVX2'": ("ONEDNN_MAX_CPU_ISA", "AVX2"),
    "os.environ['MKL_CBWR'] = 'COMPATIBLE'": ("MKL_CBWR", "COMPATIBLE"),
    "os.environ['NVIDIA_TF32_OVERRIDE'] = '1'": ("NVIDIA_TF32_OVERRIDE", "1"),
    "os.environ['CUBLASLT_WORKSPACE_SIZE'] = '1'": ("CUBLASLT_WORKSPACE_SIZE", "1"),
    "os.environ.pop('NCCL_ALGO')": ("NCCL_ALGO", "not set"),
}

SCRIPT = """
import json, os, sys, torch
from isoexec.kernels import switches
found = {}
for line in json.load(sys.stdin):
    reader, writer = os.pipe()
    if os.fork() == 0:
        before = switches.environment()
        exec(line)
        os.write(writer, json.dumps(switches.changes(before, switches.environment())).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    found[line] = json.loads(os.fdopen(reader).read() or "null")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What each line changes, each in a process of its own: some cannot be taken back."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NCCL_ALGO": "Ring"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT],
        input=json.dumps(list(FLIPS)),
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("line", FLIPS)
def test_a_changed_switch_is_named_with_what_it_is_now(seen: dict[str, Any], line: str) -> None:
    name, now = FLIPS[line]
    (change,) = [c for c in seen[line] if c.startswith(f"{name} was ")]
    assert change.endswith(f"and is {now}")


def test_a_reduced_precision_shows_in_the_product_whichever_interface_allowed_it(
    seen: dict[str, Any],
) -> None:
    if not torch.backends.mkldnn.is_available() or "amx" not in open("/proc/cpuinfo").read():  # noqa: PTH123, SIM115
        pytest.skip("this CPU has no bfloat16 product that oneDNN would take")
    for line in (
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    ):
        assert "float32_product_is_exact was True and is False" in seen[line]


def test_a_switch_that_torch_will_not_tell_is_unknown_and_not_a_guess(seen: dict[str, Any]) -> None:
    # torch refuses to answer the older getter once the newer setter was used
    changes = seen["torch.backends.mkldnn.matmul.fp32_precision = 'bf16'"]
    assert any("float32_matmul_precision was highest and is unknown: " in c for c in changes)


def test_setting_a_switch_back_reads_as_before() -> None:
    before = switches.environment()
    torch.set_flush_denormal(True)
    try:
        assert switches.changes(before, switches.environment()) == ["flush_denormal was False and is True"]
    finally:
        torch.set_flush_denormal(False)
    assert switches.changes(before, switches.environment()) == []


def test_every_switch_says_how_it_is_read_and_what_it_changes() -> None:
    names = [s.name for s in switches.CATALOGUE]
    assert len(set(names)) == len(names) >= 40
    assert {s.how for s in switches.CATALOGUE} == {"effect", "getter"}
    assert all(len(s.changes) > 10 for s in switches.CATALOGUE)
    assert not [n for n, v in switches.read().items() if str(v).startswith("unknown")]


def test_the_switches_a_shipped_contract_names_are_read_here() -> None:
    for path in library().glob("*.yaml"):
        wanted = Contract.load(path).claims.environment.switches
        assert set(wanted) <= {s.name for s in switches.CATALOGUE}, path.name


def test_reading_all_of_them_costs_a_step_nothing() -> None:
    switches.environment()
    start = time.perf_counter()
    for _ in range(20):
        switches.environment()
    assert (time.perf_counter() - start) / 20 < 0.02


def test_another_code_path_of_the_blas_is_seen_by_its_bits() -> None:
    script = "from isoexec.kernels import switches; print(switches.read()['float32_products'])"
    found = []
    for path in ("", "SSE4_2"):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_ENABLE_INSTRUCTIONS": path}
        done = subprocess.run(
            [sys.executable, "-P", "-c", script],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        found.append(done.stdout)
    if not torch.backends.mkl.is_available() or "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip(
            "torch's BLAS takes no such order here: it is not MKL, or MKL has one code for this processor"
        )
    assert found[0] != found[1]
