# SPDX-License-Identifier: Apache-2.0
"""One byte string for one value: JSON with sorted keys, no whitespace, no floats, NFC text, 64-bit integers.

Sets (cases, domains, providers) are put in order by whoever makes the dict; lists keep their order here.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping

from isoexec.contracts.errors import ContractError

__all__ = ["encode", "normal"]

_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1
_DEPTH = 64
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def normal(obj: object, field: str = "") -> object:
    """Return `obj` as plain dicts, lists, NFC strings, ints, bools and None; refuse the rest by `field`."""
    return _normal(obj, field, 0)


def encode(obj: object) -> bytes:
    """Return the canonical UTF-8 bytes; raises ContractError for floats, wide integers and other types."""
    return _ENCODER.encode(normal(obj)).encode("utf-8")


def _normal(obj: object, field: str, depth: int) -> object:
    if depth > _DEPTH:
        raise ContractError(f"nested deeper than {_DEPTH}", field=field, fix="flatten it")
    if obj is None or isinstance(obj, bool):
        return obj
    if isinstance(obj, int):
        if not _INT_MIN <= obj <= _INT_MAX:
            raise ContractError(f"{obj} does not fit 64 bits", field=field, fix="write it as a string")
        return int(obj)
    if isinstance(obj, str):
        return _text(obj, field)
    if isinstance(obj, float):
        raise ContractError(
            f"raw float {obj!r}", field=field, fix='quote decimals ("1e-6") or give the bit pattern'
        )
    if isinstance(obj, Mapping):
        return _mapping(obj, field, depth)
    if isinstance(obj, (list, tuple)):
        return [_normal(item, f"{field}[{index}]", depth + 1) for index, item in enumerate(obj)]
    raise ContractError(
        f"{type(obj).__name__} has no canonical form",
        field=field,
        fix="use mappings, lists, strings, integers, booleans or null",
    )


def _mapping(obj: Mapping[object, object], field: str, depth: int) -> dict[str, object]:
    out: dict[str, object] = {}
    for key, value in obj.items():
        if not isinstance(key, str):
            raise ContractError(f"key {key!r} is not a string", field=field, fix="quote it")
        name = _text(key, field)
        if name in out:
            raise ContractError(f"key {name!r} appears twice after normalisation", field=field)
        out[name] = _normal(value, f"{field}.{name}" if field else name, depth + 1)
    return out


def _text(text: str, field: str) -> str:
    if text.isascii():
        return str(text)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ContractError(f"{text!r} is not valid Unicode", field=field) from error
    return unicodedata.normalize("NFC", text)
