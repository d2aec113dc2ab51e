# SPDX-License-Identifier: Apache-2.0
"""Reads a model's config.json into the shape facts that contracts constrain; needs neither torch nor transformers.

Both spellings of transformers are read: `rope_scaling` and `torch_dtype` of version 4, `rope_parameters` and `dtype` of
version 5. Of a multimodal wrapper the language model's part counts. What a file leaves out takes the default of the
architecture where transformers has one; what has none is an error that names the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from isoexec.contracts.errors import ContractError
from isoexec.contracts.parts import Value

__all__ = ["FIELDS", "ModelConfig", "config_of", "facts_of", "read_config", "text_facts"]

MAX_BYTES = 10_000_000
_NESTED = ("text_config", "language_config", "llm_config")
_DTYPES = ("bfloat16", "float16", "float32")

FIELDS: dict[str, str] = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "q_width": "num_attention_heads x head_dim",
    "kv_width": "num_key_value_heads x head_dim",
    "qkv_width": "(num_attention_heads + 2 num_key_value_heads) x head_dim",
    "vocab_size": "vocab_size",
    "activation": "hidden_act",
    "tied_head": "tie_word_embeddings",
    "attention_bias": "attention_bias",
    "attention_gate": "attn_output_gate",
    "sliding_window": "use_sliding_window",
    "quantization": "quantization_config",
    "dtype": "dtype",
    "rope_type": "rope_scaling",
    "rotary_dim": "partial_rotary_factor",
    "partial_rotary": "partial_rotary_factor",
    "rope_interleave": "rope_interleave",
    "mrope": "rope_parameters.mrope_section",
    "mtp_layers": "num_nextn_predict_layers",
    "dense_layers": "first_k_dense_replace or mlp_only_layers",
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "expert_groups": "n_group",
    "expert_topk_groups": "topk_group",
    "experts_per_group": "num_experts / n_group",
    "router_score": "scoring_func",
    "router_bias": "topk_method",
    "router_normalize": "norm_topk_prob",
    "shared_size": "shared_expert_intermediate_size",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_dim": "qk_nope_head_dim",
    "qk_rope_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "o_width": "num_attention_heads x v_head_dim",
    "linear_layers": "layer_types",
    "full_layers": "layer_types",
    "gdn_key_heads": "linear_num_key_heads",
    "gdn_value_heads": "linear_num_value_heads",
    "gdn_key_dim": "linear_key_head_dim",
    "gdn_value_dim": "linear_value_head_dim",
    "gdn_key_width": "linear_num_key_heads x linear_key_head_dim",
    "gdn_value_width": "linear_num_value_heads x linear_value_head_dim",
    "gdn_conv_width": "linear_conv_kernel_dim",
}
"""Fact -> the field of config.json that says it, or the fields it is derived from."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A config.json: its `path`, `architectures`, all of its fields as `whole`, and the language model's as `text`.

    `part` is the name of the nested part that `text` came from, "" for a file without one.
    """

    path: str
    architectures: tuple[str, ...]
    whole: Mapping[str, object]
    text: Mapping[str, object]
    part: str = ""


def read_config(model: Path | str) -> ModelConfig:
    """Read `config.json` of a model's folder, or the file itself; raises ContractError naming path, field and fix."""
    path = Path(model)
    if path.is_dir() or path.suffix != ".json":
        path = path / "config.json"
    try:
        with path.open("rb") as handle:
            data = handle.read(MAX_BYTES + 1)
    except OSError as error:
        raise ContractError(
            f"cannot be read: {error.strerror}",
            path=str(path),
            fix="give the folder of a model with a config.json",
        ) from error
    if len(data) > MAX_BYTES:
        raise ContractError(
            f"larger than {MAX_BYTES} bytes", path=str(path), fix="a config is a few kilobytes"
        )
    try:
        value = json.loads(data, object_pairs_hook=_unique(str(path)))
    except json.JSONDecodeError as error:
        raise ContractError(
            f"not JSON: {error.msg}", path=str(path), line=error.lineno, fix="mend the syntax"
        ) from error
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ContractError(
            f"not JSON: {type(error).__name__}", path=str(path), fix="save the file as UTF-8 JSON"
        ) from error
    if not isinstance(value, dict):
        raise ContractError(
            "is not a JSON object", path=str(path), fix="give a model's config.json, not another JSON file"
        )
    return config_of(value, str(path))


def config_of(whole: Mapping[str, object], path: str = "") -> ModelConfig:
    """Make a config of the fields of a config.json; raises ContractError for one without architecture."""
    part = next((name for name in _NESTED if isinstance(whole.get(name), Mapping)), "")
    nested = whole.get(part) if part else None
    text = nested if isinstance(nested, Mapping) else whole
    names = whole.get("architectures") or text.get("architectures")
    if not isinstance(names, (list, tuple)) or not names or not all(isinstance(one, str) for one in names):
        found = "missing" if names is None else f"{names!r}"
        raise ContractError(
            f"wanted a list with the name of the model's class, found {found}",
            path=path,
            field="architectures",
            fix='add it as the checkpoint was saved, such as ["Qwen3ForCausalLM"]',
        )
    return ModelConfig(
        path=path, architectures=tuple(map(str, names)), whole=dict(whole), text=dict(text), part=part
    )


def facts_of(config: ModelConfig) -> dict[str, Value]:
    """Return the facts of a model by name; raises ContractError for a field that is missing or of another type.

    Sizes and widths are in elements, counts in layers, heads or experts.
    """
    fields = _Fields(config)
    facts: dict[str, Value] = {}
    for read in (_common, _rope, _attention, _experts, _mla, _linear_attention):
        facts |= read(fields, facts)
    return facts


def text_facts(text: Mapping[str, object], architectures: tuple[str, ...]) -> dict[str, Value]:
    """Return the facts of a language model's fields as an engine holds them, such as `hf_text_config.to_dict()`."""
    return facts_of(ModelConfig(path="", architectures=architectures, whole=text, text=text))


def _unique(path: str) -> Callable[[list[tuple[str, object]]], dict[str, object]]:
    def make(pairs: list[tuple[str, object]]) -> dict[str, object]:
        out: dict[str, object] = {}
        for name, value in pairs:
            if name in out:
                raise ContractError("is given twice", path=path, field=name, fix="keep one of them")
            out[name] = value
        return out

    return make


class _Fields:
    """Typed reading of a config's fields; an error names the field as it stands in the file."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.architecture = config.architectures[0]

    def get(self, *names: str) -> tuple[str, object]:
        """Return the first of the names that is given, with its value; the first name and None where none is."""
        for name in names:
            if self.config.text.get(name) is not None:
                return name, self.config.text[name]
        return names[0], None

    def has(self, *names: str) -> bool:
        return self.get(*names)[1] is not None

    def fail(self, name: str, wanted: str, value: object, fix: str = "") -> NoReturn:
        found = "nothing" if value is None else repr(value)[:80]
        inner = f"{self.config.part}." if self.config.part and name in self.config.text else ""
        raise ContractError(
            f"wanted {wanted}, found {found}",
            path=self.config.path,
            field=f"{inner}{name}",
            fix=fix or "mend the config.json, or take it from the checkpoint again",
        )

    def integer(self, *names: str, least: int = 1, default: int | None = None) -> int:
        name, value = self.get(*names)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            self.fail(name, f"an integer of at least {least}", value)
        return value

    def boolean(self, *names: str, default: bool) -> bool:
        name, value = self.get(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, "true or false", value)
        return value

    def text(self, *names: str, default: str) -> str:
        name, value = self.get(*names)
        if value is None:
            return default
        if not isinstance(value, str):
            self.fail(name, "text", value)
        return value

    def mapping(self, name: str) -> Mapping[str, object]:
        value = self.config.text.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.fail(name, "a mapping", value)
        return value

    def is_a(self, *stems: str) -> bool:
        return self.architecture.startswith(stems)


def _common(fields: _Fields, facts: Mapping[str, Value]) -> dict[str, Value]:
    del facts
    out: dict[str, Value] = {
        "hidden_size": fields.integer("hidden_size"),
        "layers": fields.integer("num_hidden_layers"),
        "heads": fields.integer("num_attention_heads"),
        "vocab_size": fields.integer("vocab_size"),
        "activation": fields.text("hidden_act", default="silu"),
        "tied_head": _tied(fields),
        "quantization": _quantization(fields),
        "mtp_layers": fields.integer(
            "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", least=0, default=0
        ),
    }
    name, value = fields.get("dtype", "torch_dtype")
    if value is not None:
        if not isinstance(value, str):
            fields.fail(name, "the name of a dtype", value)
        out["dtype"] = value.removeprefix("torch.")
    return out


def _tied(fields: _Fields) -> bool:
    # a wrapper ties its head at the top, and its language model's part may keep that class's default
    whole = fields.config.whole.get("tie_word_embeddings")
    if isinstance(whole, bool) and fields.config.part:
        return whole
    return fields.boolean("tie_word_embeddings", default=False)


def _quantization(fields: _Fields) -> str:
    """Name the checkpoint's quantization, "none" for plain weights; one that does not say its method is "unknown"."""
    for name in ("quantization_config", "compression_config"):
        for values in (fields.config.whole, fields.config.text):
            value = values.get(name)
            if isinstance(value, Mapping):
                method = value.get("quant_method")
                return method if isinstance(method, str) else "unknown"
            if value is not None:
                fields.fail(name, "a mapping", value)
    return "none"


def _rope(fields: _Fields, facts: Mapping[str, Value]) -> dict[str, Value]:
    del facts
    old, new = fields.mapping("rope_scaling"), fields.mapping("rope_parameters")
    kinds: dict[str, str] = {}
    for name, given in (("rope_scaling", old), ("rope_parameters", new)):
        # version 5 may keep one mapping a layer type
        nested = [part for part in given.values() if isinstance(part, Mapping)]
        for part in nested or ([given] if given else []):
            kind = part.get("rope_type", part.get("type", "default"))
            if not isinstance(kind, str):
                fields.fail(f"{name}.rope_type", "the name of a rope", kind)
            kinds[name] = (
                "default" if kind == "mrope" else kind
            )  # for text, its three positions are one position
    if len(set(kinds.values())) > 1:
        fields.fail("rope_parameters.rope_type", f"{kinds['rope_scaling']}, as rope_scaling says", kinds)
    return {
        "rope_type": next(iter(kinds.values()), "default"),
        "mrope": any(part.get("mrope_section") is not None for part in (old, new)),
    }


def _rotary_dim(fields: _Fields, head_dim: int) -> int:
    default = 0.25 if fields.is_a("Qwen3Next", "Qwen3_5") else 1.0
    new = fields.mapping("rope_parameters")
    name, value = fields.get("partial_rotary_factor")
    if "partial_rotary_factor" in new:
        name, value = "rope_parameters.partial_rotary_factor", new["partial_rotary_factor"]
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        fields.fail(name, "a share of the head above 0 and at most 1", value)
    return int(head_dim * value)


def _attention(fields: _Fields, facts: Mapping[str, Value]) -> dict[str, Value]:
    biased = fields.is_a("MiMo", "Qwen2")  # hard-wired there; some of their files do not say it
    gated = fields.is_a("Qwen3Next", "Qwen3_5")
    heads = int(facts["heads"])
    out: dict[str, Value] = {
        "attention_bias": fields.boolean("attention_bias", "qkv_bias", default=biased),
        "attention_gate": fields.boolean("attn_output_gate", default=gated),
        "sliding_window": fields.boolean("use_sliding_window", default=False)
        or "sliding_attention" in _layer_types(fields),
    }
    if fields.has("kv_lora_rank"):
        return out
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        fields.fail("num_key_value_heads", f"a divisor of num_attention_heads {heads}", kv_heads)
    if not fields.has("head_dim") and int(facts["hidden_size"]) % heads:
        fields.fail("head_dim", f"it, since {heads} heads do not divide hidden_size", None)
    head_dim = fields.integer("head_dim", default=int(facts["hidden_size"]) // heads)
    rotary = _rotary_dim(fields, head_dim)
    return {
        **out,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "rotary_dim": rotary,
        "partial_rotary": rotary != head_dim,
    }


def _layer_types(fields: _Fields) -> list[str]:
    """Return the kind of attention of every layer, [] where the file says nothing of it."""
    name, value = fields.get("layer_types")
    if value is None:
        return []
    count = fields.integer("num_hidden_layers")
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        fields.fail(name, "a list of names", value)
    if len(value) != count:
        fields.fail(name, f"{count} entries, one a layer", f"{len(value)} entries")
    return [str(one) for one in value]


def _linear_attention(fields: _Fields, facts: Mapping[str, Value]) -> dict[str, Value]:
    if not fields.has("linear_num_value_heads"):
        return {}
    layers = int(facts["layers"])
    types = _layer_types(fields)
    if not types:
        every = fields.integer("full_attention_interval", default=4)
        types = [("linear" if (one + 1) % every else "full") + "_attention" for one in range(layers)]
    strange = sorted(set(types) - {"linear_attention", "full_attention"})
    if strange:
        fields.fail("layer_types", "linear_attention and full_attention", ", ".join(strange))
    out: dict[str, Value] = {
        "linear_layers": types.count("linear_attention"),
        "full_layers": types.count("full_attention"),
        "gdn_key_heads": fields.integer("linear_num_key_heads"),
        "gdn_value_heads": fields.integer("linear_num_value_heads"),
        "gdn_key_dim": fields.integer("linear_key_head_dim"),
        "gdn_value_dim": fields.integer("linear_value_head_dim"),
        "gdn_conv_width": fields.integer("linear_conv_kernel_dim"),
    }
    if int(out["gdn_value_heads"]) % int(out["gdn_key_heads"]):
        fields.fail(
            "linear_num_value_heads",
            f"a multiple of linear_num_key_heads {out['gdn_key_heads']}",
            out["gdn_value_heads"],
        )
    out["gdn_key_width"] = int(out["gdn_key_heads"]) * int(out["gdn_key_dim"])
    out["gdn_value_width"] = int(out["gdn_value_heads"]) * int(out["gdn_value_dim"])
    return out


def _mla(fields: _Fields, facts: Mapping[str, Value]) -> dict[str, Value]:
    if not fields.has("kv_lora_rank"):
        return {}
    v_head_dim = fields.integer("v_head_dim")
    return {
        "q_lora_rank": fields.integer("q_lora_rank", least=0, default=0),
        "kv_lora_rank": fields.integer("kv_lora_rank"),
        "qk_nope_dim": fields.integer("qk_nope_head_dim"),
        "qk_rope_dim": fields.integer("qk_rope_head_dim"),
        "v_head_dim": v_head_dim,
        "o_width": int(facts["heads"]) * v_head_dim,
        "rope_interleave": fields.boolean("rope_interleave", default=True),
    }


def _experts(fields: _Fields, facts: Mapping[str, Value]) -> dict[str, Value]:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    if not fields.has(*names):
        return {"intermediate_size": fields.integer("intermediate_size")}
    experts = fields.integer(*names)
    top = fields.integer("num_experts_per_tok")
    if top > experts:
        fields.fail("num_experts_per_tok", f"at most the {experts} experts there are", top)
    size = fields.integer("moe_intermediate_size")
    groups = fields.integer("n_group", default=1)
    kept = fields.integer("topk_group", default=1)
    if experts % groups:
        fields.fail("n_group", f"a divisor of the {experts} experts", groups)
    if kept > groups:
        fields.fail("topk_group", f"at most the {groups} groups there are", kept)
    noaux = fields.is_a("Deepseek", "Glm4Moe")
    dense = _dense_layers(fields, int(facts["layers"]))
    shared = fields.integer("n_shared_experts", least=0, default=0) * size
    out: dict[str, Value] = {
        "experts": experts,
        "experts_per_token": top,
        "expert_size": size,
        "expert_groups": groups,
        "expert_topk_groups": kept,
        "experts_per_group": experts // groups,
        "dense_layers": dense,
        "router_score": fields.text("scoring_func", default="sigmoid" if noaux else "softmax"),
        "router_bias": fields.text("topk_method", default="noaux_tc" if noaux else "greedy") == "noaux_tc",
        "router_normalize": fields.boolean("norm_topk_prob", default=not fields.is_a("Qwen3Moe")),
        "shared_size": fields.integer("shared_expert_intermediate_size", least=0, default=shared),
    }
    if dense:
        out["intermediate_size"] = fields.integer("intermediate_size")
    return out


def _dense_layers(fields: _Fields, layers: int) -> int:
    """Count the layers with a plain feed-forward part."""
    kinds = fields.config.text.get("mlp_layer_types")
    if isinstance(kinds, (list, tuple)):
        if len(kinds) != layers:
            fields.fail("mlp_layer_types", f"{layers} entries, one a layer", f"{len(kinds)} entries")
        return sum(kind == "dense" for kind in kinds)
    first = fields.integer(
        "first_k_dense_replace", least=0, default=1 if fields.is_a("Glm4MoeLite") else 0
    )  # the class's default
    every = fields.integer("moe_layer_freq", "decoder_sparse_step", default=1)
    name, only = fields.get("mlp_only_layers")
    if only is not None and (
        not isinstance(only, (list, tuple)) or not all(type(one) is int and 0 <= one < layers for one in only)
    ):
        fields.fail(name, f"a list of layers from 0 to {layers - 1}", only)
    plain = set(only) if isinstance(only, (list, tuple)) else set()
    from_zero = fields.has("moe_layer_freq")  # one counts from layer 0, the other from layer 1
    plain |= {one for one in range(layers) if one < first or (one if from_zero else one + 1) % every}
    return len(plain)
