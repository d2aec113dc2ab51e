# SPDX-License-Identifier: Apache-2.0
"""Entry point of group ``vllm.general_plugins``: called in every process of the engine, it installs the contract's hooks.

Without ``ISOEXEC_CONTRACT`` it does nothing: the engine is native and only monitored.  The engine swallows what an import of a
plugin raises and goes on natively, so this module imports nothing that can fail; what ``register`` raises stops the engine.
"""

from __future__ import annotations

import os

__all__ = ["register"]


def register() -> None:
    """Install the contract's regions into this process; idempotent.

    Raises ContractError for a contract that cannot be read, and InstallError for an unsupported engine, or for kernels that are
    not the ones the contract was pinned for.
    """
    if not os.environ.get("ISOEXEC_CONTRACT"):
        return
    from isoexec.adapters.vllm.install import install_from_env

    install_from_env()
