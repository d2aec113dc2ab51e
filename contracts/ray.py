# SPDX-License-Identifier: Apache-2.0
"""The name of a daemon that is a Ray actor, and Ray itself, asked for when it is needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from isoexec.contracts.errors import IsoExecError

__all__ = ["RayError", "RayName", "joined", "ray"]

_NAME = re.compile(r"ray://([A-Za-z0-9_.-]{1,64})/([A-Za-z0-9_.-]{1,64})")


class RayError(IsoExecError):
    """A Ray address, package or cluster that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class RayName:
    """A named actor of a Ray cluster. Ray's own ``ray://HOST:PORT`` is another thing, and refused."""

    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str, where: str) -> RayName:
        """Read ``ray://NAMESPACE/NAME``. Raises RayError, `where` first."""
        found = _NAME.fullmatch(text)
        if found is None:
            raise RayError(
                f"{where}: wanted ray://NAMESPACE/NAME of the daemon's actor, each of letters, digits, '_', '.' and '-', "
                f"found {text!r}"
            )
        return cls(namespace=found[1], name=found[2])

    def __str__(self) -> str:
        return f"ray://{self.namespace}/{self.name}"


def ray() -> Any:
    """Give the module. Raises RayError naming the extra where it cannot be imported."""
    try:
        import ray as module
    except ImportError as error:
        raise RayError(
            f"a ray:// address needs the package ray ({error}): pip install 'isoexec[ray]'"
        ) from error
    return module


def joined(address: RayName) -> Any:
    """Give the module, where this process is part of a cluster: asked for anything, Ray would begin one of its own.

    Raises RayError.
    """
    module = ray()
    if not module.is_initialized():
        raise RayError(f"{address}: this process is not part of a Ray cluster; call ray.init first")
    return module
