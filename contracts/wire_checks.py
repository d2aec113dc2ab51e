# SPDX-License-Identifier: Apache-2.0
"""What a field of a message may hold: checks of values as msgpack gives them, and fields that name theirs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field
from typing import Any

__all__ = [
    "Check",
    "array",
    "checked",
    "count",
    "difference",
    "flag",
    "integer",
    "long_text",
    "mapping",
    "number",
    "one_of",
    "optional",
    "plain",
    "seconds",
    "sequence",
    "text",
    "words",
]

_U64 = 1 << 64
_NAME_LIMIT = 512
_NESTING_LIMIT = 32

Check = Callable[[Any], bool]
"""Whether a value may be there."""


def text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _NAME_LIMIT


def long_text(value: Any) -> bool:
    return isinstance(value, str)


def integer(value: Any) -> bool:
    # what a float and a JSON reader hold exactly
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 53) <= value <= 1 << 53


def count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _U64


def flag(value: Any) -> bool:
    return isinstance(value, bool)


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def seconds(value: Any) -> bool:
    return number(value) and math.isfinite(value)


def mapping(of: Check) -> Check:
    return lambda value: (
        isinstance(value, dict) and all(text(name) and of(item) for name, item in value.items())
    )


def sequence(of: Check) -> Check:
    return lambda value: isinstance(value, list | tuple) and all(of(item) for item in value)


def optional(of: Check) -> Check:
    return lambda value: value is None or of(value)


def one_of(*names: str) -> Check:
    return lambda value: value in names


def plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is made of what JSON has, nested no deeper than a contract needs."""
    if depth > _NESTING_LIMIT:
        return False
    if value is None or isinstance(value, str | int | float | bool):
        return True
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item, depth + 1) for key, item in value.items())
    return isinstance(value, list | tuple) and all(plain(item, depth + 1) for item in value)


def words(value: Any) -> bool:
    return sequence(count)(value) and len(value) == 2


def difference(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and long_text(value[0]) and plain(value[1:])


def checked(check: Check, wanted: str, **kwargs: Any) -> Any:
    return field(metadata={"check": check, "wanted": wanted}, **kwargs)


def array(dtype: str, dims: int, **kwargs: Any) -> Any:
    return field(metadata={"dtype": dtype, "dims": dims}, repr=False, **kwargs)
