"""The tensors that a model's config.json promises: names and un-quantized shapes, layer by layer.

Computed from the config and the rules of the architecture's YAML file, not taken from a checkpoint, so that what is
missing can be told from what is there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

from glmquant.checkpoint.layers import Layers

Shape = tuple[int, ...]
MAX_SIZE_TEXT = 200
NO_TOWER: Mapping[str, Any] = MappingProxyType({})
WHOLE = ("top", "vision")
"""Kinds of tensors that belong to no layer of the language model."""


@dataclass(frozen=True, slots=True)
class TensorRule:
    """Tensors of one name and shape.

    Attributes:
        name: with `{a,b}` for one of several names, `{expert}` for the numbers of the routed experts and `{block}` for
            those of the vision tower's blocks; behind the layer's prefix, or whole for `where` `top` and `vision`.
        shape: sizes; each a number, a key of config.json, or a sum, difference or product of these.
        where: `top`, `vision`, or the layers that have it: `all`, `main`, `mtp`, `moe` or another kind
            (checkpoint/layers.py).
        dtype: as published, in the words of safetensors.
        optional: whether a checkpoint may leave it out.
        when, unless: config keys that must be true, or false, for it to be there; '' for no condition.
    """

    name: str
    shape: tuple[str | int, ...]
    where: str
    dtype: str = "BF16"
    optional: bool = False
    when: str = ""
    unless: str = ""


class Promise(NamedTuple):
    """An un-quantized tensor."""

    shape: Shape
    dtype: str
    optional: bool


def promised_tensors(
    rules: Sequence[TensorRule], config: Mapping[str, Any], layers: Layers, tower: Mapping[str, Any] = NO_TOWER
) -> Iterator[tuple[str, Promise]]:
    """Every tensor by name, optional ones too.

    Args:
        config: the part of config.json with the language model's keys (LayerKeys.of).
        tower: the part that speaks of the vision tower (LayerKeys.tower); empty if there is none.

    Raises:
        KeyError: a size is no natural number in the config; names the key.
    """
    for rule in rules:
        whole, sizes = rule.where in WHOLE, tower if rule.where == "vision" else config
        if (rule.when and not sizes.get(rule.when)) or (rule.unless and sizes.get(rule.unless)):
            continue
        numbers = () if whole else _layers(rule.where, layers)
        if not numbers and (not whole or not sizes):
            continue
        promise = Promise(tuple(_size(size, sizes) for size in rule.shape), rule.dtype, rule.optional)
        tails = [
            tail
            for name in alternatives(rule.name)
            for one in _numbered(name, "{expert}", layers.routed_experts)
            for tail in _numbered(one, "{block}", layers.vision)
        ]
        for prefix in [layers.at(number) for number in numbers] or [""]:
            for tail in tails:
                yield prefix + tail, promise


def expected_tensors(
    rules: Sequence[TensorRule], config: Mapping[str, Any], layers: Layers, tower: Mapping[str, Any] = NO_TOWER
) -> dict[str, Shape]:
    """Tensor name -> shape before packing, of all that must be there.

    Empty when a size is not in the config; without the vision tower when it is one of the tower's.
    """
    must = [rule for rule in rules if not rule.optional]
    model = [rule for rule in must if rule.where != "vision"]
    for some in (must, model):
        try:
            return {name: found.shape for name, found in promised_tensors(some, config, layers, tower)}
        except KeyError:
            continue
    return {}


def allowed_tensors(rules: Sequence[TensorRule], config: Mapping[str, Any], layers: Layers) -> frozenset[str]:
    """Names of tensors that may be there or not."""
    optional = [rule for rule in rules if rule.optional]
    try:
        return frozenset(name for name, _ in promised_tensors(optional, config, layers))
    except KeyError:
        return frozenset()


def _layers(where: str, layers: Layers) -> Sequence[int]:
    if where == "main":
        return range(layers.count)
    return [*layers.main(where), *(layers.mtp if layers.also_mtp(where) else ())]


def _numbered(name: str, mark: str, count: int) -> list[str]:
    return [name.replace(mark, str(number)) for number in range(count)] if mark in name else [name]


def alternatives(template: str) -> list[str]:
    """`a.{b,c}` as `a.b` and `a.c`; `{layer}` and `{expert}` stay."""
    parts = re.split(r"(\{[^{}]*,[^{}]*\})", template)
    choices = [part[1:-1].split(",") if part.startswith("{") and "," in part else [part] for part in parts]
    return ["".join(words) for words in product(*choices)]


def _size(size: str | int, config: Mapping[str, Any]) -> int:
    return size if isinstance(size, int) else _evaluate(parse_size(size), config)


@lru_cache
def parse_size(text: str) -> ast.expr:
    """A size expression.

    Raises:
        ValueError: it is something else than names, numbers, +, -, *, // and parentheses.
    """
    if len(text) > MAX_SIZE_TEXT:
        raise ValueError(f"a text of {len(text):,} characters is no size")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        raise ValueError(f"{text!r} is no size") from err
    for node in ast.walk(tree):
        number = isinstance(node, ast.Constant) and type(node.value) is int
        if not number and not isinstance(node, _ALLOWED):
            raise ValueError(f"{text!r} is no size: only names, numbers, +, -, *, // and parentheses")
    return tree


_ALLOWED = (ast.BinOp, ast.Name, ast.Load, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv)


def _evaluate(node: ast.expr, config: Mapping[str, Any]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=key):
            found = config.get(key)
            if type(found) is not int or found < 0:
                raise KeyError(key)
            return found
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _evaluate(left, config), _evaluate(right, config)
            if isinstance(op, ast.Add):
                return a + b
            if isinstance(op, ast.Sub):
                return a - b
            if isinstance(op, ast.Mult):
                return a * b
            if b == 0:
                raise KeyError(ast.unparse(right))
            return a // b
    raise KeyError(ast.unparse(node))
