# SPDX-License-Identifier: Apache-2.0
"""Writes the field tables of the specification pages from the types themselves: `python -m isoexec.contracts.specification`.

A page in `contracts/spec/` holds a table between `<!-- fields: TYPE -->` and `<!-- end -->`, and examples in fences marked
`yaml TYPE`, which are read as that type by a test. Nothing else of a page is touched.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

from isoexec.contracts import evidence, kinds, parts, routes, schema
from isoexec.contracts.canonical import encode
from isoexec.contracts.kinds import wire_fields

__all__ = ["PAGES", "SPEC", "TYPES", "examples", "main", "regenerated", "table"]

SPEC = Path(__file__).parent / "spec"
PAGES: dict[str, tuple[type, ...]] = {
    "contract-v1.md": (schema.Contract,),
    "model.md": (parts.Model,),
    "constraint.md": (parts.Constraint,),
    "case.md": (parts.Case,),
    "composition.md": (parts.Binding,),
    "provider.md": (parts.Provider,),
    "discharge.md": (parts.Discharge,),
    "claims.md": (parts.Claims,),
    "topology.md": (parts.AxisClaim,),
    "state.md": (parts.StateClaim,),
    "tolerance.md": (parts.Tolerance,),
    "environment.md": (parts.Environment, parts.VersionClaim),
    "identities.md": (),
    "canonical.md": (),
    "evidence.md": (
        parts.EvidencePolicy,
        evidence.EvidenceRecord,
        evidence.Subject,
        evidence.Check,
        evidence.Control,
    ),
}
"""The page that describes each type."""
TYPES: dict[str, type] = {cls.__name__: cls for classes in PAGES.values() for cls in classes}
_HOME = {cls: page for page, classes in PAGES.items() for cls in classes}
_TABLE = re.compile(r"(<!-- fields: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_ROUTES = re.compile(r"(<!-- routes -->\n).*?(<!-- end -->)", re.DOTALL)
_EXAMPLE = re.compile(r"^```yaml (\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def table(cls: type) -> str:
    """Return the Markdown table of a type's fields."""
    rows = ["| field | holds | when left out | meaning |", "|---|---|---|---|"]
    for name, _, kind, doc, default in wire_fields(cls):
        rows.append(f"| `{name}` | {_words(kind)} | {_default(default)} | {doc} |")
    return "\n".join(rows) + "\n"


def route_table() -> str:
    """Return the Markdown tables of the routes and of what comes of a failed region."""
    rows = ["| route | its bits | discharge | lowest enforcement |", "|---|---|---|---|"]
    for name, rule in routes.ROUTE_RULES.items():
        rows.append(f"| `{name}` | {rule.meaning} | {rule.discharge} | `{rule.least}`: {rule.why} |")
    modes = " | ".join(f"`{mode}`" for mode in routes.ENFORCEMENTS)
    rows += ["", f"| a failed region of route | {modes} |", "|---|" + "---|" * len(routes.ENFORCEMENTS)]
    for name in routes.ROUTE_RULES:
        cells = (routes.on_failure(name, mode) for mode in routes.ENFORCEMENTS)
        rows.append(f"| `{name}` | " + " | ".join(cells) + " |")
    rows += ["", "| outcome | meaning |", "|---|---|"]
    rows += [f"| {name} | {meaning} |" for name, meaning in routes.OUTCOMES.items()]
    return "\n".join(rows) + "\n"


def regenerated(text: str) -> str:
    """Return a page with its tables made anew; raises KeyError for a type that there is not."""
    text = _TABLE.sub(lambda found: found[1] + table(TYPES[found[2]]) + found[3], text)
    return _ROUTES.sub(lambda found: found[1] + route_table() + found[2], text)


def examples(text: str) -> list[tuple[type, str]]:
    """Return the examples of a page, each with the type it is of."""
    return [(TYPES[name], body) for name, body in _EXAMPLE.findall(text)]


def main() -> int:
    """Rewrite the pages whose tables are not those of the types."""
    for name in PAGES:
        path = SPEC / name
        before = path.read_text(encoding="utf-8")
        after = regenerated(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(path)
    return 0


def _words(kind: kinds.Kind) -> str:
    match kind:
        case kinds.Text(choices=choices) if choices:
            return ", ".join(f"`{one}`" for one in choices)
        case kinds.Text(what=what):
            return what
        case kinds.Int(minimum=minimum):
            return f"integer, at least {minimum}"
        case kinds.Scalar():
            return "integer, text or boolean"
        case kinds.Digest():
            return "`sha256:` and 64 hex digits"
        case kinds.Amount():
            return "quoted decimal, not negative"
        case kinds.Record(cls=cls, short=short):
            page = _HOME[cls]
            return f"[{cls.__name__}]({page})" + (f", or its `{short}` alone" if short else "")
        case kinds.ListOf(item=item, least=least, key=key):
            some = f", at least {least}" if least else ""
            by = f", one each `{'`, `'.join(key)}`" if key else ""
            return f"set of: {_words(item)}{some}{by}"
        case kinds.MapOf(item=item, keys=keys):
            names = ", ".join(f"`{key}`" for key in keys) if keys else "name"
            return f"map: {names} → {_words(item)}"
    raise TypeError(f"{type(kind).__name__} has no words")


def _default(default: object) -> str:
    if default is dataclasses.MISSING:
        return "refused"
    if default in (None, (), {}):
        return "nothing"
    if dataclasses.is_dataclass(default):
        return "its defaults"
    return f"`{encode(default).decode()}`".replace('"', "")


if __name__ == "__main__":
    sys.exit(main())
