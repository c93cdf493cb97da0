"""Ways to write down which modules are un-quantized: module by module, by container, by regex, by glob.

Each form is a list of entries under checkpoint names and, for the MTP layer, under the names that engines' draft
models use. Which form loads where is not decided here: exclusions.py puts them to the engine models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from glmquant.engines.model import Stored
from glmquant.recipe import Alias, Architecture

FORMS = ("auto", "literal", "regex")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the exclude list.

    Attributes:
        text: what is written; a literal module name, or a regex after `re:`.
        origin: `checkpoint` (the module's own name), `container` (all routed experts of a layer), `regex` (stands for
            several modules) or `alias` (any of these under the name an engine's draft model uses).
        module: the checkpoint module, or the prefix of the modules, it stands for.
        source: the alias rule it comes from, '' for checkpoint names.
    """

    text: str
    origin: str
    module: str
    source: str = ""

    def record(self) -> dict[str, str]:
        """For glmquant.json."""
        found = {"entry": self.text, "origin": self.origin, "module": self.module}
        return {**found, "source": self.source} if self.source else found


@dataclass(frozen=True, slots=True)
class Cover:
    """All modules below `template` (or the module itself, without a trailing dot) in these layers; None is any."""

    template: str
    layers: tuple[int, ...] | None

    def regex(self, template: str | None = None) -> str:
        head, found, tail = (template or self.template).partition("{layer}")
        number = r"\d+" if self.layers is None else "|".join(map(str, self.layers))
        if self.layers is not None and len(self.layers) > 1:
            number = f"({number})"
        text = re.escape(head) + (number if found else "") + re.escape(tail)
        return f"re:{text}.*" if text.endswith(r"\.") else f"re:{text}$"

    def globs(self) -> list[str]:
        tail = "*" if self.template.endswith(".") else ""
        numbers: Sequence[object] = ["*"] if self.layers is None else self.layers
        # no str.format: a template may be the name of a stranger's tensor
        return [self.template.replace("{layer}", str(number)) + tail for number in numbers]


def forms(stored: Stored, architecture: Architecture, form: str) -> Iterator[tuple[str, list[Entry]]]:
    """Candidate lists, best liked first.

    Args:
        form: `literal` writes no regex; `regex` writes as few entries as possible; `auto` names the main layers'
            modules one by one, as Quark and transformers read them, and is free in the MTP layer.
    """
    modules = natural_order(stored.units)
    main = [m for m in modules if not _is_mtp(m, stored, architecture)]
    mtp = [m for m in modules if _is_mtp(m, stored, architecture)]
    head = _covered(main, modules, stored, architecture) if form == "regex" else _literals(main, stored)
    for name, tail in _mtp_forms(mtp, modules, stored, architecture, form):
        yield name, list({entry.text: entry for entry in [*head, *tail]}.values())


def _mtp_forms(
    modules: list[str], everywhere: list[str], stored: Stored, architecture: Architecture, form: str
) -> Iterator[tuple[str, list[Entry]]]:
    plain = [m for m in modules if stored.units[m] == "plain"]
    if not plain:
        yield "no un-quantized module", []
        return
    if form != "literal" and (form == "regex" or len(plain) == len(modules)):
        covered = _covered(modules, everywhere, stored, architecture)
        yield "regexes under every name", _with_aliases(covered, stored, architecture)
    leaves = _literals(modules, stored)
    aliased = _with_aliases(leaves, stored, architecture)
    quiet = [entry for entry in aliased if entry.origin != "alias" or "shared_expert" not in entry.text]
    yield "names under every alias, but shared experts under the checkpoint's only", quiet
    yield "names under every alias", aliased
    prefixes = [architecture.prefix.format(layer=layer) for layer in stored.layers.mtp]
    bare = [Entry(prefix.rstrip("."), "checkpoint", prefix) for prefix in prefixes]
    yield "checkpoint names and the bare layer", leaves + bare
    yield "checkpoint names", leaves


def _literals(modules: Iterable[str], stored: Stored) -> list[Entry]:
    """Own names; a wholly un-quantized expert container stands for its experts.

    Engines ask for the container: sglang < 0.5.21 knows no expert by name, so leaves alone would not match.
    """
    return [
        Entry(module, "container" if module in stored.containers else "checkpoint", module)
        for module in modules
        if stored.units[module] == "plain"
    ]


def _covered(
    modules: Sequence[str], everywhere: Sequence[str], stored: Stored, architecture: Architecture
) -> list[Entry]:
    """As few entries as possible: regexes for what is wholly un-quantized, names for the rest."""
    found, rest = find_covers(modules, everywhere, stored, architecture)
    return [Entry(cover.regex(), "regex", cover.template) for cover in found] + _literals(rest, stored)


def find_covers(
    modules: Sequence[str], everywhere: Sequence[str], stored: Stored, architecture: Architecture
) -> tuple[list[Cover], list[str]]:
    """Covers that hold only un-quantized modules, broadest first, and the un-quantized modules left over.

    A cover speaks of any layer only if that is true of `everywhere`, so it cannot reach a packed module.
    """
    rest = [m for m in modules if stored.units[m] == "plain"]
    covers = []
    for template in architecture.covers:
        pattern = re.compile(
            re.escape(template).replace(r"\{layer\}", r"(\d+)") + ("" if template.endswith(".") else "$")
        )
        packed: set[int] = set()
        layers_of_rest: dict[int, list[str]] = {}
        for module in everywhere:
            if stored.units[module] != "plain" and (hit := pattern.match(module)):
                packed.add(int(hit[1]))
        for module in rest:
            if (hit := pattern.match(module)) and int(hit[1]) not in packed:
                layers_of_rest.setdefault(int(hit[1]), []).append(module)
        if not layers_of_rest:
            continue
        covers.append(Cover(template, tuple(sorted(layers_of_rest)) if packed else None))
        gone = {module for found in layers_of_rest.values() for module in found}
        rest = [module for module in rest if module not in gone]
    return covers, rest


def _with_aliases(entries: Sequence[Entry], stored: Stored, architecture: Architecture) -> list[Entry]:
    """The entries, and each under every name that a draft model gives it."""
    found = list(entries)
    for entry in entries:
        if entry.origin == "regex":
            found += _regex_aliases(entry.module, stored, architecture)
        else:
            found += [
                Entry(name, "alias", entry.module, alias.source)
                for name, alias in architecture.mtp_aliases(entry.text, stored.layers)
            ]
    return found


def _regex_aliases(template: str, stored: Stored, architecture: Architecture) -> Iterator[Entry]:
    rest = template.removeprefix(architecture.prefix)
    renamed: dict[str, Alias] = {}
    for alias in architecture.aliases:
        if alias.modules == ("*",):
            layers = stored.layers.mtp if "{layer}" in alias.to else None
            cover = Cover(alias.to.format(rest=rest, layer="{layer}"), layers)
            yield Entry(cover.regex(), "alias", template, alias.source)
            continue
        for layer in stored.layers.mtp:
            for module, kind in stored.units.items():
                prefix = architecture.prefix.format(layer=layer)
                tail = module.removeprefix(prefix)
                if kind == "plain" and tail != module and tail in alias.modules and tail.startswith(rest):
                    renamed[alias.to.format(rest=tail, layer=layer)] = alias
    for name, alias in renamed.items():
        yield Entry(name, "alias", template, alias.source)


def _is_mtp(module: str, stored: Stored, architecture: Architecture) -> bool:
    return any(module.startswith(architecture.prefix.format(layer=n)) for n in stored.layers.mtp)


def natural_order(modules: Iterable[str]) -> list[str]:
    """Layer 2 before layer 10: the list is read by people."""

    def key(name: str) -> list[tuple[bool, int, str]]:
        return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")]

    return sorted(modules, key=key)


def as_globs(stored: Stored, architecture: Architecture) -> list[str]:
    """The same decision as globs over checkpoint names: Quark's --exclude_layers, ModelOpt's ignore."""
    covers, rest = _by_checkpoint_name(stored, architecture)
    return [glob for cover in covers for glob in cover.globs()] + rest


def as_regexes(stored: Stored, architecture: Architecture) -> list[str]:
    """The same decision as compressed-tensors writes `ignore`: names, and `re:` patterns for re.match."""
    covers, rest = _by_checkpoint_name(stored, architecture)
    return [cover.regex() for cover in covers] + rest


def _by_checkpoint_name(stored: Stored, architecture: Architecture) -> tuple[list[Cover], list[str]]:
    modules = natural_order(stored.units)
    covers, rest = find_covers(modules, modules, stored, architecture)
    # These tools know no container, only the experts in it.
    covers += [Cover(module + ".", None) for module in rest if module in stored.containers]
    return covers, [module for module in rest if module not in stored.containers]
