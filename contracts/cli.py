# SPDX-License-Identifier: Apache-2.0
"""The console command `isoexec contract ...`; it returns its exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from isoexec.contracts.errors import ContractError
from isoexec.contracts.schema import Contract, json_schema, library

__all__ = ["run"]


def run(argv: list[str]) -> int:
    """Check, read, compare and pin contracts.

    Exit codes: 0 fine; 1 a finding, a disagreement or an unusable contract; 2 wrong usage, and for lint a file that is
    no contract.
    """
    parser = argparse.ArgumentParser(
        prog="isoexec contract", description="Check, read and compare contracts."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, words: str, act: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=words, description=words)
        sub.set_defaults(act=act)
        return sub

    where = "a contract file, or the name of a shipped contract"
    words = (
        "check what contracts mean, and their evidence; 1 when a rule is broken, 2 when a file is no contract"
    )
    sub = command("lint", words, _lint)
    sub.add_argument("files", nargs="+", metavar="file", help=where)
    sub.add_argument("--strict", action="store_true", help="let warnings fail too")
    sub.add_argument(
        "--evidence", action="append", type=Path, metavar="DIR",
        help="folder of records, instead of ISOEXEC_EVIDENCE and the shipped ones; may be repeated",
    )  # fmt: skip
    sub.add_argument("--at", metavar="TIME", help="judge expiry at a time such as 2026-01-31T12:00:00Z")
    _format(sub, "sarif")
    sub = command("show", "print what a contract promises, and what of it is unproven", _show)
    sub.add_argument("file", help=where)
    _format(sub)
    _format(command("list", "print the shipped contracts and how many of their regions are proven", _list))
    sub = command("for", "print the contract of a model; 1 when the runtime may not run under it", _for)
    sub.add_argument("model", metavar="MODEL_DIR", help="a model's folder, or its config.json")
    sub.add_argument("--runtime", required=True, choices=("megatron", "vllm"), help="what is to bind it")
    sub.add_argument("--arch", help="one arch; every one that has a contract, when absent")
    sub.add_argument("--contract", metavar="FILE", help="a contract of yours instead of the shipped ones")
    _format(sub)
    sub = command("digest", "print the three identities", _digest)
    sub.add_argument("file", help=where)
    _format(sub)
    sub = command("diff", "print the fields that differ; 1 when two runs with them may not meet", _diff)
    sub.add_argument("a", help=where)
    sub.add_argument("b", help=where)
    _format(sub)
    sub = command("explain", "print what a lint rule means; all rules, a line each, without an id", _explain)
    sub.add_argument("rule", nargs="?", default="", help="an id such as IX001")
    sub.add_argument(
        "--format", choices=("text", "markdown"), default="text", help="markdown: the page of all rules"
    )
    sub = command("path", "print where a shipped contract lies, for ISOEXEC_CONTRACT", _where)
    sub.add_argument("name", help="name of a shipped contract")
    sub = command("schema", "print the JSON Schema of a contract, or of an evidence record", _schema)
    sub.add_argument("--of", choices=("contract", "evidence"), default="contract", help="which format")
    sub = command("pin", "write the digests of sources and evidence into a contract file", _pin)
    sub.add_argument("file", type=Path, help="a contract file")
    pair = "FUNCTION=sha256:..."
    sub.add_argument(
        "--source",
        action="append",
        default=[],
        metavar=pair,
        help="the digest of a kernel's source; may be repeated",
    )
    sub.add_argument(
        "--evidence",
        action="append",
        default=[],
        metavar="FUNCTION[|PROVIDER]=sha256:...",
        help="the record that discharges a function's bindings and providers; may be repeated",
    )
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed why
        return stop.code if isinstance(stop.code, int) else 2
    act: Callable[[argparse.Namespace], int] = args.act
    return act(args)


def _format(parser: argparse.ArgumentParser, *more: str) -> None:
    parser.add_argument("--format", choices=("text", "json", *more), default="text", help="how to print it")


def _path(name: str) -> Path:
    path = Path(name)
    if path.exists() or os.sep in name or path.suffix in {".yaml", ".yml"}:
        return path
    return library(name)


def _load(name: str) -> Contract:
    return Contract.load(_path(name))


def _json(value: object) -> None:
    print(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False))


def _lint(args: argparse.Namespace) -> int:
    from isoexec.contracts.evidence import Store, default_store, moment
    from isoexec.contracts.lint.report import check, exit_code, render, unreadable

    try:
        now = moment(args.at) if args.at is not None else None
    except ValueError:
        print(
            f"isoexec contract lint: --at {args.at!r} is no time such as 2026-01-31T12:00:00Z",
            file=sys.stderr,
        )
        return 2
    store = Store(args.evidence) if args.evidence else default_store()
    reports = []
    for name in args.files:
        try:
            reports.append(check(_path(name), store=store, now=now))
        except ContractError as error:  # the name is neither a file's nor a shipped contract's
            reports.append(unreadable(name, error))
    print(render(reports, args.format))
    return exit_code(reports, strict=args.strict)


def _show(args: argparse.Namespace) -> int:
    from isoexec.contracts.cli_models import show

    return show(_load(args.file), args.format)


def _list(args: argparse.Namespace) -> int:
    from isoexec.contracts.cli_models import listing

    return listing(args.format)


def _for(args: argparse.Namespace) -> int:
    from isoexec.contracts.cli_models import find

    own = _path(args.contract) if args.contract else None
    return find(args.model, args.runtime, arch=args.arch, contract=own, how=args.format)


def _where(args: argparse.Namespace) -> int:
    print(library(args.name))
    return 0


def _digest(args: argparse.Namespace) -> int:
    identities = _load(args.file).identities
    if args.format == "json":
        _json(identities.to_dict())
    else:
        for name, digest in identities.to_dict().items():
            print(f"{name:<18} {digest}")
    return 0


def _diff(args: argparse.Namespace) -> int:
    from isoexec.contracts.diff import diff, render

    a, b = _load(args.a), _load(args.b)
    differences = diff(a, b)
    agree = a.identities.agrees_with(b.identities)
    if args.format == "json":
        sides = {
            "a": {"file": args.a, **a.identities.to_dict()},
            "b": {"file": args.b, **b.identities.to_dict()},
        }
        _json({"agree": agree, **sides, "differences": [one.to_dict() for one in differences]})
    else:
        print(f"a: {args.a} ({a.name})\nb: {args.b} ({b.name})\n{render(differences)}")
        print("two runs with them " + ("may meet" if agree else "may not meet"))
    return 0 if agree else 1


def _explain(args: argparse.Namespace) -> int:
    from isoexec.contracts.lint import explain
    from isoexec.contracts.lint.report import rules_page

    if args.format == "markdown":
        print(rules_page(), end="")
    else:
        print(explain(args.rule))
    return 0


def _schema(args: argparse.Namespace) -> int:
    _json(json_schema(args.of))
    return 0


def _pin(args: argparse.Namespace) -> int:
    from isoexec.contracts.pinning import pin

    pairs: dict[str, dict[str, str]] = {"source": {}, "evidence": {}}
    for option, found in pairs.items():
        for pair in getattr(args, option):
            name, equals, digest = pair.partition("=")
            if not equals or name in found:
                print(
                    f"isoexec contract pin: wanted each --{option} NAME=sha256:... once, found {pair!r}",
                    file=sys.stderr,
                )
                return 2
            found[name] = digest
    if not pairs["source"] and not pairs["evidence"]:
        print("isoexec contract pin: give --source or --evidence", file=sys.stderr)
        return 2
    if not args.file.exists():
        raise ContractError("is not there", path=str(args.file), fix="give the path of a contract file")
    changed = pin(args.file, pairs["source"], pairs["evidence"])
    print(
        f"{args.file}: digests of {len(changed)} functions changed" + "".join(f"\n  {one}" for one in changed)
    )
    return 0
