# SPDX-License-Identifier: Apache-2.0
"""How a test exchanges something behind the adapter's back, and takes it back; tests load this file by its path."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Undo", "done", "put"]

Undo = Callable[[], object]
_MISSING = object()


def put(owner: Any, name: str, value: Any) -> Undo:
    """Set an attribute where it lies, past any ``__setattr__``; returns what takes it back."""
    own = vars(owner)
    before = own.get(name, _MISSING)
    if isinstance(owner, type):  # its own are a read-only view
        setattr(owner, name, value)
    else:
        own[name] = value

    def undo() -> None:
        if before is not _MISSING and isinstance(owner, type):
            setattr(owner, name, before)
        elif before is not _MISSING:
            own[name] = before
        elif isinstance(owner, type):
            delattr(owner, name)
        else:
            del own[name]

    return undo


@contextlib.contextmanager
def done(work: Callable[[Any], Undo], model: Any) -> Iterator[None]:
    """For the length of a block, what `work` does to a model."""
    undo = work(model)
    try:
        yield
    finally:
        undo()
