# SPDX-License-Identifier: Apache-2.0
"""A table of broken contracts: each is `broken/base.yaml` with one thing spoilt, and breaks exactly one lint rule.

`python tests/contracts/broken.py` lints each and prints its name, the rule it must break and what was found; `--write DIR`
writes the files, with a store of records for each, to lint them by hand. The records are made up: their structure is
real, and no kernel ran for them.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import runpy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from isoexec.contracts.digests import ZERO, digest_bytes
from isoexec.contracts.discharge import Live
from isoexec.contracts.evidence import Check, EvidenceRecord, Store, stamp
from isoexec.contracts.lint import Finding, all_rules
from isoexec.contracts.lint.report import check
from isoexec.contracts.loading import read
from isoexec.contracts.schema import Contract

__all__ = ["BASE", "BROKEN", "NOW", "Bench", "Broken", "bench", "found", "table"]

HERE = Path(__file__).parent
BASE = HERE / "broken" / "base.yaml"
_MADE_UP = runpy.run_path(str(HERE / "conftest.py"))
_record_for: Callable[[Contract, str, str], EvidenceRecord] = _MADE_UP["record_for"]
_proven: Callable[..., Contract] = _MADE_UP["proven"]
NOW: float = _MADE_UP["NOW"]
DAY = 86400.0
SILU, ATTENTION, LINEAR, LIBRARY = (
    "silu_mul.exp/1",
    "attention.segments/1",
    "linear.chain/1",
    "linear.library/1",
)
FUSED = "linear_logprobs.mma_blocks/1"
Data = dict[str, Any]


@dataclass
class Bench:
    """A contract being spoilt: its plain `data`, the store of its records, and the time and process it is judged in."""

    data: Data
    store: Store
    text: Callable[[str], str] = lambda text: text
    now: float = NOW
    live: Live | None = None
    digests: dict[str, str] = field(default_factory=dict)

    def region(self, name: str) -> Data:
        return next(one for one in self.data["composition"] if one["region"] == name)

    def provider(self, function: str) -> Data:
        return next(one for one in self.data["providers"] if one["function"] == function)

    def case(self, name: str) -> Data:
        return next(one for one in self.data["cases"] if one["name"] == name)

    @property
    def claims(self) -> Data:
        return self.data["claims"]

    @property
    def facts(self) -> Data:
        return self.data["model"]["facts"]

    def split(self, region: str, cases: str, /, **changes: Any) -> Data:
        """Give the cases that start so an entry of their own, with changes; return it."""
        entry = self.region(region)
        other = {
            **copy.deepcopy(entry),
            "cases": [one for one in entry["cases"] if one.startswith(cases)],
            **changes,
        }
        entry["cases"] = [one for one in entry["cases"] if not one.startswith(cases)]
        self.data["composition"].append(other)
        return other

    def prove(self) -> None:
        """Make up a record for every provider and name it in every discharge."""
        contract = Contract.from_dict(self.data)
        made = []
        for provider in contract.providers:
            record = _record_for(contract, provider.function, provider.name)
            if not record.checks:  # nothing binds the function, and a record has at least one check
                one = dataclasses.replace(_first(self, ATTENTION), constants={})
                record = dataclasses.replace(record, checks=(one,))
            made.append(record)
        self.data = _proven(contract, self.store, made).to_dict()

    def record(self, function: str) -> EvidenceRecord:
        """Return the record made up for a function's provider."""
        return _record_for(Contract.from_dict(self.data), function, self.provider(function)["name"])

    def name(self, function: str, digest: str) -> None:
        """Let every discharge of a function name a record."""
        for entry in (*self.data["composition"], *self.data["providers"]):
            if entry["function"] == function:
                entry["discharge"] = {"kind": "evidence", "evidence": digest}

    def replace(self, function: str, **changes: Any) -> None:
        """Give a function a record that differs from the made-up one."""
        self.name(function, self.store.write(dataclasses.replace(self.record(function), **changes)))


def _quoted(dumper: Any, text: str) -> Any:
    """Write text that begins like a number in quotes, as the format asks."""
    style = '"' if text[:1].isdigit() else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper: Any = type("_Dumper", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), {})
_Dumper.add_representer(str, _quoted)
Edit = Callable[[Bench], object]


def _nothing(bench: Bench) -> None:
    del bench


@dataclass(frozen=True)
class Broken:
    """One broken contract: the `rule` it breaks, what is spoilt `before` its records are made, and `after`."""

    name: str
    rule: str
    before: Edit = _nothing
    after: Edit = _nothing


def _first(bench: Bench, function: str) -> Check:
    return bench.record(function).checks[0]


def _checks(family: str, **changes: Any) -> Edit:
    """Change the check of one family in attention's record; drop it where nothing is given."""

    def edit(bench: Bench) -> None:
        held = bench.record(ATTENTION).checks
        kept = [
            dataclasses.replace(one, **changes) if one.family == family else one
            for one in held
            if changes or one.family != family
        ]
        bench.replace(ATTENTION, checks=tuple(kept))

    return edit


def _domain(family: str, **values: tuple[Any, ...]) -> Edit:
    def edit(bench: Bench) -> None:
        held = next(one for one in bench.record(ATTENTION).checks if one.family == family)
        _checks(family, domain={**held.domain, **values})(bench)

    return edit


def _control(differing: int) -> Edit:
    def edit(bench: Bench) -> None:
        control = dataclasses.replace(_first(bench, ATTENTION).controls[0], differing=differing)
        _checks("rerun_determinism", controls=(control,))(bench)

    return edit


def _subject(function: str, **changes: Any) -> Edit:
    def edit(bench: Bench) -> None:
        bench.replace(function, provider=dataclasses.replace(bench.record(function).provider, **changes))

    return edit


# -- edits that take more than a line ------------------------------------------------------------------------------------


def _two_functions(bench: Bench) -> None:
    bench.split("silu_mul", "trainer", function="silu_mul.poly/1")
    bench.provider(SILU)["roles"] = ["engine"]
    other = {**bench.provider(SILU), "name": "own.poly", "function": "silu_mul.poly/1", "roles": ["trainer"]}
    bench.data["providers"].append(other)


def _two_versions(bench: Bench) -> None:
    bench.region("lm_head")["function"] = "linear.chain/2"
    other = {**bench.provider(LINEAR), "name": "own.linear2", "function": "linear.chain/2"}
    bench.data["providers"].append(other)


def _another_record(region: str, prefix: str) -> Edit:
    """Let the entries of a region's cases that start so name a second record, made an hour later."""

    def edit(bench: Bench) -> None:
        for entry in bench.data["composition"]:
            if entry["region"].startswith(region) and entry["cases"][0].startswith(prefix):
                later = dataclasses.replace(bench.record(entry["function"]), made=stamp(NOW - DAY + 3600))
                entry["discharge"] = {"kind": "evidence", "evidence": bench.store.write(later)}

    return edit


def _cut_norm(bench: Bench) -> None:
    bench.split("norm", "trainer", ops=["input_norm"])
    entry = copy.deepcopy(bench.data["composition"][-1])
    bench.data["composition"].append({**entry, "region": "norm_residual", "ops": ["residual_add"]})


def _fused_of_one(bench: Bench) -> None:
    """The scoring case binds a fused function to its last operator alone."""
    constants = {"step": 16, "accumulate": "float32", "block": 128, "vocab_leaves": 8}
    bench.split("logprobs", "trainer_score", function=FUSED, constants=constants)
    other = {
        **bench.provider("logprobs.leaves/1"),
        "name": "own.fused",
        "function": FUSED,
        "roles": ["trainer"],
    }
    bench.data["providers"].append(other)


def _grad_norm_everywhere(bench: Bench) -> None:
    bench.region("grad_norm")["cases"].append("engine_decode")
    bench.provider("grad_norm.exact/1")["roles"].append("engine")


def _engine_with_gradients(bench: Bench) -> None:
    bench.case("engine_decode")["grad"] = "grad"
    _grad_norm_everywhere(bench)


def _two_entries(bench: Bench) -> None:
    entry = bench.region("linear")
    entry["ops"].remove("down_proj")
    most = [one for one in entry["cases"] if one != "trainer_score"]
    other = {**copy.deepcopy(entry), "ops": ["down_proj"]}
    bench.data["composition"].append({**other, "cases": most})
    bench.data["composition"].append({**other, "cases": ["trainer_score"], "region": "linear_score"})


def _unbound_case(bench: Bench) -> None:
    for entry in bench.data["composition"]:
        entry["cases"] = [one for one in entry["cases"] if one != "trainer_recompute"]


def _experts(bench: Bench) -> None:
    bench.data["model"]["ops"].append("expert_gate_up")
    bench.region("linear")["ops"].append("expert_gate_up")
    bench.facts.update(experts={"multiple_of": 4}, expert_size={"multiple_of": 64})
    bench.claims["topology"]["engine"]["EP"] = {"invariant": [1, 8]}


def _delta_rule(bench: Bench) -> None:
    bench.data["model"]["ops"].append("gated_delta_rule")
    bench.region("silu_mul")["ops"].append("gated_delta_rule")
    bench.facts.update(gdn_key_heads={"multiple_of": 2}, gdn_value_heads={"multiple_of": 2})


def _engine_alone(bench: Bench) -> None:
    data = bench.data
    data["cases"] = [one for one in data["cases"] if one["role"] == "engine"]
    data["model"]["step_ops"] = []
    names = {one["name"] for one in data["cases"]}
    data["composition"] = [one for one in data["composition"] if names & set(one["cases"])]
    for entry in data["composition"]:
        entry["cases"] = [one for one in entry["cases"] if one in names]
    data["providers"] = [one for one in data["providers"] if "engine" in one["roles"]]
    for entry in data["providers"]:
        entry["roles"] = ["engine"]
    bench.claims.update(bitwise=[sorted(names)], tolerances=[])
    del bench.claims["topology"]["trainer"]


def _no_gradients(bench: Bench) -> None:
    bench.data["cases"].remove(bench.case("trainer_recompute"))
    bench.claims["bitwise"][0].remove("trainer_recompute")
    bench.case("trainer_fwd")["grad"] = "no_grad"
    bench.data["composition"].remove(bench.region("grad_norm"))
    bench.data["providers"].remove(bench.provider("grad_norm.exact/1"))
    for entry in bench.data["composition"]:
        entry["cases"] = [one for one in entry["cases"] if one != "trainer_recompute"]


def _tolerance(bench: Bench, **changes: Any) -> None:
    bench.claims["tolerances"][0].update(changes)


def _forge(bench: Bench) -> None:
    path = bench.store.path(bench.region("attention")["discharge"]["evidence"])
    if path is None:
        raise FileNotFoundError("the record of attention")
    path.write_bytes(path.read_bytes().replace(b'"elements":1000', b'"elements":9000', 1))


def _no_record(bench: Bench) -> None:
    data = b'{"schema_version":1}'
    digest = digest_bytes(data)
    bench.store.paths[0].joinpath(digest.removeprefix("sha256:") + ".json").write_bytes(data)
    bench.name(ATTENTION, digest)


def _demand(*demanded: int, signing: int | None = None, certify: str = "refuse", spoil: bool = False) -> Edit:
    """Demand signatures of some of two keys, and sign every record with one; `spoil` breaks a signature."""

    def edit(bench: Bench) -> None:
        from isoexec.contracts.signing import load_key, make_key, sign

        folder = bench.store.paths[0].parent
        paths = [folder / f"{one}.pem" for one in range(2)]
        public = [make_key(path) for path in paths]
        bench.claims["evidence"] = {"signers": [public[one] for one in demanded], "certify": certify}
        for digest in bench.store.digests() if signing is not None else ():
            sign(bench.store, digest, load_key(paths[signing or 0]))
        if spoil:
            path = next(bench.store.paths[0].glob("*.sig"))
            text = path.read_text()
            path.write_text(text.replace(text[-12], "0" if text[-12] != "0" else "1"))

    return edit


def _too_old(bench: Bench) -> None:
    bench.claims["evidence"] = {"max_age_days": 7}
    bench.replace(SILU, made=stamp(NOW - 8 * DAY))


def _another_torch(bench: Bench) -> None:
    sources = {one["function"]: one.get("source", "") for one in bench.data["providers"]}
    bench.live = Live(arch="cpu", sources=sources, environment={"torch": "2.12.0"})


def _text(before: str, after: str) -> Edit:
    """Replace the first place of a text in the written file."""

    def edit(bench: Bench) -> None:
        bench.text = lambda text: text.replace(before, after, 1)

    return edit


BROKEN: tuple[Broken, ...] = (
    # the file
    Broken("not_yaml", "IX000", after=_text("arch: cpu", "arch: [cpu")),
    Broken("not_utf8_word_for_true", "IX000", after=_text("name: base", "name: yes")),
    Broken("unknown_field", "IX000", after=_text("arch: cpu\n", "arch: cpu\narchs: cpu\n")),
    Broken("missing_field", "IX000", after=_text("route: canonical\n", "\n")),
    Broken("raw_float", "IX000", after=_text("kv_page_size: 16", "kv_page_size: 16.0")),
    Broken("the_same_key_twice", "IX000", after=_text("arch: cpu\n", "arch: cpu\narch: cpu\n")),
    Broken("anchor", "IX000", after=_text("name: base", "name: &name base")),
    Broken("unknown_route", "IX000", after=_text("route: canonical", "route: fast")),
    # composition
    Broken("op_unowned", "IX001", lambda b: b.region("norm")["ops"].remove("residual_add")),
    Broken("op_unowned_in_one_case", "IX001", lambda b: b.region("silu_mul")["cases"].remove("trainer_score")),
    Broken("step_op_unowned", "IX001", lambda b: b.region("grad_norm")["cases"].remove("trainer_recompute")),
    Broken("op_owned_twice", "IX002", lambda b: b.region("norm")["ops"].append("rope")),
    Broken("region_unknown", "IX003", lambda b: _tolerance(b, regions=["lm_haed"])),
    Broken("case_unknown_in_an_entry", "IX004", lambda b: b.region("rope")["cases"].append("engine_verify")),
    Broken("case_unknown_in_bitwise", "IX004", lambda b: b.claims["bitwise"][0].append("trainer_forward")),
    Broken("case_unknown_in_a_tolerance", "IX004",
           lambda b: b.claims["tolerances"].append({**b.claims["tolerances"][0], "cases": ["engine_verify", "trainer_score"]})),
    Broken("op_unknown", "IX007", lambda b: b.region("rope")["ops"].append("router")),
    Broken("step_op_without_gradients", "IX007", _grad_norm_everywhere),
    Broken("entry_undischarged", "IX011", after=lambda b: b.region("rope").update(discharge={"kind": "none"})),
    Broken("entry_never_pinned", "IX011",
           after=lambda b: b.region("rope").update(discharge={"kind": "evidence", "evidence": ZERO})),
    Broken("case_unbound", "IX014", _unbound_case),
    Broken("step_without_a_step", "IX061", _no_gradients),
    Broken("engine_with_gradients", "IX066", _engine_with_gradients),
    Broken("region_of_two_entries", "IX067", _two_entries),
    # parity
    Broken("another_function_in_the_trainer", "IX008", _two_functions),
    Broken("another_constant_in_the_trainer", "IX008",
           lambda b: b.split("attention", "trainer", constants={"kv_segment": 64, "query_tile": 16})),
    Broken("regions_cut_differently", "IX010", _cut_norm, _another_record("norm", "trainer")),
    Broken("region_of_some_cases", "IX010", lambda b: b.split("silu_mul", "trainer", region="silu_mul_trainer"),
           _another_record("silu_mul", "trainer")),
    Broken("fused_without_its_head", "IX069", _fused_of_one),
    Broken("two_versions_in_a_group", "IX015", _two_versions),
    Broken("tolerance_on_a_bitwise_pair", "IX030", lambda b: b.claims["tolerances"].append(
        {**b.claims["tolerances"][0], "cases": ["engine_prefill", "trainer_fwd"]})),
    Broken("tolerance_blames_nothing", "IX031", lambda b: _tolerance(b, regions=[])),
    Broken("pair_unclaimed", "IX032", lambda b: b.claims["tolerances"].pop()),
    Broken("blame_outside_the_pair", "IX036", lambda b: _tolerance(b, regions=["grad_norm"])),
    Broken("tolerance_of_nothing", "IX037", lambda b: _tolerance(b, bound="0")),
    Broken("engine_alone", "IX038", _engine_alone),
    # providers
    Broken("role_without_provider", "IX005", lambda b: b.provider("rope.neox_fp32/1").update(roles=["trainer"])),
    Broken("provider_unused", "IX006", lambda b: b.data["providers"].append(
        {**b.provider("rope.neox_fp32/1"), "function": "rope.gptj/1"})),
    Broken("provider_undischarged", "IX009", after=lambda b: b.provider(SILU).update(discharge={"kind": "none"})),
    Broken("provider_never_pinned", "IX009",
           after=lambda b: b.provider(SILU).update(discharge={"kind": "evidence", "evidence": ZERO})),
    Broken("source_unpinned", "IX012", lambda b: b.provider(SILU).update(source=ZERO)),
    Broken("artifact_unpinned", "IX012", lambda b: b.provider(SILU).update(artifact=ZERO)),
    Broken("two_providers_for_a_role", "IX013",
           lambda b: b.data["providers"].append({**b.provider(SILU), "name": "own.other", "roles": ["engine"]})),
    Broken("role_unused", "IX016", lambda b: b.provider("grad_norm.exact/1").update(roles=["engine", "trainer"])),
    Broken("preserving_without_a_reference", "IX017",
           lambda b: b.data["composition"][7].update(route="reference_preserving")),
    Broken("library_without_settings", "IX018", lambda b: b.provider(LIBRARY).pop("settings")),
    Broken("library_version_unclaimed", "IX019", lambda b: b.claims["environment"]["versions"].pop()),
    Broken("signers_and_certify", "IX039", after=_demand(0, signing=0, certify="install")),
    # fit
    Broken("k_block_cut_by_a_shard", "IX021", lambda b: b.facts.update(intermediate_size={"multiple_of": 64})),
    Broken("k_block_beside_the_width", "IX021", lambda b: b.facts.update(hidden_size={"multiple_of": 32})),
    Broken("k_block_zero", "IX021", lambda b: b.region("linear")["constants"].update(k_block=0)),
    Broken("leaves_fewer_than_ranks", "IX022", lambda b: b.region("logprobs")["constants"].update(vocab_leaves=1)),
    Broken("leaves_beside_the_vocabulary", "IX022", lambda b: b.region("logprobs")["constants"].update(vocab_leaves=48)),
    Broken("segments_beside_pages", "IX023", lambda b: b.data.update(deployment={"kv_page_size": 48})),
    Broken("kv_heads_split", "IX024", lambda b: b.facts.update(kv_heads={"minimum": 1})),
    Broken("heads_split", "IX024", lambda b: b.facts.update(heads={"minimum": 1})),
    Broken("sp_without_tp", "IX025", lambda b: b.claims["topology"]["trainer"].update(SP={"invariant": [1, 4]})),
    Broken("length_past_the_rotary_table", "IX026",
           lambda b: b.case("engine_decode").update(domain={"length": {"maximum": 8193}})),
    Broken("length_unbounded", "IX026", lambda b: b.case("engine_decode").pop("domain")),
    Broken("experts_split", "IX027", _experts),
    Broken("experts_claimed_without_experts", "IX028",
           lambda b: b.claims["topology"]["trainer"].update(EP={"invariant": [1, 2]})),
    Broken("constant_misspelt", "IX029", lambda b: b.region("attention").update(constants={"kv_segmnt": 32, "query_tile": 16})),
    Broken("constant_of_another_function", "IX029", lambda b: b.region("silu_mul").update(constants={"k_block": 64})),
    Broken("dtype_no_function_takes", "IX035", lambda b: b.claims["dtypes"].append("float16")),
    Broken("widths_contradict", "IX060", lambda b: b.facts.update(
        heads=16, head_dim=128, q_width={"multiple_of": 4096})),
    Broken("heads_beside_kv_heads", "IX060", lambda b: b.facts.update(heads=16, kv_heads=6)),
    Broken("more_stages_than_layers", "IX064", lambda b: b.facts.update(layers=1)),
    # claims
    Broken("cp_unclaimed", "IX020", lambda b: b.claims["topology"]["engine"].pop("CP")),
    Broken("pp_unclaimed", "IX020", lambda b: b.claims["topology"]["trainer"].pop("PP")),
    Broken("role_unclaimed", "IX020", lambda b: b.claims["topology"].pop("trainer")),
    Broken("environment_of_another_arch", "IX033", lambda b: b.claims["environment"].update(arch="sm90")),
    Broken("provider_of_another_arch", "IX033", lambda b: b.provider(SILU).update(arch="sm90")),
    Broken("recurrent_state_unclaimed", "IX034", _delta_rule),
    Broken("kept_state_unclaimed", "IX034", lambda b: b.claims["state"].pop(1)),
    Broken("state_kept_over_a_weight_sync", "IX034", lambda b: b.claims["state"][0].update(invalidated_by=["restart"])),
    Broken("invariant_over_one_degree", "IX062", lambda b: b.claims["topology"]["engine"].update(DP={"invariant": [1]})),
    Broken("state_nobody_keeps", "IX063", lambda b: b.claims["state"].append(
        {"state": "recurrent_state", "invalidated_by": ["weight_sync"]})),
    Broken("torch_unclaimed", "IX065", lambda b: b.claims["environment"]["versions"].pop(0)),
    Broken("constant_hidden_in_deployment", "IX068", lambda b: b.data["deployment"].update(vocab_leaves=16)),
    Broken("axis_hidden_in_deployment", "IX068", lambda b: b.data["deployment"].update(TP=2)),
    # evidence
    Broken("record_missing", "IX040", after=lambda b: b.name(ATTENTION, "sha256:" + "a" * 64)),
    Broken("record_edited", "IX040", after=_forge),
    Broken("record_ill_formed", "IX040", after=_no_record),
    Broken("record_of_another_function", "IX041", after=lambda b: b.name(
        SILU, b.provider("embedding.lookup/1")["discharge"]["evidence"])),
    Broken("record_of_another_provider", "IX041", after=_subject(SILU, name="own.other")),
    Broken("record_of_another_source", "IX041", after=_subject(SILU, source="sha256:" + "b" * 64)),
    Broken("record_of_another_version", "IX041", after=_subject(LIBRARY, version="3.8.0 build 1")),
    Broken("record_of_other_settings", "IX041", after=_subject(LIBRARY, settings={"threads": 4})),
    Broken("record_of_another_torch", "IX041",
           after=lambda b: b.claims["environment"]["versions"][1].update(admitted=["2.12.0"])),
    Broken("record_of_another_arch", "IX042", after=lambda b: b.replace(SILU, arch="sm90")),
    Broken("record_expired", "IX043", after=lambda b: b.replace(SILU, expires=stamp(NOW - 3600))),
    Broken("record_from_the_future", "IX043", after=lambda b: b.replace(SILU, made=stamp(NOW + 9 * DAY))),
    Broken("record_too_old", "IX043", after=_too_old),
    Broken("clock_past_every_expiry", "IX043", after=lambda b: setattr(b, "now", NOW + 400 * DAY)),
    Broken("record_without_resume", "IX044", after=_checks("resume_exactness")),
    Broken("record_without_backward", "IX044", after=_checks("backward")),
    Broken("record_of_other_constants", "IX044", after=lambda b: b.region("attention")["constants"].update(kv_segment=16)),
    Broken("degree_uncovered", "IX045", after=_domain("partition_invariance", TP=(1,))),
    Broken("dtype_uncovered", "IX046", after=_domain("batch_invariance", dtype=("bfloat16",))),
    Broken("case_uncovered", "IX046", after=_domain("case_parity", case=("engine_prefill", "trainer_fwd"))),
    Broken("elements_differ", "IX047", after=_checks("case_parity", differing=3)),
    Broken("nothing_compared", "IX047", after=_checks("case_parity", elements=0)),
    Broken("no_control", "IX047", after=_checks("batch_invariance", controls=())),
    Broken("control_that_passed", "IX047", after=_control(differing=0)),
    Broken("quick_record", "IX048", after=lambda b: b.replace(SILU, profile="quick")),
    Broken("record_unsigned", "IX049", after=_demand(0)),
    Broken("signed_by_another_key", "IX049", after=_demand(0, signing=1)),
    Broken("signature_spoilt", "IX049", after=_demand(0, signing=0, spoil=True)),
    Broken("process_of_another_torch", "IX050", after=_another_torch),
)  # fmt: skip


@cache
def _base() -> Any:
    return read(BASE).value


def bench(folder: Path, broken: Broken | None = None) -> Bench:
    """Return the base contract with its records in a folder, spoilt as `broken` says."""
    made = Bench(data=copy.deepcopy(_base()), store=Store([folder / "evidence"]))
    if broken is not None:
        broken.before(made)
    made.prove()
    if broken is not None:
        broken.after(made)
    return made


def found(folder: Path, broken: Broken | None = None) -> list[Finding]:
    """Write a contract and its records into a folder, lint the file, and return the findings."""
    made = bench(folder, broken)
    path = folder / f"{broken.name if broken else 'base'}.yaml"
    path.write_text(made.text(yaml.dump(made.data, Dumper=_Dumper, sort_keys=False)), encoding="utf-8")
    return list(check(path, store=made.store, now=made.now, live=made.live).findings)


def table(folder: Path) -> list[tuple[Broken, list[Finding]]]:
    """Return every broken contract with its findings, each in a folder of its own."""
    out = []
    for broken in BROKEN:
        (folder / broken.name).mkdir(parents=True)
        out.append((broken, found(folder / broken.name, broken)))
    return out


def main() -> int:
    """Print the table; 1 where a contract breaks another rule than its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="DIR", help="keep the files and their records here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.write or Path(temporary)
        (folder / "base").mkdir(parents=True)
        base = found(folder / "base")
        rows = table(folder)
    wrong = [row for row in rows if {one.rule for one in row[1]} != {row[0].rule}]
    for broken, findings in rows:
        first = findings[0] if findings else None
        words = f"{first.path}: {first.message}" if first else "nothing found"
        rules = ", ".join(sorted({one.rule for one in findings})) or "none"
        verdict = "ok " if (broken, findings) not in wrong else "NOT"
        print(f"{verdict} {broken.name:<34} {broken.rule} -> {rules}  {words[:120]}")
    missing = sorted(set(all_rules()) - {broken.rule for broken in BROKEN})
    print(f"\nbase: {len(base)} findings")
    print(
        f"{len(rows)} broken contracts, {len(rows) - len(wrong)} break exactly their rule; rules without one: {missing or 'none'}"
    )
    return int(bool(wrong or base or missing))


if __name__ == "__main__":
    sys.exit(main())
