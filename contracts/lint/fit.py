# SPDX-License-Identifier: Apache-2.0
"""Lint rules on constants, shapes and parallel degrees: whether what is claimed can be computed at all, on every shard."""

from __future__ import annotations

import math
from collections.abc import Iterator

from isoexec.contracts.lint import Found, rule
from isoexec.contracts.lint.tables import (
    FACTORS,
    FUNCTIONS,
    ROPE_OPS,
    Computes,
    constant,
    degrees,
    entry,
    roles_of,
)
from isoexec.contracts.operators import OPERATORS, Operator, Part
from isoexec.contracts.parts import Binding, Constraint, derived_widths
from isoexec.contracts.schema import Contract

_BLOCKS = ("k_block", "step")
_UNKNOWN = Computes(dtypes=("bfloat16", "float16", "float32"))


def _known(contract: Contract, fact: str) -> str:
    """Return the fact that is meant: with latent attention the width of attention's output is not that of its queries."""
    return "o_width" if fact == "q_width" and "kv_lora_rank" in contract.model.facts else fact


def _divisor(contract: Contract, fact: str) -> int:
    """The largest integer known to divide a fact; widths also by what their factors say."""
    facts = contract.model.facts
    known = facts[fact].divisor if fact in facts else 1
    heads, dim = FACTORS.get(fact, ((), ""))
    if heads and all(name in facts for name in heads):
        per_head = facts[dim].divisor if dim in facts else 1
        known = math.lcm(known, per_head * math.gcd(*(facts[name].divisor for name in heads)))
    return known


def _fits(contract: Contract, part: Part, degree: int) -> bool:
    """Say whether every rank of a degree holds whole parts."""
    if _divisor(contract, part.fact) % degree == 0:
        return True
    facts = contract.model.facts
    if not part.copied:
        return False
    if part.fact not in facts:
        return "kv_lora_rank" in facts  # one latent key and value, which every rank holds
    known = facts[part.fact]
    values = known.one_of if known.fixed is None else (known.fixed,)
    return bool(values) and all(
        isinstance(value, int) and value > 0 and (value % degree == 0 or degree % value == 0)
        for value in values
    )


def _sums(contract: Contract, binding: Binding, op: str) -> tuple[Part, ...]:
    known = OPERATORS.get(op, Operator())
    grad = any(case.grad != "no_grad" for case in contract.cases if case.name in binding.cases)
    return (*known.sums, *(known.grad_sums if grad else ()))


@rule("IX021")
def blocks_divide_the_shards(contract: Contract) -> Iterator[Found]:
    """`k_block` (or `step`) divides every sum a linear region computes, on every shard of every claimed degree.

    A chain handed from rank to rank has the bits of one rank only if a shard ends where a block ends. The gradient of the
    input sums over N, so with gradients N shards count too.

    Breach: k_block 64 with intermediate_size: {multiple_of: 64} and TP {invariant: [1, 2]}: at TP 2 a shard is 32 long.

    Fix: say intermediate_size: {multiple_of: 128} in model.facts, claim fewer degrees, or use a smaller block.
    """
    for binding in contract.composition:
        for name in _BLOCKS:
            block = constant(binding, name)
            if block is None:
                continue
            path = f"{entry(contract, binding)}.constants.{name}"
            if block < 1:
                yield path, f"{name} is {block}", "use a positive one"
                continue
            for op in binding.ops:
                for part in _sums(contract, binding, op):
                    # the smallest length that is a whole number of blocks on every shard of every degree
                    shards = degrees(contract, roles_of(contract, binding), part.axis) or (1,)
                    wanted = math.lcm(*(block * degree for degree in shards))
                    fact = _known(contract, part.fact)
                    known = _divisor(contract, fact)
                    if known % wanted:
                        at = f" at {part.axis} {max(shards)}" if part.axis else ""
                        yield (
                            path,
                            (
                                f"{op} sums over {fact}, a multiple of {known}; blocks of {block}{at} "
                                f"need a multiple of {wanted}"
                            ),
                            f"say {fact}: {{multiple_of: {wanted}}} in model.facts, or claim fewer degrees",
                        )


@rule("IX022")
def vocabulary_leaves_divide(contract: Contract) -> Iterator[Found]:
    """`vocab_leaves` is a multiple of every claimed TP degree and divides the vocabulary.

    A leaf is summed by one rank. A leaf cut between two ranks is a sum in another order.

    Breach: vocab_leaves 4 with TP {invariant: [1, 8]}.

    Fix: use as many leaves as the largest TP degree, or a multiple of it, that divide vocab_size.
    """
    for binding in contract.composition:
        leaves = constant(binding, "vocab_leaves")
        if leaves is None:
            continue
        path = f"{entry(contract, binding)}.constants.vocab_leaves"
        for degree in degrees(contract, roles_of(contract, binding), "TP"):
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

    Breach: kv_segment 32 with deployment: {kv_page_size: 48}.

    Fix: use a page size that is a multiple or a divisor of kv_segment.
    """
    page = contract.deployment_section.get("kv_page_size")
    for binding in contract.composition:
        segment = constant(binding, "kv_segment")
        if segment is None or page is None:
            continue
        whole = isinstance(page, int) and not isinstance(page, bool) and page > 0 and segment > 0
        if not whole or (int(page) % segment and segment % int(page)):
            yield (
                f"{entry(contract, binding)}.constants.kv_segment",
                f"segments of {segment} and pages of {page} tokens do not nest",
                "use a page size that is a multiple or a divisor of kv_segment",
            )


def _split(contract: Contract, axis: str) -> Iterator[Found]:
    """Yield what a claimed degree of an axis would split though no rank may hold a part of it."""
    told = set()
    for binding in contract.composition:
        for op in binding.ops:
            for part in OPERATORS.get(op, Operator()).whole:
                for degree in (
                    degrees(contract, roles_of(contract, binding), axis) if part.axis == axis else ()
                ):
                    if not _fits(contract, part, degree) and (part.fact, degree) not in told:
                        told.add((part.fact, degree))
                        yield (
                            f"model.facts.{part.fact}",
                            f"{binding.region} at {axis} {degree} needs {part.fact} to be a multiple of {degree}",
                            f"say {part.fact}: {{multiple_of: {degree}}}, or claim fewer {axis} degrees",
                        )


@rule("IX024")
def heads_divide(contract: Contract) -> Iterator[Found]:
    """Heads are multiples of every claimed TP degree; KV heads are too, or the degree is a multiple of them.

    A head is computed by one rank. A KV head may be held by several ranks whole, with the same bits on each; one that
    ranks split would have other sums.

    Breach: kv_heads: {minimum: 1} with TP {invariant: [1, 2]}.

    Fix: say kv_heads: {multiple_of: 2} in model.facts, or claim fewer TP degrees.
    """
    yield from _split(contract, "TP")


@rule("IX025")
def sequence_parallel_follows_tensor(contract: Contract) -> Iterator[Found]:
    """An SP degree is 1 (off) or one of the role's TP degrees.

    Sequence parallelism shares the tensor-parallel group; another degree is no layout that can run.

    Breach: TP {invariant: [1, 2]} and SP {invariant: [1, 4]}.

    Fix: claim that TP degree too, or drop the SP degree.
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

    Breach: engine_decode admits length: {maximum: 16384}, and the table has 8192 rows.

    Fix: say length: {maximum: 8192} in every case of the region, or use a longer table.
    """
    for binding in contract.composition:
        rows = constant(binding, "length")
        if rows is None or not ROPE_OPS & set(binding.ops):
            continue
        for case in contract.cases:
            longest = case.domain["length"].largest if "length" in case.domain else None
            if case.name in binding.cases and (longest is None or longest > rows):
                yield (
                    f"cases[{case.name}].domain.length",
                    f"admits {longest or 'any'} tokens, the table has {rows} rows",
                    f"say length: {{maximum: {rows}}}, or use a longer table",
                )


@rule("IX027")
def experts_divide(contract: Contract) -> Iterator[Found]:
    """The number of experts is a multiple of every claimed EP degree.

    An expert lives on one expert-parallel rank. A degree that leaves a remainder is no layout that can run.

    Breach: experts: {multiple_of: 4} with EP {invariant: [1, 8]}.

    Fix: say experts: {multiple_of: 8} in model.facts, or claim fewer EP degrees.
    """
    yield from _split(contract, "EP")


@rule("IX028")
def expert_axes_have_experts(contract: Contract) -> Iterator[Found]:
    """EP and ETP beyond degree 1 are claimed only for a model with experts.

    Without experts no gate can have run at such a degree, and the claim admits a layout that nobody means.

    Breach: a dense model with EP {invariant: [1, 2]}.

    Fix: EP: {pinned: 1} and ETP: {pinned: 1}; or state the model's experts in model.facts.
    """
    routed = "experts" in contract.model.facts or any(
        part.axis == "EP" for op in contract.model.ops for part in OPERATORS.get(op, Operator()).whole
    )
    for role, axes in sorted(contract.claims.topology.items()) if not routed else ():
        for axis in ("EP", "ETP"):
            if axis in axes and axes[axis].domain != (1,):
                yield (
                    f"claims.topology.{role}.{axis}",
                    f"{axis} is {axes[axis]}, and the model has no experts",
                    f"write {axis}: {{pinned: 1}}, or state experts in model.facts",
                )


@rule("IX029")
def constants_are_the_functions(contract: Contract) -> Iterator[Found]:
    """A binding gives its function's constants: all of them, and no others.

    A misspelt constant is one that reaches no kernel, and the one it was meant for is not said at all.

    Breach: linear.chain/1 with constants {k_blok: 64, row_tile: 16, accumulate: float32, boundary: model}.

    Fix: name the function's constants; contracts/spec/contract-v1.md and `isoexec kernels` list them.
    """
    for binding in contract.composition:
        known = FUNCTIONS.get(binding.function)
        if known is None:
            continue
        missing = sorted(set(known.constants) - set(binding.constants))
        foreign = sorted(set(binding.constants) - set(known.constants))
        said = [f"lacks {', '.join(missing)}"] if missing else []
        said += [f"has no constant {', '.join(foreign)}"] if foreign else []
        if said:
            yield (
                f"{entry(contract, binding)}.constants",
                f"{binding.function} {' and '.join(said)}",
                f"give {', '.join(known.constants) or 'no constant'}",
            )


@rule("IX035")
def dtypes_are_the_functions(contract: Contract) -> Iterator[Found]:
    """Every parameter dtype claimed is one that every bound function takes.

    A dtype outside a function's domain is refused at the first call, in the middle of a run.

    Breach: dtypes: [bfloat16, float16], and no function of this release takes float16.

    Fix: claim the dtypes that all functions take.
    """
    for dtype in contract.claims.dtypes:
        refusing = sorted(
            {
                b.function
                for b in contract.composition
                if dtype not in FUNCTIONS.get(b.function, _UNKNOWN).dtypes
            }
        )
        if refusing:
            yield (
                "claims.dtypes",
                f"{dtype} is not taken by {', '.join(refusing)}",
                "claim the dtypes that all functions take",
            )


def _fixed(constraint: Constraint | None) -> int | None:
    value = constraint.fixed if constraint is not None else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@rule("IX060")
def facts_agree(contract: Contract) -> Iterator[Found]:
    """Facts that follow from each other do not contradict: widths are heads times head_dim, heads a multiple of kv_heads.

    A contract with contradicting facts serves no model at all.

    Breach: heads: 16, head_dim: 128 and q_width: 4096.

    Fix: mend the number, or leave out the widths, which are derived.
    """
    facts = contract.model.facts
    numbers = {name: value for name in facts if (value := _fixed(facts[name])) is not None}
    for name, width in sorted(derived_widths(dict(numbers)).items()):
        if name in facts and not facts[name].admits(width):
            yield (
                f"model.facts.{name}",
                f"heads and head_dim make it {width}, the contract wants {facts[name]}",
                f"leave {name} out, or mend heads and head_dim",
            )
    heads, kv_heads = numbers.get("heads"), numbers.get("kv_heads")
    if heads and kv_heads and heads % kv_heads:
        yield (
            "model.facts.kv_heads",
            f"{heads} heads cannot share {kv_heads} KV heads",
            "use a divisor of heads",
        )


@rule("IX064")
def stages_have_layers(contract: Contract) -> Iterator[Found]:
    """No claimed PP degree is larger than the largest admitted number of layers.

    A pipeline stage without a layer is no layout that can run, so nothing can have been proven of it.

    Breach: layers: 2 with PP {invariant: [1, 4]}.

    Fix: claim fewer PP degrees.
    """
    layers = contract.model.facts.get("layers")
    most = layers.largest if layers is not None else None
    for role, axes in sorted(contract.claims.topology.items()):
        if most is not None and "PP" in axes and max(axes["PP"].domain) > most:
            yield (
                f"claims.topology.{role}.PP",
                f"PP {max(axes['PP'].domain)} for at most {most} layers",
                "claim fewer PP degrees",
            )
