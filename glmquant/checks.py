"""What is wrong with a checkpoint's files, before any engine is asked: the first half of the validator.

Each check yields mistakes that name tensors and files. What an engine does about one is not decided here: `keys`
point into the `mistakes` of the engines' YAML files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glmquant.checkpoint.formats import BLOCK_FP8, FP8_BLOCK, FP8_SCALES
from glmquant.checkpoint.header import TensorInfo
from glmquant.checkpoint.layers import LayerKeys, Layers, layers_of
from glmquant.checkpoint.layout import Shape
from glmquant.checkpoint.source import CONFIG, INDEX, Checkpoint, read_json
from glmquant.engines.block_fp8 import is_block_fp8
from glmquant.errors import GlmquantError
from glmquant.text import short

BLOCK = 32
SIDE_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class Mistake:
    """One kind of mistake and where it is.

    Attributes:
        code: stable, for scripts.
        message: what is wrong.
        names: tensors, modules or files; the value is the key of what engines do about it, '' where none is asked.
        severity: used as it is where no engine is asked; else engines decide between it and `error`.
    """

    code: str
    message: str
    names: Mapping[str, str]
    fix: str = ""
    severity: str = "error"


@dataclass
class _Pile:
    """Mistakes of one kind are collected, so that a thousand tensors make one finding."""

    found: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, code: str, name: str, key: str | None = None) -> None:
        self.found.setdefault(code, {})[name] = code if key is None else key


def total_size(checkpoint: Checkpoint) -> Iterator[Mistake]:
    if checkpoint.weight_map is not None and checkpoint.total_size != checkpoint.nbytes:
        yield Mistake(
            "total-size",
            f"{INDEX}: total_size is {checkpoint.total_size}, the tensors have {checkpoint.nbytes} bytes",
            {INDEX: ""},
            "Write the sum of the tensors' bytes, without headers.",
            "warning",
        )


def side_files(checkpoint: Checkpoint) -> Iterator[Mistake]:
    """Files a server wants beside the weights; a chat template may also be inside tokenizer_config.json."""
    present = set(checkpoint.side_files)
    missing = [name for name in SIDE_FILES if name not in present]
    if TEMPLATE not in present and not _has_template(checkpoint.folder / "tokenizer_config.json"):
        missing.append(TEMPLATE)
    if missing:
        yield Mistake(
            "side-file-missing",
            "files that servers read beside the weights are not there",
            dict.fromkeys(missing, ""),
            "Copy them from the source checkpoint.",
            "info",
        )


def _has_template(path: Path) -> bool:
    try:
        return bool(read_json(path).get("chat_template"))
    except GlmquantError:
        return False


# Tensors


def tensors(
    checkpoint: Checkpoint,
    formats: Mapping[str, str],
    expected: Mapping[str, Shape],
    layers: Layers,
    allowed: Collection[str] = (),
    others: tuple[str, ...] = (),
    mtp: bool = True,
) -> Iterator[Mistake]:
    """Every tensor the config promises is there, in the one shape and dtype that engines read right.

    Args:
        allowed: names that may be there or not.
        others: names that begin so are part of the model too (a vision tower).
        mtp: whether the model type has MTP layers.
    """
    pile = _Pile()
    undeclared = "absent" if mtp and not layers.mtp else "stray"
    stray = _strays(checkpoint.tensors, formats, expected, allowed, others, layers, undeclared, pile)
    _missing(checkpoint.tensors, expected, layers, others, stray, pile)
    known = {m: kind for m, kind in formats.items() if not expected or f"{m}.weight" in expected}
    _scales(checkpoint.tensors, known, expected, stray, pile)
    _shapes(checkpoint.tensors, formats, expected, pile)
    for module, kind in formats.items():
        if kind not in ("mxfp4", "plain", BLOCK_FP8):
            pile.add("weight-dtype", f"{module}.weight", f"weight-dtype.{kind}")
        if checkpoint.tensors[f"{module}.weight"].dtype == "I8":
            pile.add("weight-int8", f"{module}.weight", "")
        if kind == "mxfp4" and module.endswith(".kv_b_proj"):
            pile.add("kv-b-proj-packed", module)
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(".e_score_correction_bias") and tensor.dtype != "F32":
            pile.add("correction-bias-dtype", name)
    for code, names in pile.found.items():
        message, fix = TENSOR_CODES[code]
        yield Mistake(code, message, names, fix, "info" if code == "weight-int8" else "warning")


TENSOR_CODES = {
    "tensor-missing": (
        "config.json promises these tensors, and they are not stored",
        "Quantize again from a complete source, or copy them from it.",
    ),
    "indexer-missing": (
        "layers that choose their own tokens (indexer_types: full) have no indexer tensors",
        "Copy them from the source, or correct the schedule in config.json.",
    ),
    "mtp-absent": (
        "config.json declares an MTP layer, and no tensor of it is stored",
        "Add the MTP tensors, or set num_nextn_predict_layers to 0.",
    ),
    "mtp-undeclared": (
        "the tensors of an MTP layer, or of another further one, are stored, and config.json does not declare it",
        "Set num_nextn_predict_layers to the number of MTP layers; remove what is no MTP layer.",
    ),
    "vision-absent": (
        "config.json declares a vision tower, and no tensor of it is stored: text works, images are seen through noise",
        "Copy it from the source if images are to be understood.",
    ),
    "tensor-unexpected": ("tensors that are no part of this model", "Remove or rename them."),
    "tensor-misnamed": (
        "packed weights or scales under a name that engines do not read",
        "Name them <module>.weight and <module>.weight_scale.",
    ),
    "scale-orphan": ("scales that belong to no packed weight", "Remove them."),
    "experts-3d": (
        "routed experts stacked in one 3-D tensor",
        "Store every expert's gate_proj, up_proj and down_proj as its own weight and weight_scale.",
    ),
    "scale-missing": ("packed weights without a scale", "Quantize these weights again."),
    "scale-dtype": ("scales that are not uint8", "Store the same bytes as uint8."),
    "scale-shape": ("scales that are not [out, in / 32]", "One byte per row and block of 32, not broadcast."),
    "tensor-shape": ("tensors whose shape is not what config.json says", "Is config.json of another model?"),
    "weight-dtype": ("weights that are neither packed (uint8) nor bf16, f16 or f32", "Store packed weights as uint8."),
    "weight-int8": ("packed weights stored as int8: read as if they were uint8", "Store them as uint8."),
    "kv-b-proj-packed": (
        "kv_b_proj is packed",
        "Keep kv_b_proj bf16: engines split it at load and have no MXFP4 path.",
    ),
    "correction-bias-dtype": (
        "the router's e_score_correction_bias is not F32: rounding it picks other experts (sglang PR #37133)",
        "Copy it as F32 from the source.",
    ),
}

# Ends of names of a packed weight or a scale, in formats and tools that engines do not read as Quark's.
_FOREIGN = re.compile(
    r"(weight_(scale_inv|packed|scale_2|quantizer[._]\w+)|(input|output)_scale|qweight|scales?|\w*_scale)"
)
_EXPERT_STACK = re.compile(r"(gate_up_proj|down_proj|gate_proj|up_proj)([._]\w+)*")


def _strays(
    tensors: Mapping[str, TensorInfo],
    formats: Mapping[str, str],
    expected: Mapping[str, Shape],
    allowed: Collection[str],
    others: tuple[str, ...],
    layers: Layers,
    undeclared: str,
    pile: _Pile,
) -> dict[str, str]:
    """Sort out what should not be there; module (or container) -> the stray tensor that stands in for its own."""
    stands_for: dict[str, str] = {}
    container = f".{layers.container}" if layers.container else " "
    for name in tensors:
        if name in expected or name in allowed or (others and name.startswith(others)):
            continue
        module, _, tail = name.rpartition(".")
        lost_weight = f"{module}.weight" in expected and f"{module}.weight" not in tensors
        if tail == "weight_scale" and (lost_weight or formats.get(module) == "mxfp4"):
            continue
        if tail in FP8_SCALES and formats.get(module) == BLOCK_FP8:
            continue
        layer = layers.number(name)
        head, found, below = name.partition(container + ".")
        if layer is not None and layers.count + len(layers.mtp) <= layer:
            pile.add("mtp-undeclared", name, f"mtp-undeclared.{undeclared}")
        elif found and _EXPERT_STACK.fullmatch(below):
            pile.add("experts-3d", name)
            stands_for[head + container] = name
        elif _FOREIGN.fullmatch(tail) or ".weight_quantizer." in name:
            owner = name.partition(".weight_quantizer.")[0] if ".weight_quantizer." in name else module
            wanted = f"{owner}.weight" in tensors and formats.get(owner) == "mxfp4"
            lost = f"{owner}.weight_scale" not in tensors if wanted else f"{owner}.weight" not in tensors
            if lost and (wanted or f"{owner}.weight" in expected):
                pile.add("tensor-misnamed", name)
                stands_for[owner] = name
            else:
                pile.add("scale-orphan", name)
        elif expected:
            kind = "rotary" if "rotary_emb.inv_freq" in name else "other"
            pile.add("tensor-unexpected", name, f"tensor-unexpected.{kind}")
    return stands_for


def _missing(
    tensors: Mapping[str, TensorInfo],
    expected: Mapping[str, Shape],
    layers: Layers,
    others: tuple[str, ...],
    stray: Mapping[str, str],
    pile: _Pile,
) -> None:
    mtp = [layers.at(n) for n in layers.mtp]
    absent = [*mtp, *(prefix for prefix in others if any(name.startswith(prefix) for name in expected))]
    for name in tensors:
        absent = [prefix for prefix in absent if not name.startswith(prefix)] if absent else absent
    for prefix in absent:
        if prefix in mtp:
            pile.add("mtp-absent", prefix)
        else:
            pile.add("vision-absent", prefix, "")
    for name in expected:
        if name in tensors or name.startswith(tuple(absent)):
            continue
        module = name.rpartition(".")[0]
        if module in stray or module.partition(".experts.")[0] + ".experts" in stray:
            continue
        pile.add("indexer-missing" if ".indexer." in name else "tensor-missing", name)


def _scales(
    tensors: Mapping[str, TensorInfo],
    formats: Mapping[str, str],
    expected: Mapping[str, Shape],
    stray: Mapping[str, str],
    pile: _Pile,
) -> None:
    for module, kind in formats.items():
        if kind != "mxfp4":
            continue
        name, weight = f"{module}.weight_scale", tensors[f"{module}.weight"]
        scale = tensors.get(name)
        if scale is None:
            if module not in stray:
                pile.add("scale-missing", name)
            continue
        if scale.dtype != "U8":
            pile.add("scale-dtype", name, f"scale-dtype.{scale.dtype.lower()}")
        rows, columns = expected.get(f"{module}.weight", (weight.shape[0], weight.shape[1] * 2))
        want = (rows, columns // BLOCK)
        if scale.shape != want or columns % BLOCK:
            pile.add("scale-shape", name, f"shape.{_difference(scale.shape, want)}")


def _shapes(
    tensors: Mapping[str, TensorInfo], formats: Mapping[str, str], expected: Mapping[str, Shape], pile: _Pile
) -> None:
    for name, want in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if name.endswith(".weight") and formats.get(name.removesuffix(".weight")) == "mxfp4":
            want = (*want[:-1], want[-1] // 2)
        if tensor.shape != want:
            pile.add("tensor-shape", name, f"shape.{_difference(tensor.shape, want)}")


def _difference(found: Sequence[int], want: Sequence[int]) -> str:
    """How it is not as it should be: `rank`, `both`, `short`, `tall` (rows), `broadcast`, `narrow`, `wide`."""
    if len(found) == len(want) == 1:
        return "short" if found[0] < want[0] else "tall"
    if len(found) != len(want) or len(want) != 2:
        return "rank"
    if found[0] != want[0] and found[1] != want[1]:
        return "both"
    if found[0] != want[0]:
        return "short" if found[0] < want[0] else "tall"
    if found[1] == 1:
        return "broadcast"
    return "narrow" if found[1] < want[1] else "wide"


def place(module: str, fused: bool, layers: Layers, roles: Mapping[str, str]) -> str:
    """Where a module's tensors go in an engine, which decides how its loader takes a wrong one.

    Args:
        fused: the shared expert is one more expert of the container.
        roles: Architecture.roles.
    """
    _, _, own = module.rpartition(".")
    role = roles.get(".".join(module.split(".")[-2:])) or roles.get(own)
    side = role if role in ("up", "down") else None
    if layers.container and f".{layers.container}." in module:
        return f"experts.{side}"
    if fused and layers.shared and f".{layers.shared}." in module:
        return f"experts.{side}"
    if side:
        return "row" if side == "down" else f"pair.{side}"
    return {"row": "row", "qkv": "pair.qkv"}.get(role or "", "linear")


# config.json


def schedule(config: Mapping[str, Any], layers: Layers, keys: LayerKeys) -> Iterator[Mistake]:
    """Which layers have an indexer is said twice, for different engines; both must be there and agree.

    Args:
        config: the part of config.json with the language model's keys.
    """
    rules = dict(keys.sets).get("indexer", ())
    if not rules or rules[0].kind != "words" or len(rules) < 2:
        return
    formula = any(config.get(rule.key) is not None for rule in rules[1:])
    types = config.get(rules[0].key) is not None
    try:
        named = layers_of(rules[1:], config, layers.count) if formula and types else set(layers.indexer)
    except GlmquantError as err:
        yield Mistake("indexer-schedule", err.message, {CONFIG: "indexer-schedule.differ"}, err.hint)
        return
    if named != layers.indexer:
        what, key = "indexer_types and the keys index_topk_freq, index_skip_topk_offset, index_topk_pattern", "differ"
        yield Mistake(
            "indexer-schedule",
            f"{what} name different layers: {_some(named ^ layers.indexer)}",
            {CONFIG: f"indexer-schedule.{key}"},
            "Take both from the source's config.json.",
        )
    elif types and not formula and len(layers.indexer) < layers.count:
        yield Mistake(
            "indexer-schedule",
            "config.json has indexer_types, but not index_topk_freq and index_skip_topk_offset",
            {CONFIG: "indexer-schedule.types-only"},
            "Take both from the source's config.json.",
            "warning",
        )


def _some(numbers: Iterable[int]) -> str:
    first = sorted(numbers)
    return ", ".join(map(str, first[:5])) + (", ..." if len(first) > 5 else "")


def quantization(config: Mapping[str, Any]) -> Iterator[Mistake]:
    """The keys of quantization_config that engines read, and whether they say MXFP4."""

    def wrong(code: str, key: str, message: str, fix: str = "", severity: str = "warning") -> Mistake:
        return Mistake(code, message, {CONFIG: key}, fix, severity)

    block = config.get("quantization_config")
    if not isinstance(block, dict):
        text = "config.json has no quantization_config"
        yield wrong("config-not-quantized", "config.not-quantized", text, severity="error")
        return
    if block.get("quant_method") != "quark":
        found = block.get("quant_method")
        yield wrong(
            "config-method",
            "config.quant_method",
            f"quantization_config.quant_method is {short(found)}, not 'quark'",
            "glmquant checks AMD Quark's format only.",
            "error",
        )
        return
    for key in ("layer_quant_config", "layer_type_quant_config"):
        if not isinstance(block.get(key), dict):
            yield wrong("config-key", f"config.{key}", f"quantization_config.{key} must be a map", "Write {}.")
        elif block[key] and not (key == "layer_quant_config" and all(map(is_block_fp8, block[key].values()))):
            some = ", ".join(map(short, list(block[key])[:3]))
            yield Mistake(
                "layer-config",
                f"quantization_config.{key} gives some layers a format of their own ({some}"
                "): glmquant does not model this, its verdicts are for global_quant_config alone",
                {CONFIG: ""},
                "",
                "warning",
            )
    export = block.get("export")
    if not isinstance(export, dict) or not isinstance(export.get("kv_cache_group"), list):
        what = "export" if not isinstance(export, dict) else "kv_cache_group"
        name = "export" if what == "export" else "export.kv_cache_group"
        yield wrong(
            "config-key",
            f"config.{what}",
            f"quantization_config.{name} must be a {'map' if what == 'export' else 'list'}",
            'Write "export": {"kv_cache_group": []}.',
        )
    yield from _scheme(block.get("global_quant_config"), wrong)
    exclude = block.get("exclude")
    if "exclude" not in block or exclude is None:
        key = "config.exclude-absent" if "exclude" not in block else "config.exclude-null"
        yield wrong("config-key", key, "quantization_config.exclude must be a list", "See glmquant exclusions fix.")
    elif not isinstance(exclude, list) or not all(isinstance(entry, str) for entry in exclude):
        text = "quantization_config.exclude must be a list of texts"
        yield wrong("config-key", "config.exclude-type", text, severity="error")


# What engines compare before they call a tensor MXFP4: sglang 0.5.23 layers/quantization/quark/quark.py:830-879.
MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": BLOCK, "scale_format": "e8m0"}


def _scheme(block: Any, wrong: Any) -> Iterator[Mistake]:
    name = "quantization_config.global_quant_config"
    if not isinstance(block, dict):
        yield wrong("config-key", "config.global", f"{name} must be a map")
        return
    for which in ("weight", "input_tensors"):
        spec = block.get(which)
        if isinstance(spec, list):
            yield wrong("config-scheme", "config.spec-list", f"{name}.{which} is a list, not one map")
            continue
        if not isinstance(spec, dict):
            yield wrong("config-scheme", f"config.{which}-absent", f"{name}.{which} is not there")
            continue
        bad = [
            f"{key} {short(spec.get(key))} instead of {value!r}"
            for key, value in MXFP4.items()
            if spec.get(key) != value
        ]
        if "is_dynamic" not in spec:
            yield wrong("config-scheme", "config.dynamic-absent", f"{name}.{which} does not say is_dynamic")
        elif spec["is_dynamic"] is (which == "weight"):
            bad.append(f"is_dynamic {short(spec['is_dynamic'])}")
        if bad:
            key = next((key for key, value in MXFP4.items() if spec.get(key) != value), "is_dynamic")
            yield wrong(
                "config-scheme",
                f"config.{which}.{key}",
                f"{name}.{which} is not what engines call MXFP4: {', '.join(bad)}",
                "Write the block that AMD Quark writes for MXFP4.",
            )
    for which in ("output_tensors", "bias"):
        if block.get(which):
            yield wrong("config-scheme", "config.output", f"{name}.{which} must be null")


# Tensor parallelism

SIZES = (1, 2, 4, 8, 16)


def tensor_parallel(
    config: Mapping[str, Any],
    formats: Mapping[str, str],
    shapes: Mapping[str, Shape],
    layers: Layers,
    roles: Mapping[str, str],
) -> list[int]:
    """Tensor-parallel sizes at which no block (32 of MXFP4, 128 x 128 of FP8) is cut apart and heads divide evenly.

    Column-parallel weights are cut by rows, row-parallel ones (o_proj, down_proj) along the blocks.
    """
    heads = config.get("num_attention_heads")
    cut = {
        (place(module, False, layers, roles), shapes[f"{module}.weight"])
        for module, kind in formats.items()
        if kind == "mxfp4" and len(shapes.get(f"{module}.weight", ())) == 2
    }
    fp8 = {
        (place(module, False, layers, roles), shapes[f"{module}.weight"])
        for module, kind in formats.items()
        if kind == BLOCK_FP8 and len(shapes.get(f"{module}.weight", ())) == 2
    }
    legal = []
    for size in SIZES:
        fits = all(
            columns % (size * BLOCK) == 0 if where.endswith(("row", "down")) else rows % size == 0
            for where, (rows, columns) in cut
            if where not in ("pair.qkv", "linear")
        )
        fits = fits and all(_whole_fp8(where, shape, size) for where, shape in fp8)
        if fits and (type(heads) is not int or heads % size == 0):
            legal.append(size)
    return legal


def _whole_fp8(where: str, shape: Shape, size: int) -> bool:
    """Whether blocks stay whole; a single rank has to have whole ones only where weights lie side by side.

    Source: sglang 0.5.23 layers/quantization/fp8.py validate_block_quant_shapes:570-610.
    """
    rows, columns = shape
    if where in ("pair.qkv", "linear"):
        return True  # not cut, or by heads
    if where.endswith(("row", "down")):
        return size == 1 or columns % (size * FP8_BLOCK[1]) == 0
    return rows % (size * FP8_BLOCK[0]) == 0
