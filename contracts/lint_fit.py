# SPDX-License-Identifier: Apache-2.0
"""Lint rules from IX020: whether claims and constants fit the model, the topology and each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

from isoexec.contracts.lint import Found, rule
from isoexec.contracts.parts import AXES, ROLES, Binding, Value
from isoexec.contracts.schema import Contract

# what a linear's operators sum over, and what their gradient sums over; "/TP" is sharded by tensor parallelism
_SUMS: dict[str, tuple[tuple[str, bool], tuple[str, bool]]] = {
    "qkv_proj": (("hidden_size", False), ("qkv_width", True)),
    "gate_up_proj": (("hidden_size", False), ("intermediate_size", True)),
    "o_proj": (("q_width", True), ("hidden_size", False)),
    "down_proj": (("intermediate_size", True), ("hidden_size", False)),
    "lm_head": (("hidden_size", False), ("vocab_size", True)),
}


def _tensor_degrees(contract: Contract, roles: set[str]) -> tuple[int, ...]:
    claims = (contract.claims.topology.get(role, {}).get("TP") for role in roles)
    return tuple(sorted({degree for claim in claims if claim is not None for degree in claim.domain}))


def _roles(contract: Contract, binding: Binding) -> set[str]:
    return {case.role for case in contract.cases if case.name in binding.cases}


def _constant(binding: Binding, name: str) -> int | None:
    value = binding.constants.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _divisor(contract: Contract, fact: str) -> int:
    """The largest integer known to divide a fact; widths also by what their factors say."""
    facts = contract.model.facts
    known = facts[fact].divisor if fact in facts else 1
    dim = facts["head_dim"].divisor if "head_dim" in facts else 1
    factors = {"q_width": ("heads",), "kv_width": ("kv_heads",), "qkv_width": ("heads", "kv_heads")}
    if fact in factors and all(name in facts for name in factors[fact]):
        known = math.lcm(known, dim * math.gcd(*(facts[name].divisor for name in factors[fact])))
    return known


@rule("IX020")
def every_axis_is_claimed(contract: Contract) -> Iterator[Found]:
    """Every role that has cases claims every parallel axis: TP EP ETP SP CP PP DP.

    CP and PP are the ones people forget: a run that splits the context or the layers without a claim would be
    judged by a contract that says nothing about it.
    """
    for role in ROLES:
        if not contract.cases_of(role):
            continue
        for axis in AXES:
            if axis not in contract.claims.topology.get(role, {}):
                yield (
                    f"claims.topology.{role}.{axis}",
                    f"the {role} claims nothing for {axis}",
                    f"write {axis}: {{pinned: 1}} or the domain it is proven for",
                )


@rule("IX021")
def k_blocks_divide_the_shards(contract: Contract) -> Iterator[Found]:
    """`k_block` divides every sum a linear region computes, on every shard of every claimed TP degree.

    A chain handed from rank to rank has the bits of one rank only if a shard ends where a block ends. The gradient
    of the input sums over N, so with gradients N shards count too.
    """
    for binding in contract.composition:
        block = _constant(binding, "k_block")
        if block is None:
            continue
        if block < 1:
            yield (
                f"composition[{binding.region}].constants.k_block",
                f"k_block is {block}",
                "use a positive one",
            )
            continue
        grad = any(case.grad != "no_grad" for case in contract.cases if case.name in binding.cases)
        for op in binding.ops:
            if op not in _SUMS:
                continue
            for fact, sharded in _SUMS[op][: 2 if grad else 1]:
                # the smallest length that is a whole number of blocks on every shard of every degree
                degrees = _tensor_degrees(contract, _roles(contract, binding)) if sharded else (1,)
                wanted = math.lcm(*(block * degree for degree in degrees or (1,)))
                known = _divisor(contract, fact)
                if known % wanted:
                    yield (
                        f"composition[{binding.region}].constants.k_block",
                        (
                            f"{op} sums over {fact}, a multiple of {known}; blocks of {block} at TP "
                            f"{max(degrees or (1,))} need a multiple of {wanted}"
                        ),
                        f"say {fact}: {{multiple_of: {wanted}}} in model.facts, or claim fewer TP degrees",
                    )


@rule("IX022")
def vocabulary_leaves_divide(contract: Contract) -> Iterator[Found]:
    """`vocab_leaves` is a multiple of every claimed TP degree and divides the vocabulary.

    A leaf is summed by one rank. A leaf cut between two ranks is a sum in another order.
    """
    for binding in contract.composition:
        leaves = _constant(binding, "vocab_leaves")
        if leaves is None:
            continue
        path = f"composition[{binding.region}].constants.vocab_leaves"
        for degree in _tensor_degrees(contract, _roles(contract, binding)):
            if leaves < 1 or leaves % degree:
                yield path, f"{leaves} leaves cannot be shared by TP {degree}", f"use a multiple of {degree}"
        known = _divisor(contract, "vocab_size")
        if leaves >= 1 and known % leaves:
            yield (
                path,
                f"{leaves} leaves do not divide a vocabulary that is a multiple of {known}",
                f"say vocab_size: {{multiple_of: {leaves}}}, or use fewer leaves",
            )


@rule("IX023")
def segments_fit_pages(contract: Contract) -> Iterator[Found]:
    """A KV page (`deployment.kv_page_size`, in tokens) and `kv_segment` are multiples one of the other.

    Segments are cut at absolute positions; a page that ends inside one cannot be read without a copy.
    """
    page = contract.deployment_section.get("kv_page_size")
    for binding in contract.composition:
        segment = _constant(binding, "kv_segment")
        if segment is None or page is None:
            continue
        fits = isinstance(page, int) and page > 0 and segment > 0 and not (page % segment and segment % page)
        if not fits:
            yield (
                f"composition[{binding.region}].constants.kv_segment",
                f"segments of {segment} and pages of {page} tokens do not nest",
                "use a page size that is a multiple or a divisor of kv_segment",
            )


@rule("IX024")
def heads_divide(contract: Contract) -> Iterator[Found]:
    """Heads are multiples of every claimed TP degree; KV heads are too, or the degree is a multiple of them.

    A head is computed by one rank. A KV head may be held by several ranks whole, with the same bits on each; one
    that ranks split would have other sums.
    """
    ops = {"qkv_proj", "attention", "o_proj"}
    for binding in contract.composition:
        if not ops & set(binding.ops):
            continue
        for fact in ("heads", "kv_heads"):
            for degree in _tensor_degrees(contract, _roles(contract, binding)):
                if not _whole_heads(contract, fact, degree):
                    yield (
                        f"model.facts.{fact}",
                        f"{binding.region} at TP {degree} needs {fact} to be a multiple of {degree}",
                        f"say {fact}: {{multiple_of: {degree}}}, or claim fewer TP degrees",
                    )


def _whole_heads(contract: Contract, fact: str, degree: int) -> bool:
    if _divisor(contract, fact) % degree == 0:
        return True
    facts = contract.model.facts
    if fact != "kv_heads":
        return False
    if fact not in facts:
        return "kv_lora_rank" in facts  # one latent key and value, which every rank holds
    known = facts[fact]
    values = known.one_of if known.fixed is None else (known.fixed,)
    return bool(values) and all(
        isinstance(value, int) and value > 0 and (value % degree == 0 or degree % value == 0)
        for value in values
    )


@rule("IX025")
def sequence_parallel_follows_tensor(contract: Contract) -> Iterator[Found]:
    """An SP degree is 1 (off) or one of the role's TP degrees.

    Sequence parallelism shares the tensor-parallel group; another degree is no layout that can run.
    """
    for role, axes in contract.claims.topology.items():
        if "SP" in axes and "TP" in axes:
            for degree in axes["SP"].domain:
                if degree != 1 and degree not in axes["TP"].domain:
                    yield (
                        f"claims.topology.{role}.SP",
                        f"SP {degree} is claimed, TP {degree} is not",
                        f"claim TP {degree}, or drop SP {degree}",
                    )


@rule("IX026")
def lengths_fit_the_table(contract: Contract) -> Iterator[Found]:
    """No case admits a longer sequence than the rotary table has rows (`length` of the rope function).

    A position past the table would be refused in the middle of a rollout.
    """
    for binding in contract.composition:
        rows = _constant(binding, "length")
        if rows is None or "rope" not in binding.ops:
            continue
        for case in contract.cases:
            longest = case.domain["length"].largest if "length" in case.domain else None
            if case.name in binding.cases and (longest is None or longest > rows):
                yield (
                    f"cases[{case.name}].domain.length",
                    f"admits {longest or 'any'} tokens, the table has {rows} rows",
                    f"say length: {{maximum: {rows}}}, or use a longer table",
                )


@rule("IX030")
def no_tolerance_on_bitwise(contract: Contract) -> Iterator[Found]:
    """Two cases claimed bitwise have no tolerance.

    A tolerance beside a bitwise claim takes the claim back without saying so.
    """
    for tolerance in contract.claims.tolerances:
        for group in contract.claims.bitwise:
            if set(tolerance.cases) <= set(group):
                yield (
                    f"claims.tolerances[{'+'.join(sorted(tolerance.cases))}]",
                    "the pair is claimed bitwise and has a tolerance",
                    "drop the tolerance, or take the pair out of claims.bitwise",
                )


@rule("IX031")
def a_tolerance_blames(contract: Contract) -> Iterator[Found]:
    """Every tolerance is blamed on at least one region.

    A mismatch that no region explains is a fault to find, not an allowance to give.
    """
    for tolerance in contract.claims.tolerances:
        if not tolerance.regions:
            yield (
                f"claims.tolerances[{'+'.join(sorted(tolerance.cases))}]",
                "blames no region",
                "name the regions whose functions differ between the two cases",
            )


@rule("IX032", "warning")
def every_pair_is_claimed(contract: Contract) -> Iterator[Found]:
    """Each pair of an engine case and a trainer case is claimed bitwise or has a tolerance.

    A pair that the contract says nothing about can be measured and never judged.
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


@rule("IX033")
def one_arch(contract: Contract) -> Iterator[Found]:
    """The contract, its environment and its providers are of one arch.

    Bits proven on one arch say nothing about another.
    """
    arch: Value = contract.arch
    if contract.claims.environment.arch != arch:
        found = contract.claims.environment.arch
        yield (
            "claims.environment.arch",
            f"is {found}, the contract's is {arch}",
            f"write {arch}, or change the contract's",
        )
    for provider in contract.providers:
        if provider.arch not in (None, arch):
            yield (
                f"providers[{provider.function}|{provider.name}].arch",
                f"is {provider.arch}, the contract's is {arch}",
                f"admit a provider proven on {arch}",
            )


@rule("IX034")
def kept_state_is_invalidated(contract: Contract) -> Iterator[Found]:
    """Every state that a case keeps says that a weight sync invalidates it.

    A KV cache or prefix cache read across a weight sync mixes two policies in one logprob.
    """
    kept = {"paged_kv": ("kv_cache", "prefix_cache"), "recurrent": ("recurrent_state",), "stateless": ()}
    claims = {claim.state: claim.invalidated_by for claim in contract.claims.state}
    for case in contract.cases:
        for state in kept[case.state]:
            if "weight_sync" not in claims.get(state, ()):
                yield (
                    "claims.state",
                    f"{case.name} keeps {state}, and nothing says that weight_sync invalidates it",
                    f"add {{state: {state}, invalidated_by: [weight_sync]}}",
                )
