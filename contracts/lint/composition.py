# SPDX-License-Identifier: Apache-2.0
"""Lint rules on the composition: who owns which operator in which case, under which names, and why that is believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from isoexec.contracts.digests import ZERO
from isoexec.contracts.lint import Found, rule
from isoexec.contracts.lint.tables import entry, required_ops
from isoexec.contracts.schema import Contract


def _bound(contract: Contract) -> list[str]:
    """Return the cases that any entry holds for; the others are IX014's."""
    named = {name for binding in contract.composition for name in binding.cases}
    return [case.name for case in contract.cases if case.name in named]


def _owners(contract: Contract, case: str) -> Counter[str]:
    return Counter(op for binding in contract.composition if case in binding.cases for op in binding.ops)


@rule("IX001")
def every_op_is_owned(contract: Contract) -> Iterator[Found]:
    """In every case every operator of the model is owned by a region.

    An operator nobody owns runs whatever kernel the runtime happens to choose, and its bits are nobody's promise.

    Breach: model.ops has final_norm, and no entry of the composition lists it in its ops.

    Fix: add the operator to the entry that computes it, in every case.
    """
    for case in _bound(contract):
        owners = _owners(contract, case)
        for op in required_ops(contract, case):
            if not owners[op]:
                yield (
                    f"cases[{case}]",
                    f"operator {op} is owned by no region",
                    f"add {op} to the ops of a composition entry that holds for {case}",
                )


@rule("IX002")
def no_op_is_owned_twice(contract: Contract) -> Iterator[Found]:
    """In no case is an operator owned by two composition entries.

    Two owners mean two schedules for one value; which of them ran would be an accident of installation order.

    Breach: the entries norm and attention both list q_norm for engine_decode.

    Fix: let one entry own the operator in each case.
    """
    for case in _bound(contract):
        for op, count in _owners(contract, case).items():
            if count > 1:
                regions = sorted(b.region for b in contract.composition if case in b.cases and op in b.ops)
                yield (
                    f"cases[{case}]",
                    f"operator {op} is owned {count} times, by {', '.join(regions)}",
                    "let one entry own it",
                )


@rule("IX003")
def regions_are_known(contract: Contract) -> Iterator[Found]:
    """A tolerance is blamed on regions that the composition has.

    Blame on a region that does not exist can never be checked, so the tolerance would excuse anything.

    Breach: a tolerance with regions: [attn], in a contract whose region is called attention.

    Fix: name a region of the composition.
    """
    for tolerance in contract.claims.tolerances:
        for region in tolerance.regions:
            if region not in contract.regions:
                yield (
                    f"claims.tolerances[{'+'.join(sorted(tolerance.cases))}].regions",
                    f"unknown region {region}",
                    f"use one of {', '.join(contract.regions)}",
                )


@rule("IX004")
def cases_are_known(contract: Contract) -> Iterator[Found]:
    """Every case named anywhere is one of `cases`.

    A misspelt case silently takes an entry, a tolerance or a bitwise claim away from the case it was meant for.

    Breach: claims.bitwise names trainer_forward, and the case is called trainer_fwd.

    Fix: mend the name, or add the case.
    """
    known = {case.name for case in contract.cases}
    named = [(f"{entry(contract, binding)}.cases", binding.cases) for binding in contract.composition]
    named += [("claims.bitwise", group) for group in contract.claims.bitwise]
    named += [
        (f"claims.tolerances[{'+'.join(sorted(one.cases))}].cases", one.cases)
        for one in contract.claims.tolerances
    ]
    for path, cases in named:
        for case in cases:
            if case not in known:
                yield path, f"unknown case {case}", f"use one of {', '.join(sorted(known))}, or add the case"


@rule("IX007")
def ops_are_known(contract: Contract) -> Iterator[Found]:
    """A region owns only operators that the model has in those cases.

    An operator outside the model is not computed in the case, so nothing could be installed or checked for it.

    Breach: an entry of engine_decode owns grad_norm, which only cases with gradients compute.

    Fix: mend the operator's name, add it to model.ops or model.step_ops, or take the case out of the entry.
    """
    known = {case.name: required_ops(contract, case.name) for case in contract.cases}
    for binding in contract.composition:
        for op in binding.ops:
            for case in binding.cases:
                if case in known and op not in known[case]:
                    yield (
                        entry(contract, binding),
                        f"operator {op} is none of the model's in case {case}",
                        "add it to model.ops or model.step_ops, or mend the name",
                    )


@rule("IX011")
def bindings_are_discharged(contract: Contract) -> Iterator[Found]:
    """Every entry of the composition names the evidence that its cases have the same bits.

    That prefill, decode and the trainer's forwards agree is what a contract promises; nobody having compared them, it is
    a hope. Such a region is listed as unproven by `isoexec contract show` and never installed.

    Breach: an entry with discharge: {kind: none}, or with an all-zero digest that was never filled in.

    Fix: run the function's gate and write the record's digest (isoexec gate run --pin FILE), or leave the region out.
    """
    for binding in contract.composition:
        if binding.discharge.kind != "evidence" or binding.discharge.evidence == ZERO:
            found = "an all-zero digest" if binding.discharge.kind == "evidence" else "no discharge"
            yield (
                f"{entry(contract, binding)}.discharge",
                f"{found}: that its cases give the same bits is unknown",
                "run its gate and name the record (isoexec gate run --pin FILE)",
            )


@rule("IX014")
def every_case_is_bound(contract: Contract) -> Iterator[Found]:
    """Every case is bound by the composition.

    A case that no entry names has no functions at all: its logprobs are whatever the runtime computes.

    Breach: cases lists trainer_score, and no entry of the composition holds for it.

    Fix: add the case to the entries that compute it, or drop it: a logprob path that is no case is refused.
    """
    for case in contract.cases:
        if not any(case.name in binding.cases for binding in contract.composition):
            yield (
                f"cases[{case.name}]",
                "no entry of the composition holds for it",
                "add it to the cases of the entries that compute it, or drop the case",
            )


@rule("IX061", "warning")
def step_ops_have_a_step(contract: Contract) -> Iterator[Found]:
    """Operators of the training step belong to a contract that has a case with gradients.

    Without such a case they are owned and computed by nobody, and the claim about them is empty.

    Breach: model.step_ops lists grad_norm, and every case has grad: no_grad.

    Fix: add the case that trains, or drop step_ops.
    """
    if contract.model.step_ops and all(case.grad == "no_grad" for case in contract.cases):
        yield (
            "model.step_ops",
            f"{', '.join(sorted(contract.model.step_ops))}: no case has gradients",
            "add the case that trains, or drop step_ops",
        )


@rule("IX066")
def the_trainer_alone_has_gradients(contract: Contract) -> Iterator[Found]:
    """A case with gradients is the trainer's.

    An engine computes logprobs and no step. A case that says otherwise asks for evidence of gradients that nobody will
    ever compute, and lets the step's operators into the engine.

    Breach: engine_decode with grad: grad.

    Fix: write grad: no_grad in every case of the engine.
    """
    for case in contract.cases:
        if case.role == "engine" and case.grad != "no_grad":
            yield f"cases[{case.name}].grad", f"is {case.grad}, in a case of the engine", "write no_grad"


@rule("IX067")
def a_region_has_one_entry_a_case(contract: Contract) -> Iterator[Found]:
    """In each case a region is one entry of the composition.

    Regions are installed, attested and blamed by name. With two entries in one case the name means two things, and a
    process that reports one of them reports half.

    Breach: two entries of region linear hold for engine_decode, one with o_proj and one with down_proj.

    Fix: put the operators into one entry, or give the second one a name of its own.
    """
    for case in _bound(contract):
        held = Counter(binding.region for binding in contract.composition if case in binding.cases)
        for region, count in sorted(held.items()):
            if count > 1:
                yield (
                    f"cases[{case}]",
                    f"region {region} is {count} entries",
                    "join them, or name one of them otherwise",
                )
