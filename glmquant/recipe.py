"""Recipes: what is quantized, as checked data from exclusions/<model_type>.yaml or a user's own file.

A recipe only allows; everything it does not name stays as it is, and the exclusion list is computed from that.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from glmquant.checkpoint.header import open_regular
from glmquant.checkpoint.layers import LayerKeys, Layers, SetRule, VisionKeys
from glmquant.checkpoint.layout import TensorRule, parse_size
from glmquant.errors import RecipeError
from glmquant.text import short

SCOPES = ("main", "mtp", "all")
# The longest file here has 5 kB; PyYAML needs seconds for a megabyte.
MAX_RECIPE_BYTES = 200_000
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Module:
    """A checkpoint module: the name of a tensor without its last part (`...q_a_proj` of `...q_a_proj.weight`)."""

    name: str
    group: str
    layer: int | None
    is_mtp: bool


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    patterns: tuple[re.Pattern[str], ...]
    about: str


@dataclass(frozen=True, slots=True)
class Alias:
    """How an engine's draft model renames MTP modules.

    `to` has {rest} for the name behind the layer prefix, and may have {layer} for the layer's number.
    """

    engine: str
    modules: tuple[str, ...]
    to: str
    source: str


@dataclass(frozen=True, slots=True)
class Rule:
    """Quantize `group` in the layers of `layers` (main, mtp or all)."""

    group: str
    layers: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refusal:
    when: Mapping[str, str]
    reason: str
    instead: str
    source: str


@dataclass(frozen=True, slots=True)
class Override:
    """A user's pattern over checkpoint module names: a glob, or a full-match regex after `re:`."""

    quantize: bool
    pattern: str

    def matches(self, module: str) -> bool:
        if self.pattern.startswith("re:"):
            return re.fullmatch(self.pattern[3:], module) is not None
        return fnmatchcase(module, self.pattern)

    def __str__(self) -> str:
        return f"--{'quantize' if self.quantize else 'keep'} {self.pattern}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named allow-list, with the user's overrides (a later one wins over an earlier one)."""

    name: str
    about: str
    rules: tuple[Rule, ...]
    overrides: tuple[Override, ...] = ()

    def quantizes(self, module: Module) -> bool:
        for override in reversed(self.overrides):
            if override.matches(module.name):
                return override.quantize
        scope = "mtp" if module.is_mtp else "main"
        return any(rule.group == module.group and rule.layers in (scope, "all") for rule in self.rules)

    def with_overrides(self, quantize: Iterable[str], keep: Iterable[str]) -> Recipe:
        """Add --quantize and --keep patterns; --keep wins where both match.

        Raises:
            RecipeError: a `re:` pattern is not a valid regex.
        """
        overrides = [Override(True, p) for p in quantize] + [Override(False, p) for p in keep]
        for override in overrides:
            _regex(
                override.pattern.removeprefix("re:") if override.pattern.startswith("re:") else "",
                str(override),
            )
        return replace(self, overrides=self.overrides + tuple(overrides))


class Names(Collection[str]):
    """Module names, some of them templates with {layer}, as a collection that knows what is in it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        patterns = [re.escape(n).replace(r"\{layer\}", r"\d+") for n in self._names if "{layer}" in n]
        self._pattern = re.compile("|".join(patterns)) if patterns else None

    def __contains__(self, name: object) -> bool:
        if name in self._names:
            return True
        return self._pattern is not None and isinstance(name, str) and self._pattern.fullmatch(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model type: its module groups, MTP naming, tensors and recipes.

    Attributes:
        keys: where its config.json says which layer is what.
        tensors: what it is made of, see checkpoint/layout.py.
        others: names of tensors begin so that belong to the model, all or none of which are there (a vision tower).
        roles: last part of a module's name, or last two -> how engines hold it: `up` or `down` (of an MLP), `row`
            (row-parallel), `qkv` (side by side with others); every other module stands alone.
        prefix: names of a layer's modules begin so.
    """

    model_type: str
    about: str
    keys: LayerKeys
    tensors: tuple[TensorRule, ...]
    others: tuple[str, ...]
    roles: Mapping[str, str]
    groups: tuple[Group, ...]
    lookups: Names
    prefix: str
    aliases: tuple[Alias, ...]
    covers: tuple[str, ...]
    recipes: Mapping[str, Recipe]
    default: str
    refusals: tuple[Refusal, ...]
    file: str

    def module(self, name: str, layers: Layers) -> Module:
        """Classify a module name; a name no pattern knows is in group `other` and never quantized by a rule."""
        for group in self.groups:
            for pattern in group.patterns:
                if found := pattern.fullmatch(name):
                    number = found.groupdict().get("layer")
                    layer = int(number) if number is not None else None
                    return Module(name, group.name, layer, layer is not None and layer >= layers.count)
        found = re.match(re.escape(self.prefix).replace(r"\{layer\}", r"(\d+)"), name)
        layer = int(found[1]) if found else None
        return Module(name, "other", layer, layer is not None and layer >= layers.count)

    def mtp_aliases(self, name: str, layers: Layers) -> list[tuple[str, Alias]]:
        """Names under which engines' draft models ask for an MTP module; empty for other modules."""
        for layer in layers.mtp:
            prefix = self.prefix.format(layer=layer)
            if name.startswith(prefix):
                rest = name[len(prefix) :]
                found: dict[str, tuple[str, Alias]] = {}
                for alias in self.aliases:
                    if alias.engine not in found and any(fnmatchcase(rest, m) for m in alias.modules):
                        found[alias.engine] = (alias.to.format(rest=rest, layer=layer), alias)
                return list(found.values())
        return []

    def recipe(self, name: str | None) -> Recipe:
        """A recipe by name; None is the default one.

        Raises:
            RecipeError: unknown name; lists the known ones.
        """
        wanted = name or self.default
        if wanted not in self.recipes:
            raise RecipeError(f"unknown recipe {wanted!r}", f"{self.file} has: {', '.join(self.recipes)}.")
        return self.recipes[wanted]


def recipe_folder() -> Path:
    """The folder with the architecture files: inside the installed package, or beside it in a checkout."""
    installed = _HERE / "_recipes"
    return installed if installed.is_dir() else _HERE.parent / "exclusions"


def known_model_types() -> list[str]:
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


@lru_cache
def load_architecture(model_type: str) -> Architecture:
    """The architecture file of a model type.

    Raises:
        RecipeError: no such file (lists the known model types), or the file does not follow the schema.
    """
    if model_type not in known_model_types():
        raise RecipeError(
            f"config.json: model_type {short(model_type)} is unknown", f"Known: {', '.join(known_model_types())}."
        )
    return parse_architecture(recipe_folder() / f"{model_type}.yaml")


def select_recipe(architecture: Architecture, choice: str | None) -> tuple[Architecture, Recipe]:
    """Pick a recipe by name, from a user's file (`my.yaml`) or one of several in it (`my.yaml:name`).

    A user's file has `schema: 1`, `extends: <model_type>` and `recipes:`; it may add `refuse:` rules.

    Raises:
        RecipeError: unknown name or file, or the file does not follow the schema.
    """
    found = re.fullmatch(r"(.+\.yaml)(?::(.*))?", choice or "")
    if not found:
        return architecture, architecture.recipe(choice)
    own = parse_recipe_file(Path(found[1]), architecture)
    return own, own.recipe(found[2])


# --- strict reading: every key is known, every value has its type, every name refers to something ---


def parse_architecture(path: Path) -> Architecture:
    data = _load(path)
    _keys(
        path,
        data,
        "",
        _ARCHITECTURE,
    )
    groups = []
    for name, spec in _map(path, data, "groups").items():
        _keys(path, spec, f"groups.{name}", {"modules", "about"})
        patterns = tuple(_template(path, m) for m in _strings(path, spec, "modules"))
        groups.append(Group(name, patterns, _text(path, spec, "about")))
    mtp = _map(path, data, "mtp")
    _keys(path, mtp, "mtp", {"kinds", "aliases"})
    aliases = []
    for spec in _items(path, mtp, "aliases"):
        _keys(path, spec, "mtp.aliases", {"engine", "modules", "to", "source"})
        aliases.append(
            Alias(
                _text(path, spec, "engine"),
                tuple(_strings(path, spec, "modules")),
                _text(path, spec, "to"),
                _text(path, spec, "source"),
            )
        )
    names = {group.name for group in groups}
    recipes = _recipes(path, data, names)
    default = _text(path, data, "default")
    if default not in recipes:
        raise RecipeError(f"{path}: default {default!r} is not one of its recipes")
    keys = _layer_keys(path, data, mtp)
    return Architecture(
        model_type=_text(path, data, "model_type"),
        about=_text(path, data, "about"),
        keys=keys,
        tensors=tuple(_tensors(path, data, {name for name, _ in keys.sets})),
        others=tuple(_strings(path, data, "others")) if "others" in data else (),
        roles=_roles(path, data),
        groups=tuple(groups),
        lookups=Names(_strings(path, data, "lookups")),
        prefix=keys.prefix,
        aliases=tuple(aliases),
        covers=tuple(_strings(path, data, "covers")),
        recipes=recipes,
        default=default,
        refusals=_refusals(path, data, names),
        file=path.name,
    )


_ARCHITECTURE = {"schema", "model_type", "family", "about", "config", "layers", "tensors", "others", "roles", "groups"}
_ARCHITECTURE |= {"lookups", "mtp", "covers", "default", "recipes", "refuse"}
_RULES = ("words", "pattern", "below", "every", "not_every", "numbers", "any", "all")
_ROLES = ("up", "down", "row", "qkv")


def _layer_keys(path: Path, data: Mapping[str, Any], mtp: Mapping[str, Any]) -> LayerKeys:
    config, layers = _map(path, data, "config"), _map(path, data, "layers")
    _keys(path, config, "config", {"inside", "layers", "mtp", "experts", "shared_experts", "vision", "kinds"})
    _keys(path, layers, "layers", {"prefix", "experts", "shared"})
    kinds = []
    for name, rules in (_map(path, config, "kinds") if "kinds" in config else {}).items():
        if name in ("top", "all", "main", "mtp", "moe", "vision"):
            raise RecipeError(f"{path}: config.kinds: {name!r} means something already")
        where = f"config.kinds.{name}"
        if not isinstance(rules, list) or not rules:
            raise RecipeError(f"{path}: {where} must be a list of rules")
        kinds.append((name, tuple(_set_rule(path, where, rule) for rule in rules)))
    known = {"moe", *(name for name, _ in kinds)}
    of_mtp = _strings(path, mtp, "kinds")
    if unknown := set(of_mtp) - known:
        raise RecipeError(
            f"{path}: mtp.kinds: unknown kind {sorted(unknown)[0]!r}", f"Known: {', '.join(sorted(known))}."
        )

    def key(name: str) -> str:
        return _text(path, config, name) if config.get(name) is not None else ""

    prefix = _text(path, layers, "prefix")
    if prefix.count("{layer}") != 1 or not prefix.endswith("."):
        raise RecipeError(f"{path}: layers.prefix must have {{layer}} once, and end with a dot")
    return LayerKeys(
        inside=key("inside"),
        layers=_text(path, config, "layers"),
        mtp=key("mtp"),
        experts=key("experts"),
        shared_experts=key("shared_experts"),
        sets=tuple(kinds),
        mtp_sets=frozenset(of_mtp),
        family=_text(path, data, "family" if "family" in data else "model_type"),
        prefix=prefix,
        container=_text(path, layers, "experts") if layers.get("experts") is not None else "",
        shared=_text(path, layers, "shared") if layers.get("shared") is not None else "",
        vision=_vision(path, config["vision"]) if "vision" in config else None,
    )


def _vision(path: Path, spec: Any) -> VisionKeys:
    _keys(path, spec, "config.vision", {"inside", "blocks", "defaults"})
    defaults, blocks = spec.get("defaults"), _text(path, spec, "blocks")
    if not isinstance(defaults, dict) or not all(
        isinstance(key, str) and type(value) is int and value >= 0 for key, value in defaults.items()
    ):
        raise RecipeError(f"{path}: config.vision.defaults must be a map of keys to numbers")
    if blocks not in defaults:
        raise RecipeError(f"{path}: config.vision.defaults must say how many {blocks} there are")
    return VisionKeys(_text(path, spec, "inside"), blocks, tuple(sorted(defaults.items())))


def _set_rule(path: Path, where: str, rule: Any) -> SetRule:
    _keys(path, rule, where, {*_RULES, "are", "offset"})
    kinds = [kind for kind in _RULES if kind in rule]
    if len(kinds) != 1:
        raise RecipeError(f"{path}: {where}: a rule is one of {', '.join(_RULES)}")
    kind = kinds[0]
    if kind == "any":
        return SetRule(kind, rules=tuple(_set_rule(path, where, inner) for inner in _items(path, rule, "any")))
    if kind == "all":
        return SetRule(kind)
    offset = rule.get("offset", 0)
    if type(offset) is not int and not isinstance(offset, str):
        raise RecipeError(f"{path}: {where}: offset must be a number or a key of config.json")
    values = tuple(_strings(path, rule, "are")) if kind in ("words", "pattern") else ()
    return SetRule(kind, _text(path, rule, kind), values, offset)


def _tensors(path: Path, data: Mapping[str, Any], kinds: set[str]) -> Iterator[TensorRule]:
    known = {"top", "vision", "all", "main", "mtp", "moe", *kinds}
    for where, rules in _map(path, data, "tensors").items():
        place = f"tensors.{where}"
        if where not in known:
            raise RecipeError(f"{path}: {place}: no such kind of layer", f"Known: {', '.join(sorted(known))}.")
        if not isinstance(rules, dict):
            raise RecipeError(f"{path}: {place} must be a map")
        for name, spec in rules.items():
            spec = spec if isinstance(spec, dict) else {"shape": spec}
            _keys(path, spec, f"{place}.{name}", {"shape", "dtype", "optional", "when", "unless"})
            shape = spec.get("shape")
            if not isinstance(name, str) or not isinstance(shape, list) or not shape:
                raise RecipeError(f"{path}: {place}.{short(name)}: shape must be a list of sizes")
            for size in shape:
                try:
                    if type(size) is not int:
                        parse_size(size if isinstance(size, str) else short(size))
                except ValueError as err:
                    raise RecipeError(f"{path}: {place}.{name}: {err}") from None
            words = {key: _text(path, spec, key) for key in ("dtype", "when", "unless") if key in spec}
            yield TensorRule(name, tuple(shape), where, optional=spec.get("optional") is True, **words)


def _roles(path: Path, data: Mapping[str, Any]) -> dict[str, str]:
    roles = _map(path, data, "roles")
    _keys(path, roles, "roles", set(_ROLES))
    return {name: role for role in roles for name in _strings(path, roles, role)}


def parse_recipe_file(path: Path, base: Architecture) -> Architecture:
    """A user's recipes on top of an architecture: its groups, aliases and refusals stay in force."""
    data = _load(path)
    if "extends" not in data:
        raise RecipeError(f"{path}: no key 'extends'", f"Write 'extends: {base.model_type}'.")
    _keys(path, data, "", {"schema", "extends", "recipes", "refuse"})
    if data["extends"] != base.model_type:
        raise RecipeError(f"{path}: extends {short(data['extends'])}, but the checkpoint is {base.model_type!r}")
    names = {group.name for group in base.groups}
    recipes = _recipes(path, data, names)
    if not recipes:
        raise RecipeError(f"{path}: no recipe in it")
    return replace(
        base,
        recipes=recipes,
        default=next(iter(recipes)),
        refusals=base.refusals + _refusals(path, data, names),
        file=path.name,
    )


def _recipes(path: Path, data: Mapping[str, Any], groups: set[str]) -> dict[str, Recipe]:
    recipes = {}
    for name, spec in _map(path, data, "recipes").items():
        where = f"recipes.{name}"
        _keys(path, spec, where, {"about", "quantize"})
        rules = []
        for item in _items(path, spec, "quantize"):
            _keys(path, item, f"{where}.quantize", {"group", "layers", "reason"})
            rule = Rule(_text(path, item, "group"), _text(path, item, "layers"), _text(path, item, "reason"))
            if rule.group not in groups:
                raise RecipeError(
                    f"{path}: {where}: unknown group {rule.group!r}", f"Known: {', '.join(sorted(groups))}."
                )
            if rule.layers not in SCOPES:
                raise RecipeError(f"{path}: {where}: layers {rule.layers!r} must be one of {', '.join(SCOPES)}")
            rules.append(rule)
        if not rules:
            raise RecipeError(f"{path}: {where}: quantizes nothing")
        recipes[name] = Recipe(name, _text(path, spec, "about"), tuple(rules))
    return recipes


def _refusals(path: Path, data: Mapping[str, Any], groups: set[str]) -> tuple[Refusal, ...]:
    refusals = []
    for item in _items(path, data, "refuse") if "refuse" in data else []:
        _keys(path, item, "refuse", {"when", "reason", "instead", "source"})
        when = _map(path, item, "when")
        if not when:
            raise RecipeError(f"{path}: refuse: when is empty")
        for key, value in when.items():
            group, _, scope = key.partition(".")
            shown = value if isinstance(value, str) else short(value)
            if group not in groups or scope not in ("main", "mtp") or value not in ("mxfp4", "plain"):
                raise RecipeError(f"{path}: refuse: {key}: {shown} is not <group>.<main|mtp>: <mxfp4|plain>")
        refusals.append(
            Refusal(when, _text(path, item, "reason"), _text(path, item, "instead"), _text(path, item, "source"))
        )
    return tuple(refusals)


def _template(path: Path, template: str) -> re.Pattern[str]:
    """`{layer}`, `{expert}` and `{block}` become numbers, `{a,b}` one of the names; everything else is literal."""
    out, seen_layer = "", False
    for part in re.split(r"(\{[^{}]*\})", template):
        if part == "{layer}":
            out += r"(?P=layer)" if seen_layer else r"(?P<layer>\d+)"
            seen_layer = True
        elif part in ("{expert}", "{block}"):
            out += r"\d+"
        elif part.startswith("{"):
            out += "(?:" + "|".join(re.escape(name) for name in part[1:-1].split(",")) + ")"
        else:
            out += re.escape(part)
    return _regex(out, f"{path}: {template}")


def _regex(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as err:
        raise RecipeError(f"{where}: not a valid regular expression: {err}") from err


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice."""


def _strict_mapping(loader: _StrictLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    keys: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a list or map as a key", key_node.start_mark)
        if key in keys:
            raise yaml.constructor.ConstructorError(None, None, f"key {short(key)} appears twice", key_node.start_mark)
        keys.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_StrictLoader.add_constructor("tag:yaml.org,2002:map", _strict_mapping)


# PyYAML raises some of these for a wrong value behind an explicit tag, such as `!!bool x` or `!!int ""`.
_YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


def _load(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            content = file.read(MAX_RECIPE_BYTES + 1)
        if len(content) > MAX_RECIPE_BYTES:
            raise RecipeError(f"{path}: more than {MAX_RECIPE_BYTES:,} bytes is no recipe file")
        data = yaml.load(content.decode(), Loader=_StrictLoader)
    except OSError as err:
        raise RecipeError(f"{path}: cannot be read: {err.strerror or err}") from err
    except _YAML_ERRORS as err:
        raise RecipeError(f"{path}: not valid YAML: {err or type(err).__name__}") from err
    if not isinstance(data, dict) or data.get("schema") != 1:
        raise RecipeError(f"{path}: must begin with 'schema: 1'")
    return data


def _keys(path: Path, spec: Any, where: str, allowed: set[str]) -> None:
    if not isinstance(spec, dict):
        raise RecipeError(f"{path}: {where or 'the file'} must be a map")
    if unknown := set(map(str, spec)) - allowed:
        place = f" in {where}" if where else ""
        raise RecipeError(
            f"{path}: unknown key {sorted(unknown)[0]!r}{place}", f"Allowed: {', '.join(sorted(allowed))}."
        )


def _map(path: Path, spec: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = spec.get(key)
    if not isinstance(value, dict):
        raise RecipeError(f"{path}: {key} must be a map")
    return {str(k): v for k, v in value.items()}


def _items(path: Path, spec: Mapping[str, Any], key: str) -> list[Any]:
    value = spec.get(key)
    if not isinstance(value, list):
        raise RecipeError(f"{path}: {key} must be a list")
    return value


def _text(path: Path, spec: Mapping[str, Any], key: str) -> str:
    value = spec.get(key)
    if not isinstance(value, str) or not value.strip():
        raise RecipeError(f"{path}: {key} must be a text")
    return value


def _strings(path: Path, spec: Mapping[str, Any], key: str) -> list[str]:
    value = spec.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise RecipeError(f"{path}: {key} must be a list of texts")
    return value
