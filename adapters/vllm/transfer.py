# SPDX-License-Identifier: Apache-2.0
"""A backend of vLLM's weight transfer: the trainer's tensors on this host by handles, without Ray, HTTP or pickle.

::

    llm = LLM(**engine_args(contract, **receiving(), ...))
    rollout.sync(handles, weight_version, step=step)  # of whole tensors: the trainer's `Offer` (`isoexec.adapters.handles`)

vLLM's own ``ipc`` backend opens the same memory, but imports Ray and asks for pickled requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from isoexec.adapters.handles import opened
from isoexec.contracts.errors import InstallError

__all__ = ["HandleEngine", "receive", "receiving", "register"]

BACKEND = "isoexec"


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing to agree on before."""


@dataclass
class Handles(WeightTransferUpdateInfo):
    """``tensors``: [name, handle] of each, names as in a Hugging Face checkpoint."""

    tensors: list[list[Any]]


class HandleEngine(WeightTransferEngine[NoInit, Handles]):
    """One worker's end; loads in checkpoint format, layer by layer into the tensors that CUDA graphs hold."""

    init_info_cls = NoInit
    update_info_cls = Handles

    def init_transfer_engine(self, init_info: NoInit) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Handles) -> None:
        self.model.load_weights((name, opened(handle)) for name, handle in update_info.tensors)

    def finish_weight_update(self) -> None:
        # a layer whose padding no tensor fills is loaded only here, from tensors the trainer may not touch before
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def shutdown(self) -> None: ...

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refused: the trainer's end is `isoexec.adapters.handles.Offer`, which needs no vLLM."""
        raise NotImplementedError(
            "make an Offer in the trainer and give its handles to `receive` at the engine"
        )


def register() -> None:
    """Make the backend known in this process; again is nothing."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, HandleEngine)


def receiving() -> dict[str, Any]:
    """Engine arguments of an engine that receives, with a contract or without."""
    return {"weight_transfer_config": {"backend": BACKEND}}


def receive(llm: Any, handles: Sequence[Sequence[Any]], weight_version: int) -> None:
    """Load whole tensors into every worker; when it returns they have been read, and the trainer may change its own.

    The prefix cache must be dropped afterwards, as after any weight load (`Rollout.sync` does both).  Raises InstallError for
    an engine that was not started with `receiving`.
    """
    config = llm.llm_engine.vllm_config.weight_transfer_config
    found = None if config is None else config.backend
    if found != BACKEND:
        raise InstallError(
            region="weight sync",
            wanted=f"an engine with the weight transfer backend {BACKEND!r}",
            found=repr(found),
            fix="start it with engine_args(contract, **receiving(), ...), or sync by a file",
        )
    llm.start_weight_update()
    llm.update_weights({"update_info": {"tensors": [list(one) for one in handles]}})
    llm.finish_weight_update()
    llm.collective_rpc("isoexec_received", args=(weight_version,))
