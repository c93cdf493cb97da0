"""Tiny checkpoints with one thing wrong each (or nothing): what test_verdicts.py puts to validator and engines."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ckpt

from glmquant.checkpoint.layers import read_layers
from glmquant.engines.targets import Target, parse_targets
from glmquant.exclusions import resolve
from glmquant.recipe import load_architecture

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

ARCHITECTURE = load_architecture("glm_moe_dsa")
TARGETS = parse_targets("sglang>=0.5.13,vllm")
# Formats of the four recipes; 256 experts are needed for sglang to consider fusing the shared expert.
RECIPES = {
    "moe": frozenset({"routed", "shared"}),
    "moe-mtp": frozenset(ckpt.GROUPS),
    "routed": frozenset({"routed"}),
    "routed-mtp": frozenset({"routed", "mtp_routed"}),
}
# Small: layer 0 dense, 1 and 2 MoE, 3 the MTP layer; indexers on 0, 1 and 3.
LAYERS = 3
MTP = f"model.layers.{LAYERS}"
P1, P2 = "model.layers.1", "model.layers.2"


ENGINES = ("sglang", "vllm")


@dataclass(frozen=True)
class Case:
    """One checkpoint: formats `fp4`, the list that glmquant writes for them, then `change`.

    `damaged`: a tensor's own data cannot be right, so that loading it is no good sign. `unseen`: what goes wrong
    does so after the loader of these engines, so that the harness cannot tell.
    """

    name: str
    fp4: frozenset[str]
    change: Callable[[Tensors, dict[str, Any]], None]
    experts: int = 8
    damaged: bool = False
    unseen: tuple[str, ...] = ()

    def write(self, folder: Any) -> Any:
        cfg = config(self.experts)
        return ckpt.write(folder, good_list(cfg, self.fp4), self.fp4, cfg=cfg, mutate=self.change)


def config(experts: int = 8) -> dict[str, Any]:
    # 256 wide experts (and, for vLLM, rows) need no padding, which would hide what happens at the real sizes.
    hidden = 64 if experts > 8 else 256
    return ckpt.config(
        experts=experts, layers=LAYERS, hidden_size=hidden, moe_intermediate_size=256, intermediate_size=128
    )


def formats_of(cfg: dict[str, Any], fp4: Iterable[str]) -> dict[str, str]:
    linear = {"linear", "router", *ckpt.GROUPS}
    return {name: "mxfp4" if kind in fp4 else "plain" for name, _, kind in ckpt.modules(cfg) if kind in linear}


def good_list(cfg: dict[str, Any], fp4: Iterable[str], targets: Iterable[Target] = TARGETS, form: str = "auto") -> Any:
    return resolve(formats_of(cfg, fp4), read_layers(cfg), ARCHITECTURE, tuple(targets), form).texts


# Changes


def nothing(tensors: Tensors, cfg: dict[str, Any]) -> None:
    pass


def exclude(change: Callable[[list[str]], Any]) -> Callable[[Tensors, dict[str, Any]], None]:
    """The list, changed in place or replaced by what `change` returns."""

    def apply(tensors: Tensors, cfg: dict[str, Any]) -> None:
        entries = cfg["quantization_config"]["exclude"]
        found = change(entries)
        cfg["quantization_config"]["exclude"] = entries if found is None else list(found)

    return apply


def add(*entries: str) -> Callable[[Tensors, dict[str, Any]], None]:
    return exclude(lambda found: [*found, *entries])


def remove(*globs: str) -> Callable[[Tensors, dict[str, Any]], None]:
    def apply(found: list[str]) -> list[str]:
        kept = [e for e in found if not any(fnmatch.fnmatchcase(e, g) for g in globs)]
        assert len(kept) < len(found), (globs, found)
        return kept

    return exclude(apply)


def only(*entries: str) -> Callable[[Tensors, dict[str, Any]], None]:
    return exclude(lambda found: entries)


def tensors(change: Callable[[Tensors], None]) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda found, cfg: change(found)


def drop(*globs: str) -> Callable[[Tensors, dict[str, Any]], None]:
    def apply(found: Tensors) -> None:
        names = [n for n in found if any(fnmatch.fnmatchcase(n, g) for g in globs)]
        assert names, globs
        for name in names:
            del found[name]

    return tensors(apply)


def rename(pattern: str, to: str) -> Callable[[Tensors, dict[str, Any]], None]:
    def apply(found: Tensors) -> None:
        names = [n for n in found if re.search(pattern, n)]
        assert names, pattern
        for name in names:
            found[re.sub(pattern, to, name)] = found.pop(name)

    return tensors(apply)


def alter(glob: str, change: Callable[[Any], Any]) -> Callable[[Tensors, dict[str, Any]], None]:
    def apply(found: Tensors) -> None:
        names = [n for n in found if fnmatch.fnmatchcase(n, glob)]
        assert names, glob
        for name in names:
            found[name] = change(found[name])

    return tensors(apply)


def flip(*globs: str) -> Callable[[Tensors, dict[str, Any]], None]:
    """Store these modules in the other format, and leave the list as it is."""

    def apply(found: Tensors) -> None:
        import torch

        names = [n[:-7] for n in found if n.endswith(".weight") and any(fnmatch.fnmatchcase(n[:-7], g) for g in globs)]
        assert names, globs
        for name in names:
            weight = found[f"{name}.weight"]
            rows, columns = weight.shape
            if weight.dtype is torch.uint8:
                del found[f"{name}.weight_scale"]
                found[f"{name}.weight"] = torch.ones(rows, columns * 2, dtype=torch.bfloat16) / 8
            else:
                found[f"{name}.weight"] = torch.full((rows, columns // 2), 0x21, dtype=torch.uint8)
                found[f"{name}.weight_scale"] = torch.full((rows, columns // 32), 120, dtype=torch.uint8)

    return tensors(apply)


def both(*changes: Callable[[Tensors, dict[str, Any]], None]) -> Callable[[Tensors, dict[str, Any]], None]:
    def apply(found: Tensors, cfg: dict[str, Any]) -> None:
        for change in changes:
            change(found, cfg)

    return apply


def setting(path: str, value: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    """Set a key of config.json (`quantization_config.export`); `...` removes it."""

    def apply(found: Tensors, cfg: dict[str, Any]) -> None:
        *parents, key = path.split(".")
        for parent in parents:
            cfg = cfg[parent]
        if value is ...:
            del cfg[key]
        else:
            cfg[key] = value

    return apply


def spec(which: str, **values: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    def apply(found: Tensors, cfg: dict[str, Any]) -> None:
        place = cfg["quantization_config"]["global_quant_config"][which]
        for key, value in values.items():
            if value is ...:
                del place[key]
            else:
                place[key] = value

    return apply


Q = "quantization_config."
REGEXES = {
    "attention": r"re:.*\.self_attn\..*",
    "dense": r"re:model\.layers\.0\.mlp\..*",
    "shared": r"re:model\.layers\.\d+\.mlp\.shared_experts\..*",
    "mtp": rf"re:model\.layers\.{LAYERS}(\..*)?$",
    "decoder": r"re:model\.decoder\..*",
    "eh_proj": r"re:.*eh_proj$",
}


def leaves(fp4: Iterable[str], experts: int = 8) -> list[str]:
    """What AMD Quark writes: every un-quantized Linear by its checkpoint name."""
    return ckpt.unquantized(config(experts), set(fp4))


def cases() -> Iterator[Case]:
    for recipe in ("moe-mtp", "moe", "routed", "routed-mtp"):
        for number in (256, 8):
            yield Case(f"good {recipe} {number}", RECIPES[recipe], nothing, number)
    yield from _entries()
    yield from _formats()
    yield from _scales()
    yield from _missing()
    yield from _configs()
    yield from _fusion()


def _entries() -> Iterator[Case]:
    moe, mtp, routed, rmtp = (RECIPES[r] for r in ("moe", "moe-mtp", "routed", "routed-mtp"))
    yield Case("no list", moe, only())
    yield Case("leaves moe", moe, only(*leaves(moe)))
    yield Case("leaves moe-mtp", mtp, only(*leaves(mtp)))
    yield Case("leaves routed", routed, only(*leaves(routed)))
    yield Case("leaves routed-mtp", rmtp, only(*leaves(rmtp)))
    yield Case("leaves and the bare layer", moe, only(*leaves(moe), MTP))
    yield Case("only the bare layer for MTP", moe, only(*(e for e in leaves(moe) if MTP not in e), MTP))
    yield Case("globs", moe, only("*self_attn*", "*mlp.gate", "*lm_head", "*mlp.gate_proj", f"*layers.{LAYERS}.*"))
    yield Case("regexes", moe, only(*(REGEXES[k] for k in ("attention", "dense", "mtp", "decoder", "eh_proj"))))
    yield Case("regexes routed", routed, only(*REGEXES.values()))
    yield Case("regexes, MTP by its layer only", moe, only(*(REGEXES[k] for k in ("attention", "dense", "mtp"))))
    yield Case("regex covers packed MTP experts", mtp, add(rf"re:model\.layers\.{LAYERS}\..*"))
    yield Case("regex covers packed draft experts", mtp, add(r"re:model\.decoder\..*"))
    yield Case("regex covers packed experts", moe, add(r"re:model\.layers\.1\..*"))
    yield Case("regex without escapes reaches further", moe, add("re:model.layers.1.mlp.exp"))
    yield Case("regex on leaf experts only", moe, add(r"re:model\.layers\.1\.mlp\.experts\..*"))
    yield Case("regex on packed shared experts", moe, add(r"re:.*shared_experts.*"))
    yield Case(
        "parent prefixes",
        moe,
        only(*(f"model.layers.{i}.self_attn" for i in range(LAYERS + 1)), "model.layers.0.mlp", MTP),
    )
    yield Case("wrong prefix", moe, exclude(lambda found: [f"model.language_model.{e}" for e in found]))
    yield Case("language_model prefix", moe, exclude(lambda found: [f"language_model.{e}" for e in found]))
    yield Case("stray expert leaf", moe, add(f"{P1}.mlp.experts.0.down_proj"))
    yield Case("stray MTP expert leaf", mtp, add(f"{MTP}.mlp.experts.0.down_proj"))
    yield Case("glob below a container", moe, add(f"{P1}.mlp.experts.*"))
    yield Case("container excluded but packed", moe, add(f"{P1}.mlp.experts"))
    yield Case("draft container excluded but packed", mtp, add("model.decoder.mlp.experts"))
    yield Case("MTP container excluded but packed", mtp, add(f"{MTP}.mlp.experts"))
    yield Case("fused name excluded but packed", moe, add(f"{P1}.mlp.shared_experts.gate_up_proj"))
    yield Case("shared down_proj excluded but packed", moe, add(f"{P1}.mlp.shared_experts.down_proj"))
    yield Case(
        "shared gate and up excluded but packed",
        moe,
        add(f"{P1}.mlp.shared_experts.gate_proj", f"{P1}.mlp.shared_experts.up_proj"),
    )
    yield Case("half a packed pair", moe, add(f"{P1}.mlp.shared_experts.gate_proj"))
    yield Case(
        "draft shared excluded but packed",
        mtp,
        add(*(f"model.decoder.mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down"))),
    )
    yield Case(
        "MTP shared excluded but packed",
        mtp,
        add(*(f"{MTP}.mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down"))),
    )
    yield Case(
        "harmless entries",
        moe,
        add(
            "lm_head",
            "model.embed_tokens",
            f"{P1}.mlp.gate",
            f"{P1}.input_layernorm",
            f"{P1}.self_attn.indexers_proj",
            "mtp.fc",
        ),
    )
    yield Case("entries twice", moe, exclude(lambda found: found + found))
    yield Case(
        "without harmless entries",
        moe,
        exclude(
            lambda found: [e for e in found if "lm_head" not in e and "mlp.gate" not in e and "weights_proj" not in e]
        ),
    )
    yield Case("invalid regex", moe, add("re:("))
    yield Case("regex that matches all", moe, add("re:"))
    for layer in (0, 1):
        for name in (
            "q_a_proj",
            "kv_a_proj_with_mqa",
            "q_b_proj",
            "kv_b_proj",
            "o_proj",
            "indexer.wq_b",
            "indexer.wk",
            "indexer.weights_proj",
        ):
            yield Case(f"without {layer} {name}", moe, remove(f"model.layers.{layer}.self_attn.{name}"))
    yield Case(
        "without both of the pair", moe, remove(f"{P1}.self_attn.q_a_proj", f"{P1}.self_attn.kv_a_proj_with_mqa")
    )
    yield Case(
        "fused name for the pair",
        moe,
        both(
            remove(f"{P1}.self_attn.q_a_proj", f"{P1}.self_attn.kv_a_proj_with_mqa"),
            add(f"{P1}.self_attn.fused_qkv_a_proj_with_mqa", f"{P1}.self_attn.fused_qkv_a_proj"),
        ),
    )
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield Case(f"without dense {name}", moe, remove(f"model.layers.0.mlp.{name}"))
    yield Case("without all o_proj", moe, both(remove("*.o_proj")))
    yield Case("without lm_head", moe, remove("lm_head"))
    literal = [
        *leaves(moe),
        *(draft_name(e) for e in leaves(moe) if MTP in e),
        "model.decoder.mlp.experts",
        f"{MTP}.mlp.experts",
    ]
    for name in (
        "eh_proj",
        "self_attn.q_b_proj",
        "self_attn.o_proj",
        "self_attn.indexer.wk",
        "mlp.shared_experts.down_proj",
        "mlp.shared_experts.up_proj",
    ):
        gone = {f"{MTP}.{name}", draft_name(f"{MTP}.{name}")}
        yield Case(f"literal without MTP {name}", moe, only(*(e for e in literal if e not in gone)))
    yield Case("literal without MTP experts", moe, only(*(e for e in literal if ".mlp.experts" not in e)))
    yield Case(
        "literal, one MTP expert leaf",
        moe,
        only(*(e for e in literal if ".mlp.experts" not in e), f"{MTP}.mlp.experts.0.up_proj"),
    )
    yield Case(
        "literal, MTP container only", moe, only(*(e for e in literal if ".mlp.experts" not in e), f"{MTP}.mlp.experts")
    )
    yield Case(
        "literal, leaf regex for MTP experts",
        moe,
        only(*(e for e in literal if ".mlp.experts" not in e), rf"re:{MTP}\.mlp\.experts\..*"),
    )
    yield Case(
        "literal, all experts by leaf of layer 1",
        moe,
        both(
            flip(f"{P1}.mlp.experts.*"),
            add(*(f"{P1}.mlp.experts.{e}.{p}_proj" for e in range(8) for p in ("gate", "up", "down"))),
        ),
    )
    yield Case("literal, container of layer 1", moe, both(flip(f"{P1}.mlp.experts.*"), add(f"{P1}.mlp.experts")))


def draft_name(name: str) -> str:
    glue = any(part in name for part in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
    return name.replace(MTP, "model" if glue else "model.decoder")


def _formats() -> Iterator[Case]:
    moe, mtp = RECIPES["moe"], RECIPES["moe-mtp"]
    for name in (
        f"{P1}.self_attn.q_a_proj",
        f"{P1}.self_attn.q_b_proj",
        f"{P1}.self_attn.kv_b_proj",
        f"{P1}.self_attn.o_proj",
        f"{P1}.self_attn.kv_a_proj_with_mqa",
        f"{P1}.self_attn.indexer.wq_b",
        f"{P1}.self_attn.indexer.wk",
        f"{P1}.mlp.gate",
        "lm_head",
        "model.layers.0.mlp.down_proj",
        "model.layers.0.mlp.gate_proj",
        f"{MTP}.eh_proj",
        f"{MTP}.self_attn.o_proj",
        f"{MTP}.mlp.experts.0.up_proj",
        f"{MTP}.mlp.shared_experts.down_proj",
        f"{MTP}.mlp.shared_experts.*",
        f"{MTP}.mlp.experts.*",
        f"{P1}.mlp.experts.3.down_proj",
        f"{P1}.mlp.experts.3.gate_proj",
        f"{P1}.mlp.experts.3.*",
        f"{P1}.mlp.experts.*",
        f"{P1}.mlp.experts.*.down_proj",
        f"{P1}.mlp.experts.*.gate_proj",
        f"{P1}.mlp.shared_experts.*",
        f"{P1}.mlp.shared_experts.down_proj",
        f"{P1}.mlp.shared_experts.up_proj",
    ):
        yield Case(f"flipped {name}", moe, flip(name))
    for name in ("self_attn.q_b_proj", "self_attn.o_proj", "eh_proj", "mlp.shared_experts.down_proj"):
        module = f"{MTP if name == 'eh_proj' else P1}.{name}"
        yield Case(
            f"packed and not in the list: {name}",
            moe,
            both(flip(module), exclude(lambda f, m=module: [e for e in f if e not in (m, draft_name(m))])),
        )
    yield Case(
        "packed kv_b_proj and not in the list",
        moe,
        both(flip(f"{P1}.self_attn.kv_b_proj"), remove(f"{P1}.self_attn.kv_b_proj")),
        unseen=ENGINES,
    )
    yield Case(
        "packed pair and not in the list",
        moe,
        both(
            flip(f"{P1}.self_attn.q_a_proj", f"{P1}.self_attn.kv_a_proj_with_mqa"),
            remove(f"{P1}.self_attn.q_a_proj", f"{P1}.self_attn.kv_a_proj_with_mqa"),
        ),
    )
    yield Case(
        "packed half pair and not in the list",
        moe,
        both(
            flip(f"{P1}.self_attn.q_a_proj"), remove(f"{P1}.self_attn.q_a_proj", f"{P1}.self_attn.kv_a_proj_with_mqa")
        ),
    )
    yield Case(
        "packed half pair, half in the list",
        moe,
        both(flip(f"{P1}.self_attn.q_a_proj"), remove(f"{P1}.self_attn.q_a_proj")),
    )
    yield Case(
        "packed dense MLP and not in the list",
        moe,
        both(flip("model.layers.0.mlp.*_proj"), remove("model.layers.0.mlp.*_proj")),
    )
    yield Case(
        "packed indexer and not in the list",
        moe,
        both(flip(f"{P1}.self_attn.indexer.w*_b"), remove(f"{P1}.self_attn.indexer.wq_b")),
    )
    yield Case(
        "packed indexer wk and not in the list",
        moe,
        both(flip(f"{P1}.self_attn.indexer.wk"), remove(f"{P1}.self_attn.indexer.wk")),
    )
    yield Case("MTP flipped to bf16", mtp, flip(f"{MTP}.mlp.experts.*"))
    yield Case("bf16 container with packed down_proj", moe, flip(f"{MTP}.mlp.experts.*.down_proj"))
    yield Case("bf16 container with one packed down_proj", moe, flip(f"{MTP}.mlp.experts.3.down_proj"))
    yield Case("bf16 container with packed up_proj", moe, flip(f"{MTP}.mlp.experts.*.up_proj"))
    yield Case("f16 attention", moe, alter("*.self_attn.*_proj.weight", lambda t: t.half()))
    yield Case("f32 router", moe, alter("*.mlp.gate.weight", lambda t: t.float()))
    yield Case("f32 o_proj", moe, alter(f"{P1}.self_attn.o_proj.weight", lambda t: t.float()))
    yield Case("fp4 dtype", moe, alter(f"{P1}.mlp.experts.*.weight", lambda t: t.view(_torch().float4_e2m1fn_x2)))
    yield Case(
        "fp8 o_proj", moe, alter(f"{P1}.self_attn.o_proj.weight", lambda t: t.to(_torch().float8_e4m3fn)), damaged=True
    )
    yield Case("3-D experts", moe, tensors(_three_d))
    yield Case("3-D experts of the MTP layer", moe, tensors(lambda found: _three_d(found, MTP)))


def _torch() -> Any:
    import torch

    return torch


def _three_d(found: Tensors, layer: str = P1) -> None:
    torch = _torch()
    prefix = f"{layer}.mlp.experts"
    for suffix in ("weight", "weight_scale"):
        if f"{prefix}.0.up_proj.{suffix}" not in found:
            continue
        up = [
            torch.cat([found.pop(f"{prefix}.{e}.gate_proj.{suffix}"), found.pop(f"{prefix}.{e}.up_proj.{suffix}")])
            for e in range(8)
        ]
        down = [found.pop(f"{prefix}.{e}.down_proj.{suffix}") for e in range(8)]
        tail = suffix.removeprefix("weight")
        found[f"{prefix}.gate_up_proj{tail}"] = torch.stack(up)
        found[f"{prefix}.down_proj{tail}"] = torch.stack(down)


def _scales() -> Iterator[Case]:
    moe, mtp = RECIPES["moe"], RECIPES["moe-mtp"]
    torch = _torch()
    one = f"{P1}.mlp.experts.3.down_proj.weight_scale"
    for place, name in {
        "down": one,
        "up": one.replace("down", "up"),
        "shared down": f"{P1}.mlp.shared_experts.down_proj.weight_scale",
        "shared gate": f"{P1}.mlp.shared_experts.gate_proj.weight_scale",
    }.items():
        yield Case(f"scale missing {place}", moe, drop(name))
        yield Case(f"scale misnamed _inv {place}", moe, rename(_tail(name), r"\1weight_scale_inv"))
        yield Case(f"scale e8m0 {place}", moe, alter(name, lambda t: t.view(torch.float8_e8m0fnu)))
        yield Case(f"scale f32 {place}", moe, alter(name, lambda t: t.float()))
        yield Case(f"scale [out, 1] {place}", moe, alter(name, lambda t: t[:, :1].clone()), damaged=True)
        yield Case(f"scale group 16 {place}", moe, alter(name, lambda t: t.repeat_interleave(2, 1)), damaged=True)
        yield Case(f"scale half the rows {place}", moe, alter(name, lambda t: t[: len(t) // 2].clone()), damaged=True)
        yield Case(f"scale double rows {place}", moe, alter(name, lambda t: torch.cat([t, t])), damaged=True)
        yield Case(f"scale transposed {place}", moe, alter(name, lambda t: t.T.contiguous()), damaged=True)
        yield Case(f"scale flat {place}", moe, alter(name, lambda t: t.flatten()), damaged=True)
        weight = name.removesuffix("_scale")
        yield Case(f"weight missing {place}", moe, drop(weight))
        yield Case(
            f"weight half the rows {place}", moe, alter(weight, lambda t: t[: len(t) // 2].clone()), damaged=True
        )
        yield Case(
            f"weight half the columns {place}",
            moe,
            alter(weight, lambda t: t[:, : t.shape[1] // 2].clone()),
            damaged=True,
        )
        yield Case(f"weight double columns {place}", moe, alter(weight, lambda t: torch.cat([t, t], 1)), damaged=True)
    yield Case(
        "scale misnamed weight_packed",
        moe,
        rename(rf"^({re.escape(P1)}\.mlp\.experts\.3\.down_proj)\.weight$", r"\1.weight_packed"),
    )
    yield Case("scale missing MTP", mtp, drop(f"{MTP}.mlp.experts.3.down_proj.weight_scale"))
    yield Case("scale missing MTP shared", mtp, drop(f"{MTP}.mlp.shared_experts.down_proj.weight_scale"))
    yield Case(
        "scale misnamed MTP",
        mtp,
        rename(rf"^({re.escape(MTP)}\.mlp\.experts\.3\.down_proj)\.weight_scale$", r"\1.weight_scale_inv"),
    )
    yield Case(
        "scale quantizer name",
        moe,
        rename(rf"^({re.escape(P1)}\.mlp\.experts\.3\.down_proj)\.weight_scale$", r"\1.weight_quantizer.scale"),
    )
    yield Case(
        "stray input_scale",
        moe,
        tensors(lambda f: f.update({f"{P1}.mlp.experts.3.down_proj.input_scale": torch.ones(1)})),
    )
    yield Case(
        "stray input_scale of a pair",
        moe,
        tensors(lambda f: f.update({f"{P1}.mlp.shared_experts.gate_proj.input_scale": torch.ones(1)})),
    )
    yield Case(
        "stray scale of a plain pair",
        moe,
        tensors(lambda f: f.update({"model.layers.0.mlp.gate_proj.weight_scale": torch.ones(1)})),
    )
    yield Case(
        "stray scale of q_a_proj",
        moe,
        tensors(lambda f: f.update({f"{P1}.self_attn.q_a_proj.weight_scale": torch.ones(1)})),
    )
    yield Case(
        "stray scale of the router", moe, tensors(lambda f: f.update({f"{P1}.mlp.gate.weight_scale": torch.ones(1)}))
    )
    yield Case(
        "stray scale of a plain module",
        moe,
        tensors(lambda f: f.update({f"{P1}.self_attn.o_proj.weight_scale": torch.ones(256, 1)})),
    )
    yield Case(
        "o_proj weight_scale_inv stray",
        moe,
        tensors(lambda f: f.update({f"{P1}.self_attn.o_proj.weight_scale_inv": torch.ones(2, 1)})),
    )


def _tail(name: str) -> str:
    head = re.escape(name.removesuffix("weight_scale")).replace(r"\*", ".*")
    return rf"^({head})weight_scale$"


def _missing() -> Iterator[Case]:
    moe, mtp = RECIPES["moe"], RECIPES["moe-mtp"]
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        f"{P1}.input_layernorm.weight",
        f"{P1}.self_attn.q_a_proj.weight",
        f"{P1}.self_attn.kv_a_proj_with_mqa.weight",
        f"{P1}.self_attn.q_b_proj.weight",
        f"{P1}.self_attn.o_proj.weight",
        f"{P1}.self_attn.kv_b_proj.weight",
        f"{P1}.self_attn.indexer.*",
        f"{P1}.self_attn.indexer.k_norm.bias",
        f"{P1}.self_attn.indexer.wk.weight",
        f"{P1}.self_attn.indexer.weights_proj.weight",
        f"{P1}.mlp.gate.weight",
        f"{P1}.mlp.gate.e_score_correction_bias",
        f"{P1}.mlp.experts.7.*",
        f"{P1}.mlp.experts.7.up_proj.*",
        f"{P1}.mlp.shared_experts.*",
        f"{P1}.mlp.shared_experts.gate_proj.*",
        f"{P1}.*",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.*",
        f"{MTP}.*",
        f"{MTP}.eh_proj.weight",
        f"{MTP}.enorm.weight",
        f"{MTP}.shared_head.norm.weight",
        f"{MTP}.self_attn.*",
        f"{MTP}.self_attn.o_proj.weight",
        f"{MTP}.mlp.experts.*",
        f"{MTP}.mlp.experts.7.*",
        f"{MTP}.mlp.shared_experts.*",
        f"{MTP}.self_attn.indexer.*",
        f"{MTP}.mlp.gate.*",
    ):
        yield Case(f"missing {name}", moe, drop(name))
    yield Case("missing expert of a packed MTP layer", mtp, drop(f"{MTP}.mlp.experts.7.*"))
    yield Case("MTP under the name mtp.*", moe, rename(rf"^{re.escape(MTP)}\.", "mtp."))
    yield Case("MTP one layer too far", moe, rename(rf"^model\.layers\.{LAYERS}\.", f"model.layers.{LAYERS + 1}."))
    yield Case("MTP undeclared", moe, setting("num_nextn_predict_layers", 0))
    yield Case("MTP undeclared, key absent", moe, setting("num_nextn_predict_layers", ...))
    yield Case(
        "shared_head.head in the MTP layer",
        moe,
        tensors(
            lambda f: f.update(
                {
                    f"{MTP}.shared_head.head.weight": f["lm_head.weight"].clone(),
                    f"{MTP}.embed_tokens.weight": f["model.embed_tokens.weight"].clone(),
                }
            )
        ),
    )
    yield Case(
        "stray tensor", moe, tensors(lambda f: f.update({f"{P1}.self_attn.rotary_emb.inv_freq": _torch().ones(8)}))
    )
    yield Case(
        "stray module",
        moe,
        tensors(lambda f: f.update({f"{P1}.self_attn.extra_proj.weight": _torch().ones(8, 64).bfloat16()})),
    )
    yield Case(
        "stray layer",
        moe,
        tensors(
            lambda f: f.update({f"model.layers.{LAYERS + 3}.self_attn.o_proj.weight": _torch().ones(8, 64).bfloat16()})
        ),
    )
    yield Case(
        "stray expert",
        moe,
        tensors(
            lambda f: f.update({f"{P1}.mlp.experts.8.up_proj.weight": f[f"{P1}.mlp.experts.7.up_proj.weight"].clone()})
        ),
    )
    yield Case(
        "indexer on a shared layer",
        moe,
        tensors(
            lambda f: f.update(
                {
                    n.replace(".1.", ".2."): t.clone()
                    for n, t in list(f.items())
                    if n.startswith(f"{P1}.self_attn.indexer.")
                }
            )
        ),
    )
    yield Case("model prefix missing", moe, rename(r"^model\.layers\.1\.", "layers.1."))
    yield Case(
        "o_proj of the wrong width",
        moe,
        alter(f"{P1}.self_attn.o_proj.weight", lambda t: t[:, : t.shape[1] // 2].clone()),
        damaged=True,
    )
    yield Case(
        "q_b_proj of the wrong height",
        moe,
        alter(f"{P1}.self_attn.q_b_proj.weight", lambda t: t[: len(t) // 2].clone()),
        damaged=True,
    )
    yield Case(
        "q_a_proj of the wrong height",
        moe,
        alter(f"{P1}.self_attn.q_a_proj.weight", lambda t: t[: len(t) // 2].clone()),
        damaged=True,
    )
    yield Case(
        "norm of the wrong size", moe, alter(f"{P1}.input_layernorm.weight", lambda t: t[:32].clone()), damaged=True
    )
    yield Case("router of the wrong size", moe, alter(f"{P1}.mlp.gate.weight", lambda t: t[:4].clone()), damaged=True)
    yield Case(
        "embedding of the wrong size", moe, alter("model.embed_tokens.weight", lambda t: t[:256].clone()), damaged=True
    )


def _configs() -> Iterator[Case]:
    moe = RECIPES["moe"]
    for key in (
        "export",
        "layer_quant_config",
        "layer_type_quant_config",
        "global_quant_config",
        "exclude",
        "quant_method",
    ):
        yield Case(f"config without {key}", moe, setting(Q + key, ...))
        yield Case(f"config with {key} null", moe, setting(Q + key, None))
    yield Case("config export empty", moe, setting(Q + "export", {}))
    yield Case("config kv_cache_group null", moe, setting(Q + "export.kv_cache_group", None))
    yield Case("config pack_method absent", moe, setting(Q + "export.pack_method", ...))
    yield Case("config kv_cache_quant_config absent", moe, setting(Q + "kv_cache_quant_config", ...))
    yield Case("config quant_method other", moe, setting(Q + "quant_method", "mxfp4"))
    yield Case("config no quantization_config", moe, setting("quantization_config", ...))
    yield Case("config weight is a list", moe, setting(Q + "global_quant_config.weight", [{}]))
    yield Case("config weight null", moe, setting(Q + "global_quant_config.weight", None))
    yield Case("config no input_tensors", moe, setting(Q + "global_quant_config.input_tensors", None), unseen=("vllm",))
    yield Case("config output_tensors absent", moe, setting(Q + "global_quant_config.output_tensors", ...))
    yield Case("config bias absent", moe, setting(Q + "global_quant_config.bias", ...))
    yield Case("config static input", moe, spec("input_tensors", is_dynamic=False))
    yield Case("config dynamic weight", moe, spec("weight", is_dynamic=True))
    yield Case("config no is_dynamic", moe, both(spec("weight", is_dynamic=...), spec("input_tensors", is_dynamic=...)))
    for key in ("dtype", "qscheme", "group_size", "scale_format", "round_method", "scale_type", "observer_cls"):
        yield Case(f"config weight without {key}", moe, spec("weight", **{key: ...}))
        yield Case(f"config input without {key}", moe, spec("input_tensors", **{key: ...}))
    yield Case("config group 16", moe, both(spec("weight", group_size=16), spec("input_tensors", group_size=16)))
    yield Case(
        "config dtype mx",
        moe,
        both(
            spec("weight", dtype="mx", mx_element_dtype="fp4"),
            spec("input_tensors", dtype="mx", mx_element_dtype="fp4"),
        ),
    )
    yield Case(
        "config layer_quant_config speaks of experts",
        moe,
        setting(
            Q + "layer_quant_config",
            {
                "*mlp.experts*": {
                    "weight": ckpt._FP4 | {"is_dynamic": False},
                    "input_tensors": ckpt._FP4 | {"is_dynamic": True},
                    "output_tensors": None,
                    "bias": None,
                }
            },
        ),
    )
    yield Case("config packed_modules_mapping", moe, setting(Q + "packed_modules_mapping", {}))
    yield Case("config no moe_router_dtype", moe, setting("moe_router_dtype", ...))
    yield Case("config exclude with a number", moe, add(3))  # type: ignore[arg-type]
    yield Case(
        "config only indexer_types",
        moe,
        both(
            setting("index_topk_freq", ...), setting("index_skip_topk_offset", ...), setting("index_topk_pattern", ...)
        ),
        unseen=ENGINES,
    )
    yield Case("config only the schedule", moe, setting("indexer_types", ...), unseen=ENGINES)
    yield Case("config schedule says more", moe, setting("index_topk_freq", 1), unseen=ENGINES)
    yield Case("config types say more", moe, setting("indexer_types", ["full"] * LAYERS), unseen=ENGINES)
    yield Case("config types say less", moe, setting("indexer_types", ["full", "shared", "shared"]), unseen=ENGINES)


def _fusion() -> Iterator[Case]:
    """256 experts: the shared expert may be fused, so list and formats meet the gate."""
    moe, mtp, routed, rmtp = (RECIPES[r] for r in ("moe", "moe-mtp", "routed", "routed-mtp"))

    def case(name: str, fp4: frozenset[str], change: Any) -> Case:
        return Case(f"256: {name}", fp4, change, 256)

    for name, fp4 in RECIPES.items():
        yield case(f"leaves {name}", fp4, only(*leaves(fp4, 256)))
        yield case(
            f"leaves and draft names {name}",
            fp4,
            only(*leaves(fp4, 256), *(draft_name(e) for e in leaves(fp4, 256) if MTP in e)),
        )
    yield case("regexes moe", moe, only(*(REGEXES[k] for k in ("attention", "dense", "mtp", "decoder", "eh_proj"))))
    yield case("regexes moe-mtp", mtp, only(*(REGEXES[k] for k in ("attention", "dense", "eh_proj"))))
    yield case("regexes routed", routed, only(*REGEXES.values()))
    yield case(
        "regexes routed-mtp",
        rmtp,
        only(
            *(REGEXES[k] for k in ("attention", "dense", "shared", "eh_proj")),
            r"re:model\.decoder\.mlp\.shared_experts\..*",
        ),
    )
    yield case(
        "hidden regex routed",
        routed,
        only(
            *(REGEXES[k] for k in ("attention", "dense", "mtp", "decoder", "eh_proj")),
            r"re:model\.layers\.\d+\.mlp\.sh.*",
        ),
    )
    yield case("c1", mtp, flip(f"{MTP}.mlp.shared_experts.*"))
    yield case(
        "c1 with its leaves",
        mtp,
        both(
            flip(f"{MTP}.mlp.shared_experts.*"),
            add(*(f"{MTP}.mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down"))),
        ),
    )
    yield case(
        "c1 with draft leaves",
        mtp,
        both(
            flip(f"{MTP}.mlp.shared_experts.*"),
            add(*(f"{p}.mlp.shared_experts.{n}_proj" for p in (MTP, "model.decoder") for n in ("gate", "up", "down"))),
        ),
    )
    yield case("veto entry", moe, add("model.layers.77.mlp.shared_experts.up_proj"))
    yield case("veto entry of the gate", moe, add(f"{P1}.mlp.shared_expert_gate"))
    yield case("veto entry mtp.", moe, add("mtp.layers.0.mlp.shared_experts.up_proj"))
    yield case("veto glob", moe, add("*shared_experts*"))
    yield case("bf16 shared of one layer", moe, flip(f"{P1}.mlp.shared_experts.*"))
    yield case(
        "bf16 shared of one layer, in the list",
        moe,
        both(
            flip(f"{P1}.mlp.shared_experts.*"),
            add(*(f"{P1}.mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down"))),
        ),
    )
    yield case("bf16 shared down_proj of one layer", moe, flip(f"{P1}.mlp.shared_experts.down_proj"))
    yield case("bf16 shared up_proj of one layer", moe, flip(f"{P1}.mlp.shared_experts.up_proj"))
    yield case(
        "shared excluded but packed", moe, add(*(f"{P1}.mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down")))
    )
    yield case("shared scale missing", moe, drop(f"{P1}.mlp.shared_experts.down_proj.weight_scale"))
    yield case("shared missing", moe, drop(f"{P1}.mlp.shared_experts.*"))
    yield case(
        "shared scale misnamed",
        moe,
        rename(_tail(f"{P1}.mlp.shared_experts.down_proj.weight_scale"), r"\1weight_scale_inv"),
    )
    yield case(
        "shared scale [out, 1]", moe, alter(f"{P1}.mlp.shared_experts.up_proj.weight_scale", lambda t: t[:, :1].clone())
    )
    yield case(
        "experts of layer 1 bf16, shared packed", moe, both(flip(f"{P1}.mlp.experts.*"), add(f"{P1}.mlp.experts"))
    )
    yield case(
        "layer 1 wholly bf16",
        moe,
        both(
            flip(f"{P1}.mlp.experts.*", f"{P1}.mlp.shared_experts.*"),
            add(f"{P1}.mlp.experts", *(f"{P1}.mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down"))),
        ),
    )
    yield case(
        "layer 1 wholly bf16, hidden entries",
        moe,
        both(flip(f"{P1}.mlp.experts.*", f"{P1}.mlp.shared_experts.*"), add(r"re:model\.layers\.1\.mlp\..*")),
    )
