"""What an engine's loader did with a checkpoint: shared by sglang_load.py and vllm_load.py.

The loader runs twice over the same model, over parameters filled with 0x00 and then with 0xFF: bytes that
differ afterwards were never written. In the second run each checkpoint tensor is a `Tracked`, which notices
every copy into a parameter.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

MAX_LISTED = 20
TIMEOUT_S = 300


class Tracked(torch.Tensor):
    """A checkpoint tensor that reports where its data was copied to."""

    names: set[str]
    consumed: ClassVar[set[str]] = set()
    odd: ClassVar[list[str]] = []
    narrowed: ClassVar[list[str]] = []

    @classmethod
    def wrap(cls, name: str, tensor: torch.Tensor) -> Tracked:
        tracked = tensor.as_subclass(cls)
        tracked.names = {name}
        return tracked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = getattr(func, "__name__", "")
        if operation == "__set__":  # an attribute, e.g. `.data = `
            return super().__torch_function__(func, types, args, kwargs)
        names = set().union(*(getattr(t, "names", ()) for t in _leaves(args, cls)))
        if operation in ("copy_", "fill_", "__setitem__") and not isinstance(args[0], cls):
            cls.consumed |= names
            if operation == "copy_":
                cls._judge(args[0], args[1], sorted(names))
            with torch._C.DisableTorchFunctionSubclass():
                plain = [a.as_subclass(torch.Tensor) if isinstance(a, cls) else a for a in args]
                return func(*plain, **kwargs)
        out = super().__torch_function__(func, types, args, kwargs)
        for t in _leaves(out, cls):
            t.names = names
        return out

    @classmethod
    def _judge(cls, target: torch.Tensor, source: torch.Tensor, names: list[str]) -> None:
        what = f"{', '.join(names)}: {_brief(source)} -> {_brief(target)}"
        kinds_differ = target.dtype.is_floating_point != source.dtype.is_floating_point
        if kinds_differ or target.shape != source.shape:
            cls.odd.append(what)
        elif target.element_size() < source.element_size():
            cls.narrowed.append(what)


def _leaves(value: Any, cls: type) -> Iterator[Any]:
    if isinstance(value, cls):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _leaves(v, cls)


def _brief(t: torch.Tensor) -> str:
    return f"{str(t.dtype)[6:]}{list(t.shape)}"


class Checkpoint:
    """The tensors that the engine's own iterator handed out, by name."""

    def __init__(self, iterate: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._iterate = iterate
        self.tensors: dict[str, torch.Tensor] = {}

    def weights(self, track: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._iterate():
            self.tensors[name] = tensor
            yield name, Tracked.wrap(name, tensor) if track else tensor

    def name_at(self, address: int) -> str | None:
        for name, t in self.tensors.items():
            if t.data_ptr() <= address < t.data_ptr() + t.numel() * t.element_size():
                return name
        return None


def load_twice(
    model: nn.Module,
    checkpoint: Checkpoint,
    config: Any,
    expected_empty: tuple[str, ...],
    expert_prefix: Callable[[str], str],
) -> dict[str, Any]:
    """Run the engine's load_weights and account for every parameter and every tensor.

    `expected_empty`: ends of names of parameters that a draft takes from the target at run time.
    `expert_prefix`: name of an engine module of routed experts -> its prefix in the checkpoint.
    """
    Tracked.consumed, Tracked.odd, Tracked.narrowed = set(), [], []
    _fill(model, 0x00)
    model.load_weights(checkpoint.weights(track=False))
    first = {n: _bytes(p).clone() for n, p in model.named_parameters()}
    _fill(model, 0xFF)
    model.load_weights(checkpoint.weights(track=True))

    unfilled, idle, from_target, default_scales = {}, [], [], 0
    for name, p in model.named_parameters():
        missing = _real_region(name, p, first[name] != _bytes(p), config).float().mean().item()
        if not missing:
            continue
        if name.endswith((".k_scale", ".v_scale", ".q_scale", ".prob_scale")):
            default_scales += 1  # of the KV cache: built-in values, unless a checkpoint has them
        elif name.endswith(expected_empty):
            from_target.append(name)
        elif _shares_its_indexer(name, config):
            idle.append(name)
        else:
            unfilled[name] = f"{missing:.4f} of {_brief(p)}"
    return {
        "unfilled": unfilled,
        "idle_indexers": sorted(idle),
        "from_target": sorted(from_target),
        "defaulted_kv_scales": default_scales,
        "experts": _compare_experts(model, checkpoint, config, expert_prefix),
        "odd_copies": sorted(Tracked.odd)[:MAX_LISTED],
        "narrowed_copies": sorted(Tracked.narrowed)[:MAX_LISTED],
        "n_tensors": len(checkpoint.tensors),
        "unused": sorted(set(checkpoint.tensors) - Tracked.consumed),
    }


def text(config: Any) -> Any:
    """The language model's part of a config."""
    return getattr(config, "text_config", None) or config


def _shares_its_indexer(name: str, config: Any) -> bool:
    """sglang 0.5.17 and earlier build an indexer on every layer, and never use those of "shared" layers."""
    found = re.match(r"model\.layers\.(\d+)\.self_attn\.indexer\.", name)
    types = getattr(config, "indexer_types", None) or []
    return found is not None and dict(enumerate(types)).get(int(found[1])) == "shared"


def _bytes(p: torch.Tensor) -> torch.Tensor:
    return p.data.reshape(-1).view(torch.uint8)


def _fill(model: nn.Module, byte: int) -> None:
    for p in model.parameters():
        assert p.data.is_contiguous()
        _bytes(p).fill_(byte)


def _real_region(name: str, p: torch.Tensor, mask: torch.Tensor, config: Any) -> torch.Tensor:
    """`mask` over the bytes of `p` without the padding that backends add to routed experts."""
    leaf = name.rpartition(".")[2]
    if not leaf.startswith(("w13_weight", "w2_weight")) or p.dim() != 3:
        return mask
    mask = mask.view(*p.shape, -1)
    packed = 32 if leaf.endswith("scale") else 2 if p.element_size() == 1 else 1
    config = text(config)
    hidden, inner, half = config.hidden_size, config.moe_intermediate_size, p.shape[1] // 2
    if leaf.startswith("w2"):
        return mask[:, :hidden, : inner // packed].reshape(-1)
    rows = torch.cat([mask[:, :inner], mask[:, half : half + inner]], dim=1)
    return rows[:, :, : hidden // packed].reshape(-1)


def _compare_experts(
    model: nn.Module, checkpoint: Checkpoint, config: Any, expert_prefix: Callable[[str], str]
) -> dict[str, Any]:
    """Are the bytes of the routed (and fused shared) experts in the model those of the checkpoint?"""
    same, different = 0, []
    for module_name, module in model.named_modules():
        if getattr(module, "w13_weight", None) is None:
            continue
        prefix = expert_prefix(module_name)
        for suffix in ("weight", "weight_scale"):
            w13, w2 = getattr(module, f"w13_{suffix}", None), getattr(module, f"w2_{suffix}", None)
            if w13 is None or w2 is None:
                continue
            half = w13.shape[1] // 2
            for e in range(w13.shape[0]):
                # a fused shared expert follows the routed ones
                routed = getattr(text(config), "n_routed_experts", None) or text(config).num_experts
                shared = e >= routed
                base = prefix.removesuffix("experts") + "shared_experts" if shared else f"{prefix}.{e}"
                slots = (("gate", w13[e, :half]), ("up", w13[e, half:]), ("down", w2[e]))
                for projection, slot in slots:
                    name = f"{base}.{projection}_proj.{suffix}"
                    t = checkpoint.tensors.get(name)
                    if t is None or not _holds(slot, t):
                        different.append(name)
                    else:
                        same += 1
    return {"same": same, "different": len(different), "first": different[:3]}


def _holds(slot: torch.Tensor, t: torch.Tensor) -> bool:
    return t.dim() == 2 and t.dtype == slot.dtype and torch.equal(slot[: t.shape[0], : t.shape[1]], t)


def schemes(model: nn.Module) -> dict[str, str]:
    """Engine module -> the class that decided how its weight is stored."""
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        scheme = getattr(module, "scheme", None)
        if method is not None:
            found[name] = type(method if scheme is None else scheme).__name__
            backend = getattr(method, "mxfp4_backend", None)  # vLLM: tells W4A4 from weight-only
            if backend is not None:
                found[name] += f"/{backend.value}"
    return found


def describe(error: BaseException, package: str, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """The error, where the engine raised it, and which tensor and parameter it had in hand."""
    out: dict[str, Any] = {"error": {"type": type(error).__name__, "message": str(error)[:1500]}}
    frames = traceback.extract_tb(error.__traceback__)
    frames = [f for f in frames if f"/{package}/" in f.filename] or list(frames)
    places = [f"{f.filename.rpartition(f'/{package}/')[2]}:{f.lineno} {f.name}" for f in frames[-3:]]
    culprit: dict[str, str] = {}
    tb = error.__traceback__
    while checkpoint is not None and tb is not None:
        frame, tb = tb.tb_frame, tb.tb_next
        # the frame of the whole loop holds whichever tensor came last, not the one that failed
        if f"/{package}/" not in frame.f_code.co_filename or frame.f_code.co_name == "do_load_weights":
            continue
        for key, value in frame.f_locals.items():
            if key == "weight_name" and isinstance(value, str):
                culprit[key] = value  # the engine's own name for it
            if not isinstance(value, torch.Tensor):
                continue
            if key in ("param", "param_data", "expert_data", "loaded_weight"):
                culprit[key] = _brief(value)
            if key == "loaded_weight":
                name = checkpoint.name_at(value.data_ptr())
                culprit |= {"tensor": name} if name else {}
    return out | {"where": places, "culprit": culprit or None}


def clean(role: dict[str, Any]) -> bool:
    """Loaded, and every parameter holds what the checkpoint says."""
    return bool(role["loaded"] and not role["unfilled"] and not role["odd_copies"] and not role["experts"]["different"])


def verdict(result: dict[str, Any], roles: tuple[str, ...]) -> dict[str, Any]:
    """Add what only shows over both roles: tensors that neither read, and the overall `ok`."""
    unused = [result[r].pop("unused", None) for r in roles]
    for role, names in zip(roles, unused, strict=True):
        result[role]["n_unused"] = None if names is None else len(names)
    loaded = [set(names) for names in unused if names is not None]
    both = len(roles) == 2 and len(loaded) == 2
    result["consumed_by_neither"] = sorted(loaded[0] & loaded[1]) if both else None
    result["ok"] = all(clean(result[r]) for r in roles) and not result["consumed_by_neither"]
    return result


@contextlib.contextmanager
def collected_warnings() -> Iterator[dict[str, None]]:
    """Every warning logged meanwhile. Not by a handler: engines replace those while they start."""
    seen: dict[str, None] = {}
    make = logging.getLogRecordFactory()

    def factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if record.levelno >= logging.WARNING:
            with contextlib.suppress(Exception):
                seen[record.getMessage()[:300]] = None
        return record

    logging.setLogRecordFactory(factory)
    try:
        yield seen
    finally:
        logging.setLogRecordFactory(make)


def in_child(work: Callable[[], dict[str, Any]], roles: tuple[str, ...]) -> dict[str, Any]:
    """Run `work`, which answers per role, in a forked child: engines keep state that the next must not see."""
    read, write = os.pipe()
    with tempfile.TemporaryFile() as chatter:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(read)
                os.dup2(chatter.fileno(), 1)
                os.dup2(chatter.fileno(), 2)
                signal.alarm(TIMEOUT_S)
                result = work()
                with open(write, "w") as pipe:
                    json.dump(result, pipe)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # no exit handlers: they belong to the parent
        os.close(write)
        with open(read) as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        if status == 0:
            return json.loads(text)
        chatter.seek(0)
        tail = chatter.read().decode(errors="replace")[-3000:]
    message = f"exit status {os.waitstatus_to_exitcode(status)}: {tail}"
    error = {"type": "ProcessDied", "message": message}
    return {role: {"loaded": False, "stage": "died", "error": error, "culprit": None} for role in roles}


def answer_on_stdout() -> Any:
    """Keep stdout for answers: whatever an engine prints goes to stderr."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def checkpoint_path(text: str) -> Path:
    return Path(text).resolve()
