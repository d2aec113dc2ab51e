# SPDX-License-Identifier: Apache-2.0
"""Functions that are others one after the other: a fused entry has the bits of the entries that it stands for.

A function is an exact rounding schedule, so two names are two sets of bits, and IX008 lets cases that are claimed bitwise bind
an operator to one function only. A fused kernel breaks that rule in words and not in bits where its function is *defined* as
the composition of others: `linear_logprobs.mma_blocks/1` is `linear.mma_chain/1` to fp32 logits, then `logprobs.blocks/2`. At
the seam nothing is rounded but what the first part's `boundary` says, which is part of its schedule; that is what the fused
entry's constants stand for, name by name. So an entry of the one and two entries of the others say the same of each operator,
and the rules on parity judge what it stands for (`apart`) instead of its name.

It has a name of its own all the same, for what computes it is another kernel. Its source is in the contract, its evidence is a
record of its own gate, which compares it as integers with its parts' references one after the other, and a process attests
which of the two it bound. Neither is taken for the other by a digest: what they share is what each is proven against.

A contract uses it by case. An engine samples from logits and must make them, so its cases bind the head and the logprobs; a
trainer needs one token's logprob, and its cases bind the fused function, which never writes a logit. Two other ways were not
taken. As a second provider of either part it would own an operator that another region owns too, and one object would answer
for two regions. As a choice that each process makes for itself it would not show in `numerical_policy`, which says whose
kernels are admitted.

What stands between the parts forbids it: a head's bias, a cap or a scale of logits is an operator of the model, which another
entry would have to own in between. An entry therefore owns the parts' operators, each one and no other (IX069), and a family
whose head has more binds the parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from isoexec.contracts.parts import Binding, Value

__all__ = ["COMPOSITES", "Stage", "apart"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of a composite: its `function`, the operator it computes, the constants it has of the composite, and its `own`."""

    function: str
    op: str
    constants: tuple[str, ...]
    own: Mapping[str, Value] = field(default_factory=dict)


COMPOSITES: Mapping[str, tuple[Stage, ...]] = {
    "linear_logprobs.mma_blocks/1": (
        Stage(
            function="linear.mma_chain/1",
            op="lm_head",
            constants=("step", "accumulate"),
            own={"boundary": "float32"},
        ),
        Stage(function="logprobs.blocks/2", op="token_logprob", constants=("block", "vocab_leaves")),
    ),
}
"""A function -> what it is, in order."""


def apart(binding: Binding) -> tuple[Binding, ...]:
    """Return the entries that an entry stands for: one a stage where its function is a composite, itself otherwise.

    An entry that does not own the stages' operators stands for itself.
    """
    stages = COMPOSITES.get(binding.function, ())
    if sorted(binding.ops) != sorted(stage.op for stage in stages):
        return (binding,)
    return tuple(
        replace(
            binding,
            ops=(stage.op,),
            function=stage.function,
            constants={
                **{name: binding.constants[name] for name in stage.constants if name in binding.constants},
                **stage.own,
            },
        )
        for stage in stages
    )
