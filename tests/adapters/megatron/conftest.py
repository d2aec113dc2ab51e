# SPDX-License-Identifier: Apache-2.0
"""Real megatron-core on real gloo groups: Megatron is imported once here, and each launch forks one process a rank."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import start_processes

from isoexec.adapters.demo.tiny import make_qwen3, make_qwen3_moe
from isoexec.adapters.megatron import cpu
from isoexec.adapters.megatron.model import build
from isoexec.contracts.parts import AxisClaim
from isoexec.contracts.schema import Contract, library
from isoexec.kernels import registry


@dataclass(frozen=True)
class Layout:
    """A parallel layout: tensor, sequence, pipeline and data parallelism, and of experts, where one says it."""

    tp: int = 1
    sp: bool = False
    pp: int = 1
    dp: int = 1
    world: int = 0
    ep: int = 1
    etp: int | None = None

    @property
    def ranks(self) -> int:
        return self.world or self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return (
            f"TP{self.tp}"
            + ("+SP" if self.sp else "")
            + (f" DP{self.dp}" if self.dp > 1 else "")
            + ((f" PP{self.pp}" if self.pp > 1 else "") + (f" EP{self.ep} ETP{self.etp}" if self.etp else ""))
        )


def _rank_main(rank: int, work: Callable[..., Any], layout: Layout, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # as the contract claims
    cpu.install()
    store = FileStore(f"{folder}/store", layout.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.ranks)
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
    torch.save(work(), f"{folder}/rank{rank}.pt")
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


Launch = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """launch(work, layout) forks the layout's ranks, runs work() in each, and returns their results in rank order."""

    def run(work: Callable[[], Any], layout: Layout | None = None) -> list[Any]:
        layout = layout or Layout()
        folder = tmp_path_factory.mktemp("ranks")
        start_processes(
            _rank_main, args=(work, layout, str(folder)), nprocs=layout.ranks, start_method="fork"
        )
        return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in range(layout.ranks)]

    return run


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("qwen3"), seed=11)


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of two layers with 16 experts, of which a token goes to three: two would hide the order of their sum."""
    return make_qwen3_moe(tmp_path_factory.mktemp("moe"), seed=13, experts=16, chosen=3)


def _pinned(name: str) -> Contract:
    found = Contract.load(library(name))
    pinned = (dataclasses.replace(p, source=registry.source_digest(p.function)) for p in found.providers)
    return dataclasses.replace(found, providers=tuple(pinned))


@pytest.fixture(scope="session")
def contract() -> Contract:
    """The shipped contract, pinned to the kernels as they are here."""
    return _pinned("qwen3-dense-cpu")


@pytest.fixture(scope="session")
def moe_contract() -> Contract:
    """The shipped contract of a Qwen3 with experts, pinned to the kernels as they are here."""
    return _pinned("qwen3-moe-cpu")


@pytest.fixture(scope="session")
def replicated() -> Callable[[Contract], Contract]:
    """replicated(contract) claims DP 1 and 2 for the trainer, whatever the contract claims."""

    def of(contract: Contract) -> Contract:
        trainer = {**contract.claims.topology["trainer"], "DP": AxisClaim(invariant=(1, 2))}
        topology = {**contract.claims.topology, "trainer": trainer}
        return dataclasses.replace(contract, claims=dataclasses.replace(contract.claims, topology=topology))

    return of


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    """[70, 41]: more than the largest microbatch, and a length that sequence parallelism has to pad."""
    return torch.randint(3, 512, (70, 41), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="session")
def make(checkpoint: Path) -> Callable[..., Any]:
    """make(layout, dtype, contract) builds the rank's model inside a launch."""

    def of(layout: Layout, dtype: torch.dtype, contract: Contract | None, **options: Any) -> Any:
        return build(checkpoint, dtype=dtype, contract=contract, sequence_parallel=layout.sp, **options)

    return of


LAYOUTS = (Layout(), Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2))


@pytest.fixture(params=LAYOUTS[1:], ids=str)
def other(request: pytest.FixtureRequest) -> Layout:
    """Every layout but a single rank."""
    layout: Layout = request.param
    return layout


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(scope="session")
def one() -> Layout:
    return Layout()


@pytest.fixture(scope="session")
def layout_of() -> Callable[..., Layout]:
    """The Layout class: conftest modules are not importable by name here."""
    return Layout
