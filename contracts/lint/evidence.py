# SPDX-License-Identifier: Apache-2.0
"""Lint rules on evidence, in words; what they find is what `isoexec.contracts.discharge` refuses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from isoexec.contracts.lint import RULES, Finding, words

if TYPE_CHECKING:
    from isoexec.contracts.discharge import Live
    from isoexec.contracts.evidence import Store
    from isoexec.contracts.schema import Contract

__all__ = ["judged"]

words(
    "IX040",
    """The record a discharge names is in the store, whole and unedited.

    A record is named by the SHA-256 of its bytes. One that is missing, unreadable or changed by a byte is no evidence of
    anything.

    Breach: evidence: sha256:... of a record that no folder of the store holds.

    Fix: run the gate (isoexec gate run), or put the folder that holds the record into ISOEXEC_EVIDENCE.
    """,
)
words(
    "IX041",
    """The record is of what the contract admits: the function, the provider, its source or version, its settings.

    A gate's result belongs to the source that ran. Another source, another build or another setting may round elsewhere.

    Breach: a kernel's source was changed and pinned anew, and the discharge still names the record of the old source.

    Fix: run the gate of this provider (isoexec gate run --pin FILE).
    """,
)
words(
    "IX042",
    """The record was made on the contract's arch.

    Bits proven on one arch say nothing about another.

    Breach: arch: sm90, and a record made on cpu.

    Fix: run the gate on the arch.
    """,
)
words(
    "IX043",
    """The record is in force: made, not yet expired, and no older than claims.evidence.max_age_days.

    Drivers, libraries and machines change under a proof. A record made in the future was made by a clock nobody can trust.

    Breach: a record with expires: 2026-01-01T00:00:00Z, linted in February.

    Fix: run the gate again, or set the clock right.
    """,
)
words(
    "IX044",
    """The record holds every family of checks that the binding needs, under the binding's constants.

    A chain of K blocks of 64 proves nothing of blocks of 128, and conformance proves nothing of batch invariance.

    Breach: an entry with kv_segment 64, discharged by a record whose checks ran with kv_segment 32.

    Fix: run the gate with these constants (isoexec gate run --contract FILE).
    """,
)
words(
    "IX045",
    """The record's partition check covers every claimed degree of every axis that cuts the region's sums.

    A degree is claimed because it was compared with degree 1, in real process groups; otherwise it is a hope.

    Breach: TP {invariant: [1, 2, 4]}, with a record whose partition_invariance covers TP 1 and 2.

    Fix: run the gate at all claimed degrees, or claim fewer.
    """,
)
words(
    "IX046",
    """The record's checks cover every claimed dtype, and its parity check every case of the entry.

    A kernel takes another path for another dtype, and prefill and decode are two paths by nature.

    Breach: dtypes: [bfloat16, float32], with a record that compared bfloat16 alone.

    Fix: run the gate over the whole domain, or claim less.
    """,
)
words(
    "IX047",
    """Every check of the record holds: elements were compared, none differs, and each planted fault was seen.

    A check whose control passes cannot fail, so that it did not fail says nothing.

    Breach: a check with 0 elements, with differing elements, without controls, or with a control that passed.

    Fix: mend the kernel or the gate, and run it again.
    """,
)
words(
    "IX048",
    """The record is of a full run.

    A quick run covers fewer shapes and is meant for work in progress.

    Breach: a record with profile: quick.

    Fix: run the gate without --quick.
    """,
    severity="warning",
)
words(
    "IX049",
    """Where the contract demands signers, one of them has signed the record.

    Whoever can write to the store can write a record. A signature says who stands for it.

    Breach: claims.evidence.signers names a key, and no good signature of it lies beside the record.

    Fix: sign the record (isoexec gate sign) with an admitted key.
    """,
)
words(
    "IX050",
    """The process runs the versions its evidence was made under.

    Checked in a process, by adapters and `isoexec gate verify`: a file alone cannot break it.

    Breach: a record made under torch 2.12, in a process that runs torch 2.13.

    Fix: run the gates here, or install what the evidence is of.
    """,
)

_STATED = ("IX009", "IX011")
"""A discharge that names no record: the contract alone says so, whatever the store holds."""


def judged(
    contract: Contract, store: Store, now: float | None = None, live: Live | None = None
) -> list[Finding]:
    """Return what keeps the contract's evidence from discharging it, at Unix time `now` or the clock's."""
    from isoexec.contracts.discharge import refusals

    at = time.time() if now is None else now
    return [
        Finding(
            rule=one.rule,
            severity=one.severity if one.rule not in RULES else RULES[one.rule].severity,
            path=f"{one.path}.discharge",
            message=f"{one.name}: wanted {one.wanted}, found {one.found}",
            fix=one.fix,
        )
        for one in refusals(contract, store, now=at, live=live)
        if one.rule not in _STATED
    ]
