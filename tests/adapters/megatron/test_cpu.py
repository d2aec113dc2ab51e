# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from isoexec.adapters.megatron import cpu
from isoexec.contracts.errors import InstallError

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the shims refuse a process with a GPU"),
]


@pytest.fixture
def shims() -> Iterator[None]:
    cpu.install()
    yield
    cpu.remove()


@pytest.mark.usefixtures("shims")
def test_current_device_is_the_cpu_and_allocates_there() -> None:
    assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"


@pytest.mark.usefixtures("shims")
def test_streams_and_events_are_already_done() -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    event = stream.record_event()
    stream.wait_event(event)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        assert event.query()
    assert torch.cuda.Event(enable_timing=True).elapsed_time(event) == 0.0


@pytest.mark.usefixtures("shims")
def test_megatron_saves_and_restores_the_cpu_generator_as_the_gpus() -> None:
    from megatron.core.tensor_parallel.random import _get_cuda_rng_state, _set_cuda_rng_state

    torch.manual_seed(4)
    state = _get_cuda_rng_state()
    drawn = torch.rand(3)
    _set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.usefixtures("shims")
def test_rows_are_exchanged_by_split_sizes_that_are_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu.remove()
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        torch.distributed, "all_to_all_single", lambda *args, **more: seen.append((*args, more))
    )
    cpu.install()
    here, there = torch.zeros(3), torch.zeros(2)
    torch.distributed.all_to_all_single(here, there, torch.tensor([1, 2]), [2, 0], group=None)
    assert seen[0][2:] == ([1, 2], [2, 0], {"group": None})


@pytest.mark.usefixtures("shims")
def test_the_literal_device_cuda_means_the_cpu() -> None:
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert torch.zeros(1, device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.ones(1).cuda().to("cuda:0").device.type == "cpu"
    assert torch.ones(1, pin_memory=True).pin_memory().device.type == "cpu"
    assert torch.ones(1).to("cuda", torch.float64).dtype is torch.float64


@pytest.mark.usefixtures("shims")
def test_a_tensor_s_type_answers_as_a_cuda_tensor_does() -> None:
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type(torch.float64).dtype is torch.float64


def test_removal_leaves_torch_as_it_was() -> None:
    before = {
        name: getattr(torch.cuda, name) for name in ("current_device", "Stream", "synchronize", "manual_seed")
    }
    cpu.install()
    cpu.install()
    assert cpu.installed()
    cpu.remove()
    assert {name: getattr(torch.cuda, name) for name in before} == before
    assert not torch.cuda.is_initialized()
    assert torch.ones(1).type() == "torch.FloatTensor"


def test_a_process_with_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(InstallError, match="8 CUDA device"):
        cpu.install()
    assert not cpu.installed()


def test_no_module_of_the_adapter_puts_the_shims_in_but_the_census_in_a_process_of_its_own() -> None:
    folder = Path(cpu.__file__).parent
    installs = {
        (path.name, function.name)
        for path in folder.glob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("cpu.install", "install")
    }
    assert installs == {("census.py", "_take")}
