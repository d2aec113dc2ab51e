# SPDX-License-Identifier: Apache-2.0
"""Lint rules on what cases claimed bitwise, or within a tolerance, have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

from isoexec.contracts.composites import COMPOSITES, apart
from isoexec.contracts.lint import Found, rule
from isoexec.contracts.lint.tables import entry
from isoexec.contracts.parts import Binding, Tolerance
from isoexec.contracts.schema import Contract


def _at(tolerance: Tolerance) -> str:
    return f"claims.tolerances[{'+'.join(sorted(tolerance.cases))}]"


def _schedule(binding: Binding) -> tuple[str, tuple[str, ...]]:
    return binding.function, tuple(sorted(map(repr, binding.constants.items())))


def _owners(contract: Contract, op: str, group: Sequence[str]) -> list[Binding]:
    """Return the entries, fused ones taken apart, that own an operator in a group's cases; none where a case has two (IX002)."""
    entries = [part for one in contract.composition for part in apart(one)]
    owners = [b for b in entries if op in b.ops and set(group) & set(b.cases)]
    twice = any(sum(case in b.cases for b in owners) > 1 for case in group)
    return [] if twice else owners


@rule("IX008")
def one_schedule_in_a_group(contract: Contract) -> Iterator[Found]:
    """Cases claimed bitwise bind every operator to one function with one set of constants.

    A function is an exact rounding schedule: two of them, or two sets of constants, are two different bits. What may
    differ between engine and trainer is the provider, each with evidence that its bits are the function's. A function
    that is defined as others one after the other (contracts/composites.py) counts as those.

    Breach: the engine's entry of attention has kv_segment 32, the trainer's 64, and the two cases are claimed bitwise.

    Fix: bind one function with one set of constants, admit another provider of it, or claim a tolerance.
    """
    for group in contract.claims.bitwise:
        for op in contract.model.ops:
            owners = _owners(contract, op, group)
            if len({_schedule(one) for one in owners}) > 1:
                names = ", ".join(sorted({f"{one.region} ({one.function})" for one in owners}))
                yield (
                    entry(contract, owners[-1]),
                    f"cases claimed bitwise compute {op} by different functions or constants: {names}",
                    "bind one function with one set of constants, or claim a tolerance",
                )


@rule("IX010")
def regions_are_cut_alike(contract: Contract) -> Iterator[Found]:
    """Cases claimed bitwise cut the model into the same regions, or one record discharges the entries that differ.

    Where a region ends a value is rounded. A region that fuses two operators in one case and not in another may round in
    other places, though the function's name is the same. One record whose parity check covers all their cases shows
    that it does not. A function that is defined as others one after the other rounds between them as they do.

    Breach: the engine owns residual_add and input_norm in one region norm, the trainer in two, each with its own record.

    Fix: give each operator the same region and companions in all cases of the group, or discharge the entries by one
    record.
    """
    for group in contract.claims.bitwise:
        for op in contract.model.ops:
            owners = _owners(contract, op, group)
            cuts = {(one.region, tuple(sorted(one.ops))) for one in owners if one in contract.composition}
            proofs = {one.discharge.evidence for one in owners if one.discharge.kind == "evidence"}
            proven = len(proofs) == 1 and all(one.discharge.kind == "evidence" for one in owners)
            if len(cuts) > 1 and len({_schedule(one) for one in owners}) == 1 and not proven:
                names = ", ".join(f"{region} [{', '.join(ops)}]" for region, ops in sorted(cuts))
                yield (
                    entry(contract, owners[-1]),
                    f"cases claimed bitwise own {op} in regions that are cut differently: {names}",
                    "cut the regions alike, or discharge the entries by one record",
                )


@rule("IX069")
def a_fused_entry_owns_what_it_fuses(contract: Contract) -> Iterator[Found]:
    """An entry whose function is others one after the other owns the operators of those, each one and no other.

    Such a function has the bits of its parts because nothing stands between them. With another operator in the entry, or
    one of its own left to another entry, something does.

    Breach: linear_logprobs.mma_blocks/1 is bound to token_logprob, and lm_head has an entry of its own.

    Fix: give the entry the operators of its parts, or bind the parts.
    """
    for binding in contract.composition:
        wanted = [stage.op for stage in COMPOSITES.get(binding.function, ())]
        if wanted and sorted(wanted) != sorted(binding.ops):
            yield (
                f"{entry(contract, binding)}.ops",
                f"{binding.function} computes {', '.join(wanted)}, and the entry owns {', '.join(binding.ops)}",
                "own those, or bind the functions it is made of",
            )


@rule("IX015", "warning")
def one_version_of_a_function(contract: Contract) -> Iterator[Found]:
    """Cases claimed bitwise use one version of a function.

    Two versions of a function in one promise are most often half an upgrade. Where they meet in one operator IX008
    refuses them.

    Breach: o_proj is bound to linear.chain/1 and lm_head to linear.chain/2, in the same bitwise group.

    Fix: bind the same version everywhere.
    """
    for group in contract.claims.bitwise:
        versions: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for binding in contract.composition:
            if set(group) & set(binding.cases):
                name, _, version = binding.function.partition("/")
                versions[name][version] |= set(binding.ops)
        for name, ops in sorted(versions.items()):
            if any(not ops[a] & ops[b] for a, b in combinations(sorted(ops), 2)):
                yield (
                    "composition",
                    f"{name} is bound in versions {', '.join(sorted(ops))} within one bitwise group",
                    "bind one version everywhere",
                )


@rule("IX030")
def no_tolerance_on_bitwise(contract: Contract) -> Iterator[Found]:
    """Two cases claimed bitwise have no tolerance.

    A tolerance beside a bitwise claim takes the claim back without saying so.

    Breach: engine_decode and trainer_fwd are in one group of claims.bitwise, and in a tolerance too.

    Fix: drop the tolerance, or take the pair out of claims.bitwise.
    """
    for tolerance in contract.claims.tolerances:
        for group in contract.claims.bitwise:
            if set(tolerance.cases) <= set(group):
                yield (
                    _at(tolerance),
                    "the pair is claimed bitwise and has a tolerance",
                    "drop the tolerance, or take the pair out of claims.bitwise",
                )


@rule("IX031")
def a_tolerance_blames(contract: Contract) -> Iterator[Found]:
    """Every tolerance is blamed on at least one region.

    A mismatch that no region explains is a fault to find, not an allowance to give.

    Breach: a tolerance with regions: [].

    Fix: name the regions whose arithmetic differs between the two cases.
    """
    for tolerance in contract.claims.tolerances:
        if not tolerance.regions:
            yield (
                _at(tolerance),
                "blames no region",
                "name the regions whose functions differ between the two cases",
            )


@rule("IX032", "warning")
def every_pair_is_claimed(contract: Contract) -> Iterator[Found]:
    """Each pair of an engine case and a trainer case is claimed bitwise or has a tolerance.

    A pair that the contract says nothing about can be measured and never judged.

    Breach: trainer_score is in no group of claims.bitwise and in no tolerance.

    Fix: add the pair to claims.bitwise or to claims.tolerances.
    """
    claimed = [set(group) for group in contract.claims.bitwise]
    claimed += [set(tolerance.cases) for tolerance in contract.claims.tolerances]
    for one, other in combinations(sorted(contract.cases, key=lambda case: case.name), 2):
        if one.role != other.role and not any({one.name, other.name} <= group for group in claimed):
            yield (
                "claims",
                f"nothing is claimed of {one.name} and {other.name}",
                "add the pair to claims.bitwise or to claims.tolerances",
            )


@rule("IX036")
def blame_lies_within_the_pair(contract: Contract) -> Iterator[Found]:
    """The regions a tolerance is blamed on are bound in one of its two cases.

    A region that neither case computes cannot be why they differ, and the mismatch would be excused by it all the same.

    Breach: a tolerance between engine_decode and trainer_score, blamed on grad_norm, which only trainer_fwd computes.

    Fix: blame the region that differs between the two cases.
    """
    for tolerance in contract.claims.tolerances:
        for region in tolerance.regions:
            bound = {case for b in contract.composition if b.region == region for case in b.cases}
            if bound and not bound & set(tolerance.cases):
                yield (
                    f"{_at(tolerance)}.regions",
                    f"{region} is bound in neither case",
                    "blame a region that one of the two cases computes",
                )


@rule("IX037", "warning")
def a_tolerance_tolerates(contract: Contract) -> Iterator[Found]:
    """A tolerance admits something: its bound is not zero.

    A bound of zero nats is the bitwise claim in other words, and is judged on the printed number instead of the bits.

    Breach: a tolerance with bound: "0".

    Fix: put the two cases into a group of claims.bitwise.
    """
    for tolerance in contract.claims.tolerances:
        if float(tolerance.bound) == 0:
            yield f"{_at(tolerance)}.bound", "is zero", "claim the pair in claims.bitwise"


@rule("IX038", "warning")
def both_sides_are_there(contract: Contract) -> Iterator[Found]:
    """A contract has cases of the engine and of the trainer.

    With one side alone there is no pair to agree, and nothing that the run could be held to.

    Breach: every case has role: engine.

    Fix: add the cases of the other side.
    """
    for role in ("engine", "trainer"):
        if not contract.cases_of(role):
            yield "cases", f"none is of the {role}", f"add the cases of the {role}"
