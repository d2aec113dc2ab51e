# SPDX-License-Identifier: Apache-2.0
"""Divides a contract into three identities, so that each field belongs to exactly one of them.

semantic           which logical model: schema_version, model
numerical_policy   everything that can change a bit or what is claimed of it: all the rest
deployment         proven not to change bits: name, deployment
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isoexec.contracts.digests import digest_of

__all__ = ["IDENTITIES", "Identities", "identities_of", "identity_of_field"]

IDENTITIES = ("semantic", "numerical_policy", "deployment")

_SEMANTIC = frozenset({"schema_version", "model"})
_DEPLOYMENT = frozenset({"name", "deployment"})


@dataclass(frozen=True, kw_only=True)
class Identities:
    """Three digests, and under `sections` the canonical dicts they were made of, by identity."""

    semantic: str
    numerical_policy: str
    deployment: str
    sections: Mapping[str, Mapping[str, object]]

    def agrees_with(self, other: Identities) -> bool:
        """Say whether two processes may run together: same model and same policy; deployments may differ."""
        return (self.semantic, self.numerical_policy) == (other.semantic, other.numerical_policy)

    def to_dict(self) -> dict[str, str]:
        """Return the three digests by name, as they go over the wire."""
        return {name: str(getattr(self, name)) for name in IDENTITIES}


def identity_of_field(field: str) -> str:
    """Return the identity a top-level field belongs to; an unknown one may change bits."""
    if field in _SEMANTIC:
        return "semantic"
    return "deployment" if field in _DEPLOYMENT else "numerical_policy"


def identities_of(canonical: Mapping[str, object]) -> Identities:
    """Make the identities of a canonical contract dict (`Contract.to_dict()`, or one from the wire)."""
    sections: dict[str, dict[str, object]] = {name: {} for name in IDENTITIES}
    for field, value in canonical.items():
        sections[identity_of_field(field)][field] = value
    digests = {name: digest_of(section) for name, section in sections.items()}
    return Identities(**digests, sections=sections)
