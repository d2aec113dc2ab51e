# SPDX-License-Identifier: Apache-2.0
"""Make the golden vectors: canonical bytes and digests of fixed values, and the identities of contract.yaml.

Run it as `python tests/contracts/vectors/make.py`. A change of the file it writes is a change of every digest.
"""

from __future__ import annotations

import json
from pathlib import Path

from isoexec.contracts.canonical import encode
from isoexec.contracts.digests import digest_of
from isoexec.contracts.schema import Contract

HERE = Path(__file__).parent
TARGET = HERE / "vectors.json"

VALUES: dict[str, object] = {
    "empty_map": {},
    "empty_list": [],
    "null": None,
    "booleans": [True, False],
    "integers": [0, -1, 2**63 - 1, -(2**63)],
    "keys_sort_by_code_point": {"b": 1, "a": 2, "B": 3, "é": 4, "10": 5, "9": 6},
    "text_is_utf8": 'quote " backslash \\ slash / newline \n tab \t nul \x00 euro € face 😀',
    "text_is_nfc": "e\u0301",
    "lists_keep_order": [3, 1, 2, [2, 1]],
    "nested": {"a": {"b": {"c": [{"d": "0.1"}]}}},
}


def vectors() -> str:
    """Return the text of vectors.json."""
    contract = Contract.load(HERE / "contract.yaml")
    made = {
        "values": {
            name: {"canonical": encode(value).decode(), "digest": digest_of(value)}
            for name, value in VALUES.items()
        },
        "contract": {
            "identities": contract.identities.to_dict(),
            "canonical": contract.to_dict(),
            "digest": digest_of(contract.to_dict()),
        },
    }
    return json.dumps(made, indent=1, ensure_ascii=True, sort_keys=True) + "\n"


if __name__ == "__main__":
    TARGET.write_text(vectors(), encoding="utf-8")
