# SPDX-License-Identifier: Apache-2.0
"""Make the golden vectors: canonical bytes and digests of fixed values, contracts and an evidence record.

Run it as `python tests/contracts/vectors/make.py`. A change of the file it writes is a change of every digest.
"""

from __future__ import annotations

import json
from pathlib import Path

from isoexec.contracts.canonical import encode
from isoexec.contracts.digests import digest_bytes, digest_of
from isoexec.contracts.evidence import EvidenceRecord
from isoexec.contracts.kinds import Amount, read_record
from isoexec.contracts.loading import Place, parse
from isoexec.contracts.schema import Contract

HERE = Path(__file__).parent
TARGET = HERE / "vectors.json"

VALUES: dict[str, object] = {
    "empty_map": {},
    "empty_list": [],
    "null": None,
    "booleans": [True, False],
    "integers": [0, -1, 2**63 - 1, -(2**63)],
    "integers_and_booleans_are_not_one": {"a": 1, "b": True, "c": "1", "d": "true"},
    "keys_sort_by_code_point": {"b": 1, "a": 2, "B": 3, "é": 4, "10": 5, "9": 6},
    "keys_sort_by_code_point_not_utf16": {
        "\uff21": 1,
        "\U0001f600": 2,
        "\u20ac": 3,
        "\r": 4,
        "1": 5,
        "\x80": 6,
    },
    "text_is_utf8": 'quote " backslash \\ slash / newline \n tab \t nul \x00 euro € face 😀',
    "text_of_controls": "".join(map(chr, range(0x20))) + "\x7f\x80\u2028\u2029\ufeff",
    "text_is_nfc": "e\u0301",
    "text_is_nfc_hangul": "\u1112\u1161\u11ab",
    "text_is_not_nfkc": "\ufb01 \u00b2",
    "lists_keep_order": [3, 1, 2, [2, 1]],
    "nested": {"a": {"b": {"c": [{"d": "0.1"}]}}},
}
DECIMALS = (
    "0", "0.0", "0e9", "000", "1", "01", "1.0", "10", "1e1", "100", "1E2", "0.001", "1e-3", "10e-4", "0.0010", "1e-7",
    "0.0000001", "123.4500", "1e308", "5e-324", "0.1", "0.10000000000000000555",
)  # fmt: skip
SCALARS = (
    "1", "-1", "0", "-0", "9223372036854775807", "-9223372036854775808", "true", "false", "True", '"1"', "'true'", "null",
    "~", '""', "é", '"e\\u0301"', "2026", "1.2.3", "13.0.1.2 build 7", "sha256:00", "0.5", "1e3", "0x10", "010", "1_000",
    "yes", "2026-01-01", "12:30:45", "9223372036854775808", ".inf", "+1", "=", "<<",
)  # fmt: skip


def scalar(text: str) -> dict[str, object]:
    """Return what the loader makes of an unquoted or quoted scalar: its value, or why it is refused."""
    try:
        value = parse(f"a: {text}\n").value
    except Exception as error:  # noqa: BLE001  whatever is refused is a vector
        return {"refused": str(error)}
    return {"value": value["a"]} if isinstance(value, dict) else {"refused": "no mapping"}


def contract(path: Path) -> dict[str, object]:
    """Return the digests of a contract, and the canonical bytes that each identity is made of."""
    made = Contract.load(path)
    sections = made.identities.sections
    return {
        "identities": made.identities.to_dict(),
        "sections": {name: encode(section).decode() for name, section in sections.items()},
        "digest": digest_of(made.to_dict()),
    }


def record() -> dict[str, object]:
    """Return the canonical bytes and the digest, that is the name, of the evidence record in evidence.yaml."""
    document = parse((HERE / "evidence.yaml").read_text(encoding="utf-8"))
    made: EvidenceRecord = read_record(EvidenceRecord, document.value, Place())
    return {"canonical": made.to_bytes().decode(), "digest": made.digest}


def vectors() -> str:
    """Return the text of vectors.json."""
    made = {
        "values": {
            name: {"canonical": encode(value).decode(), "digest": digest_of(value)}
            for name, value in VALUES.items()
        },
        "bytes": {text: digest_bytes(text.encode()) for text in ("", "abc", "é")},
        "decimals": {text: Amount().read(text, Place()) for text in DECIMALS},
        "scalars": {text: scalar(text) for text in SCALARS},
        "contracts": {name: contract(HERE / f"{name}.yaml") for name in ("contract", "full")},
        "evidence": record(),
    }
    return json.dumps(made, indent=1, ensure_ascii=True, sort_keys=True) + "\n"


if __name__ == "__main__":
    TARGET.write_text(vectors(), encoding="utf-8")
