# SPDX-License-Identifier: Apache-2.0
"""The console command `isoexec provider ...`: what may compute a function, and the proof that its bits are the function's."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isoexec.contracts.errors import IsoExecError
from isoexec.contracts.evidence import EvidenceRecord, Store, default_store
from isoexec.kernels.registry import ARCHS

if TYPE_CHECKING:
    from isoexec.kernels.providers.catalogue import Provider

__all__ = ["run"]

_EXIT = """
exit codes:
  0  list, show: printed; certify: every provider asked for is certified, and its record written
  1  certify: a bit differs, a control passed, or the provider cannot run here; show: no such provider
  2  wrong usage
"""


def run(argv: Sequence[str]) -> int:
    """List what may compute the functions, and certify it."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="isoexec provider", description=run.__doc__, epilog=_EXIT, formatter_class=shape
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, words: str, act: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=words, description=words, epilog=_EXIT, formatter_class=shape)
        sub.set_defaults(act=act)
        sub.add_argument("--function", metavar="NAME", help="only of this function")
        sub.add_argument("--arch", choices=ARCHS, help="only of this arch")
        sub.add_argument("--store", type=Path, metavar="DIR", help="evidence lies in this folder alone")
        return sub

    sub = command("list", "print every provider, and which of them have evidence here", _list)
    sub.add_argument("--format", choices=("text", "json"), default="text")
    sub = command("show", "print a provider, its identity here, and its evidence", _show)
    sub.add_argument("name", help="name of a provider")
    sub = command("certify", "compare a provider with its function and write the record", _certify)
    sub.add_argument("name", help="name of a provider")
    sub.add_argument("--quick", action="store_true", help="smaller shapes; the record says that it is quick")
    sub.add_argument(
        "--contract",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="prove the constants of this contract too; may be repeated",
    )
    sub.add_argument("--valid-days", type=int, default=365, metavar="N", help="days until it expires (365)")
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed why
        return stop.code if isinstance(stop.code, int) else 2
    act: Callable[[argparse.Namespace], int] = args.act
    return act(args)


def _open(args: argparse.Namespace) -> Store:
    return Store([args.store]) if args.store else default_store()


def _identity(provider: Provider) -> tuple[str, str]:
    """(identity, why it cannot be told) of a provider here."""
    try:
        subject = provider.subject()
    except (ImportError, OSError, IsoExecError) as error:
        return "", f"not here: {error}"
    return subject.source or subject.version or "", ""


def _evidence(store: Store, function: str, provider: str, arch: str, identity: str) -> EvidenceRecord | None:
    found = store.find(function=function, provider=provider, arch=arch)
    return next((r for r in found if (r.provider.source or r.provider.version) == identity), None)


def _list(args: argparse.Namespace) -> int:
    from isoexec.kernels.providers.catalogue import providers

    store, rows = _open(args), []
    for one in providers(arch=args.arch, function=args.function):
        identity, why = _identity(one)
        record = _evidence(store, one.function, one.name, one.arch, identity) if identity else None
        rows.append(
            {
                "function": one.function,
                "arch": one.arch,
                "provider": one.name,
                "kind": one.kind,
                "identity": identity or why,
                "evidence": record.digest if record else None,
            }
        )
    if args.format == "json":
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        evidence = str(row["evidence"] or "none")
        identity = str(row["identity"])
        print(
            f"{row['function']:<28} {row['arch']:<5} {row['kind']:<8} {row['provider']:<32} "
            f"{identity.removeprefix('sha256:')[:44]:<45} {evidence.removeprefix('sha256:')[:12]}"
        )
    return 0


def _named(args: argparse.Namespace) -> list[Provider]:
    from isoexec.kernels.providers.catalogue import providers

    found = providers(arch=args.arch, function=args.function, name=args.name)
    if not found:
        names = sorted({one.name for one in providers(arch=args.arch, function=args.function)})
        print(f"isoexec provider: no provider {args.name!r}; there are {', '.join(names)}", file=sys.stderr)
    return found


def _show(args: argparse.Namespace) -> int:
    store, found = _open(args), _named(args)
    for one in found:
        identity, why = _identity(one)
        print(f"{one.name} of {one.function} on {one.arch}: {one.about}")
        print(f"  kind      {one.kind}")
        print(f"  identity  {identity or why}")
        for name, value in sorted(one.settings.items()):
            print(f"  setting   {name} = {value}")
        records = store.find(function=one.function, provider=one.name, arch=one.arch)
        for record in records:
            current = (record.provider.source or record.provider.version) == identity
            print(
                f"  evidence  {record.digest} {record.profile}, made {record.made}, {record.elements:,} elements, "
                f"torch {record.environment['torch']}{'' if current else ' (of another build)'}"
            )
        if not records:
            print("  evidence  none here")
    return 0 if found else 1


def _certify(args: argparse.Namespace) -> int:
    from isoexec.contracts.schema import Contract
    from isoexec.kernels.providers.certify import certify, constants_for

    store, found, failed = _open(args), _named(args), 0
    contracts = [Contract.load(path) for path in args.contract]
    for one in found:
        try:
            sets = constants_for(one.function, one.arch, contracts)
            record = certify(one, sets, full=not args.quick, valid_days=args.valid_days)
        except IsoExecError as error:
            print(f"isoexec provider: {error}", file=sys.stderr)
            failed += 1
            continue
        for check in record.checks:
            controls = ", ".join(f"{c.name} {c.differing:,} of {c.elements:,}" for c in check.controls)
            words = ", ".join(f"{n} {v}" for n, v in sorted(check.constants.items())) or "no constants"
            print(f"  {check.family}, {words}: {check.elements:,} elements, 0 differ; controls: {controls}")
        print(f"{one.name} has the bits of {one.function} on {one.arch}: {store.write(record)}")
    return 0 if found and not failed else 1
