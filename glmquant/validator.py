"""Proves a checkpoint from disk: what is stored, what the list says, and what each target engine makes of both.

Reads headers only and shares no code with the writer, the planner or the kernels: it does not trust the maker.
checks.py finds what is wrong with the files; here the engines are asked what they do about it, and about the list.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from glmquant import checks
from glmquant.checkpoint.formats import BLOCK_FP8, stored_formats
from glmquant.checkpoint.header import ShardHeader
from glmquant.checkpoint.layers import Layers, read_layers
from glmquant.checkpoint.layout import Shape, allowed_tensors, expected_tensors
from glmquant.checkpoint.source import CONFIG, Checkpoint, Problem, inspect
from glmquant.checks import Mistake
from glmquant.engines import block_fp8
from glmquant.engines.model import (
    DISABLE_FUSION,
    Evaluation,
    ModuleVerdict,
    RuntimeModule,
    Stored,
    Verdict,
    build_modules,
    consequence,
    containers_of,
    rules_for,
)
from glmquant.engines.patterns import BUDGET, Patterns, compile_entry
from glmquant.engines.targets import Target, engine_notes, evaluate, span, split_modelled
from glmquant.errors import ExclusionError, GlmquantError
from glmquant.findings import SEVERITIES, Coverage, Effect, Finding, Report
from glmquant.recipe import Architecture, load_architecture

_ORDER = list(Verdict)
_SHOWN = 5


def validate_folder(
    folder: str | os.PathLike[str], targets: Sequence[Target], headers: Mapping[str, ShardHeader] | None = None
) -> Report:
    """Check a quantized checkpoint of any producer.

    Args:
        headers: of shards that are not in the folder, but on the Hub.

    Raises:
        CheckpointError: the folder or its config.json cannot be read at all.
    """
    return validate_inspected(*inspect(folder, headers), targets)


def validate_inspected(checkpoint: Checkpoint, problems: Sequence[Problem], targets: Sequence[Target]) -> Report:
    """`validate_folder` for what `inspect` has read already."""
    findings = [
        Finding(p.code, "error", p.message, tuple(filter(None, (p.tensor or p.file,))), 1, fix=p.hint) for p in problems
    ]
    judge = _Judge(targets)
    mistakes = [*checks.total_size(checkpoint), *checks.side_files(checkpoint)]
    formats: dict[str, str] = {}
    parallel: dict[str, list[int]] = {}
    try:
        architecture = load_architecture(checkpoint.model_type)
        layers, config = read_layers(checkpoint.config, architecture.keys), architecture.keys.of(checkpoint.config)
    except GlmquantError as err:
        findings.append(Finding("config", "error", err.message, (CONFIG,), 1, fix=err.hint))
    else:
        found = stored_formats(checkpoint.tensors, architecture.lookups)
        formats = {module: "mxfp4" if kind == "i8" else kind for module, kind in found.items()}
        tower = architecture.keys.tower(checkpoint.config)
        expected = expected_tensors(architecture.tensors, config, layers, tower)
        wrong_config = list(checks.quantization(checkpoint.config))
        exclude, bad_entries = _exclude_list(checkpoint.config)
        if bad_entries:
            wrong_config.append(bad_entries)
        mistakes += [*wrong_config, *checks.schedule(config, layers, architecture.keys)]
        allowed = allowed_tensors(architecture.tensors, config, layers)
        mistakes += checks.tensors(
            checkpoint, formats, expected, layers, allowed, architecture.others, bool(architecture.keys.mtp)
        )
        judge.know(layers, architecture)
        findings += judge.not_modelled()
        if exclude is not None:
            try:
                fp8 = block_fp8.on_disk(checkpoint.config, checkpoint.tensors, formats)
                judge.ask(exclude, Stored.of(formats, layers, fp8))
                findings += judge.list_findings()
                findings += _useless_entries(exclude, checkpoint, architecture, layers, judge.targets)
            except ExclusionError as err:
                findings.append(Finding("entry-cost", "error", err.message, (CONFIG,), 1, fix=err.hint))
        parallel = _tensor_parallel(config, formats, expected, layers, architecture, judge.targets)
        findings += _parallel_findings(parallel, judge.targets)
    findings += [judge.finding(mistake) for mistake in mistakes]
    findings.sort(key=lambda finding: -SEVERITIES.index(finding.severity))
    return Report(
        checkpoint.folder,
        tuple(targets),
        tuple(findings),
        len(checkpoint.tensors),
        checkpoint.nbytes,
        sum(kind == "mxfp4" for kind in formats.values()),
        judge.coverage(),
        parallel,
        dict(judge.verdicts),
        judge.flags(),
    )


def _exclude_list(config: Mapping[str, object]) -> tuple[list[str] | None, Mistake | None]:
    """The entries that the engine models can be asked about, and those that no engine can read."""
    block = config.get("quantization_config")
    if not isinstance(block, dict) or block.get("quant_method") != "quark":
        return None, None
    entries = block.get("exclude", [])
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        return None, None
    bad = {entry: reason for entry in entries if (reason := _regex_error(entry))}
    if not bad:
        return entries, None
    return [entry for entry in entries if entry not in bad], Mistake(
        "entry-invalid-regex",
        f"entries that cannot be matched: {next(iter(bad.values()))}",
        dict.fromkeys(bad, "entry-invalid-regex"),
        "Correct or remove them; the rest of the list was checked without them.",
    )


def _regex_error(entry: str) -> str:
    try:
        if entry.startswith("re:"):
            compile_entry(entry)
    except ExclusionError as err:
        return err.message
    return ""


class _Judge:
    """Asks every target about the list and about each mistake, and keeps count of what becomes of each module."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets: Sequence[Target] = targets
        self.verdicts: dict[str, Verdict] = {str(target): Verdict.OK for target in targets}
        self._unknown: dict[str, list[Target]] = {}
        self._layers: Layers | None = None
        self._evaluations: dict[Target, Evaluation] = {}
        self._modules: dict[Target, dict[str, RuntimeModule]] = {}
        self._worst: dict[Target, dict[tuple[str, str], Verdict]] = {target: {} for target in targets}
        self._owner: dict[str, dict[str, str]] = {}
        self._stored: Stored | None = None
        self._architecture: Architecture | None = None

    def know(self, layers: Layers, architecture: Architecture) -> None:
        """Told what the checkpoint is; from now on only the targets whose models know such are asked."""
        self._layers, self._architecture = layers, architecture
        self.targets, self._unknown = split_modelled(self.targets, layers.family)
        self.verdicts = {str(target): self.verdicts[str(target)] for target in self.targets}

    def not_modelled(self) -> Iterator[Finding]:
        """Releases of which nothing is known, and what is known of the others whatever the list says."""
        for reason, skipped in self._unknown.items():
            yield Finding(
                "not-modelled",
                "info" if self.targets else "warning",
                f"{reason}: nothing is said about what these releases do with this checkpoint",
                tuple(map(str, skipped[:_SHOWN])),
                len(skipped),
                span(skipped),
            )

        for note, concerned in engine_notes(self.targets, self._family).items():
            yield Finding("engine-note", "info", note, targets=span(concerned))

    def ask(self, exclude: Sequence[str], stored: Stored) -> None:
        self._stored = stored
        for target in self.targets:
            self._evaluations[target] = evaluate(target, exclude, stored)
            modules = build_modules(target.engine, stored.layers)
            self._modules[target] = {module.prefix: module for module in modules}
            if target.engine not in self._owner:
                self._owner[target.engine] = {part: module.prefix for module in modules for part in module.parts}

    # What the list does

    def list_findings(self) -> Iterator[Finding]:
        """One finding per kind of fault, with all its modules, and one effect per message of an engine."""
        assert self._stored
        groups: dict[tuple[str, str, str], dict[tuple[Verdict, str], dict[str, list[Target]]]] = {}
        for target, evaluation in self._evaluations.items():
            for fault in evaluation.faults:
                code, fix = _classify(fault, self._stored)
                self._mark(target, fault.role, fault.prefix, fault.verdict)
                effects = groups.setdefault((code, fault.role, fix), {})
                found = effects.setdefault((fault.verdict, _general(fault)), defaultdict(list))
                found[fault.prefix].append(target)
        for (code, role, fix), effects in groups.items():
            names = dict.fromkeys(prefix for found in effects.values() for prefix in found)
            yield self._finding(
                code,
                f"{role}: {LIST_CODES[code]}",
                list(names),
                {effect: [t for found in by_name.values() for t in found] for effect, by_name in effects.items()},
                fix,
                "warning" if code == "fusion-lost" else "error",
            )
        flagged = [target for target, evaluation in self._evaluations.items() if evaluation.flags]
        if flagged:
            text = (
                f"loads with {DISABLE_FUSION} only; without, the shared expert is fused into experts of another format"
            )
            yield self._finding(
                "needs-flag",
                "target: the shared expert and the routed experts are stored in different formats",
                [f"{self._stored.layers.prefix.replace('{layer}', '*')}{self._stored.layers.shared}"],
                {(Verdict.SLOW, text): flagged},
                f"Launch with {DISABLE_FUSION}, or quantize both.",
                "warning",
            )

    def flags(self) -> dict[str, list[str]]:
        return {str(target): list(e.flags) for target, e in self._evaluations.items() if e.flags}

    # What a mistake does

    def finding(self, mistake: Mistake) -> Finding:
        """The mistake, with what each target does about it; experts are looked at as containers."""
        spots = dict.fromkeys(self._spot(name, key) for name, key in mistake.names.items() if key)
        effects: dict[tuple[Verdict, str], list[Target]] = {}
        for target in self.targets:
            evaluation, owner = self._evaluations.get(target), self._owner.get(target.engine, {})
            fused = {"target": bool(evaluation and evaluation.fused_target)}
            fused["draft"] = bool(evaluation and evaluation.fused_draft)
            for key, apart, together, role, part in spots:
                place = together if fused[role] else apart
                try:
                    full = f"{key}.{place}" if place else key
                    effect = consequence(target.engine, target.release, full, self._family)
                except KeyError:
                    continue
                effects.setdefault(effect, []).append(target)
                self._mark(target, role, owner.get(part, part), effect[0])
        # where no engine's file knows the mistake, it counts
        unknown = spots and not effects and mistake.code not in _OFTEN_HARMLESS
        severity = "error" if unknown else mistake.severity
        return self._finding(mistake.code, mistake.message, list(mistake.names), effects, mistake.fix, severity)

    def _spot(self, name: str, key: str) -> tuple[str, str, str, str, str]:
        """Key, place with the shared expert apart and fused, role, and module (or container) of a tensor."""
        module = name.rpartition(".")[0]
        apart = together = ""
        layers, architecture = self._layers, self._architecture
        if layers is None or architecture is None:
            return key, apart, together, "target", module
        if key.startswith(_BY_PLACE):
            # the tensor's own name last: the most special rule there is
            own = ".".join(name.split(".")[-2:])
            apart, together = (
                f"{checks.place(module, fused, layers, architecture.roles)}.{own}" for fused in (False, True)
            )
        number = layers.number(name)
        role = "draft" if number is not None and number >= layers.count else "target"
        head, marker, _ = name.partition(f".{layers.container}.") if layers.container else (name, "", "")
        return key, apart, together, role, f"{head}.{layers.container}" if marker else module

    @property
    def _family(self) -> str:
        return self._layers.family if self._layers else "glm_moe_dsa"

    # Both

    def _mark(self, target: Target, role: str, prefix: str, verdict: Verdict) -> None:
        marks = self._worst[target]
        marks[role, prefix] = max(marks.get((role, prefix), Verdict.OK), verdict, key=_ORDER.index)
        self.verdicts[str(target)] = max(self.verdicts[str(target)], verdict, key=_ORDER.index)

    def _finding(
        self,
        code: str,
        message: str,
        names: Sequence[str],
        effects: Mapping[tuple[Verdict, str], Iterable[Target]],
        fix: str,
        severity: str,
    ) -> Finding:
        bad = {verdict for verdict, _ in effects} & {Verdict.CRASH, Verdict.SILENT}
        shown = tuple(
            Effect(span(list(found)), verdict.value, text)
            for (verdict, text), found in sorted(effects.items(), key=lambda item: -_ORDER.index(item[0][0]))
        )
        concerned = [t for (verdict, _), found in effects.items() if verdict is not Verdict.OK for t in found]
        return Finding(
            code,
            "error" if bad else severity,
            message,
            tuple(names[:_SHOWN]),
            len(names),
            span(concerned) if concerned else "",
            fix,
            shown,
        )

    def coverage(self) -> Coverage:
        """Every module that asks, by role and group, and what becomes of it."""
        return {str(target): self._coverage(target) for target in self._evaluations}

    def _coverage(self, target: Target) -> dict[str, dict[str, int]]:
        assert self._stored and self._architecture
        rows: dict[str, dict[str, int]] = {}
        marks, containers = dict(self._worst[target]), containers_of(target.engine, self._stored.layers)
        for prefix, module in self._modules[target].items():
            verdict = marks.pop((module.role, prefix), Verdict.OK)
            if module.group == "routed":  # lost fusion is said of all containers at once
                lost = marks.get((module.role, containers[module.role]), Verdict.OK)
                verdict = max(verdict, lost, key=_ORDER.index)
            rows.setdefault(f"{module.role} {module.group}", _zeros())[verdict.value] += 1
        for (role, prefix), verdict in marks.items():
            if prefix not in containers.values() and verdict is not Verdict.OK:
                group = self._architecture.module(prefix, self._stored.layers).group
                rows.setdefault(f"{role} {group}", _zeros())[verdict.value] += 1
        return rows


# Mistakes whose consequence depends on where in the model the tensor goes.
_BY_PLACE = ("tensor-", "scale-", "shape.", "weight-dtype")
_OFTEN_HARMLESS = ("tensor-unexpected", "scale-orphan", "indexer-schedule")

LIST_CODES = {
    "not-served": "layers that the engine builds as another kind, whatever the list says",
    "fusion-lost": "shared-expert fusion is switched off",
    "half-a-fused-pair": "only some modules of a fused one are in the list",
    "fusion-mismatch": "the shared expert is fused with experts of another format",
    "not-covered": "un-quantized modules that the list does not cover under the name the engine asks",
    "container-not-covered": "un-quantized experts whose container the list does not name as the engine asks",
    "excluded-but-packed": "packed modules that the list excludes",
    "mixed-formats": "one module of the engine, stored in different formats",
    "fp8-unread": "modules that are block-scaled FP8, or that layer_quant_config calls so, and are not read as such",
    "never-quantized": "packed modules that the engine always builds un-quantized",
}


def _zeros() -> dict[str, int]:
    return {verdict.value: 0 for verdict in Verdict}


def _general(fault: ModuleVerdict) -> str:
    """The message without the module's own name, so that modules of one kind make one effect."""
    return fault.message.replace(f" in {fault.prefix}", "").replace(f" of {fault.prefix}", "")


def _classify(fault: ModuleVerdict, stored: Stored) -> tuple[str, str]:
    kinds = {stored.formats.get(part) for part in fault.parts} | {
        kind for part in fault.parts for kind in stored.containers.get(part, ())
    }
    kinds.discard(None)
    if not fault.parts:
        return "not-served", "Serve it with another engine."
    if fault.verdict is Verdict.SLOW:
        return "fusion-lost", "Spell this entry so that it does not contain the text shared_expert."
    if "different quantization schemes" in fault.message:
        return "half-a-fused-pair", "Put all modules of the pair in the list, or none."
    if "fused into" in fault.message:
        return "fusion-mismatch", f"Store both in one format, or launch with {DISABLE_FUSION}."
    if "always built" in fault.message:
        return "never-quantized", "Store these modules in bf16."
    if BLOCK_FP8 in kinds or "says FP8" in fault.message or "different quantization configuration" in fault.message:
        return "fp8-unread", "--keep-fp8 writes what its --targets read; or store these modules in bf16."
    if len(kinds) > 1:
        return "mixed-formats", "Store the whole module in one format."
    if kinds == {"plain"}:
        if any(part in stored.containers for part in fault.parts):
            return "container-not-covered", "Add the container's own name to the list; glmquant exclusions fix does."
        return "not-covered", "Add these names to the list; glmquant exclusions fix does."
    return "excluded-but-packed", "Remove the entries that match these modules from the list."


def _useless_entries(
    exclude: Sequence[str],
    checkpoint: Checkpoint,
    architecture: Architecture,
    layers: Layers,
    targets: Sequence[Target],
) -> Iterator[Finding]:
    """Entries that match nothing on any target, and name no module of the checkpoint either.

    Entries for modules that never ask (router, norms, lm_head) match nothing too, but are true.
    """
    known = {name.rpartition(".")[0] for name in checkpoint.tensors}
    known |= {layers.at(layer).rstrip(".") for layer in layers.mtp}
    if not targets:  # no engine's modules name the containers
        known |= {f"{layers.at(layer)}{layers.container}" for layer in (*layers.moe, *layers.mtp)}
    known |= {alias for name in known for alias, _ in architecture.mtp_aliases(name, layers)}
    for engine in dict.fromkeys(target.engine for target in targets):
        for module in build_modules(engine, layers):
            known |= {module.prefix, *module.parts}
            if module.kind == "fused":
                parent = module.prefix.rpartition(".")[0]
                known |= {f"{parent}.{part.rpartition('.')[2]}" for part in module.parts}
    aliased = {name.replace("model.layers.61.", "model.decoder.") for name in known}
    globs, phantoms = [], []
    left = 4 * BUDGET  # seconds; there are more names here than an engine asks for
    reads_globs = any(target.engine in ("atom", "quark") for target in targets)
    for entry in dict.fromkeys(exclude):
        if entry.startswith("re:"):
            pattern = Patterns((entry,), "match", left)
            hit = any(map(pattern.hit, known))
            left = pattern.left
            if not hit:
                phantoms.append(entry)
        elif entry in known or entry in aliased or entry.partition(".experts.")[0] + ".experts" in known:
            continue
        elif "*" in entry or "?" in entry:
            if not reads_globs:
                globs.append(entry)
        elif f"{entry}.weight" not in checkpoint.tensors and entry not in checkpoint.tensors:
            phantoms.append(entry)
    if globs:
        yield Finding(
            "entry-glob",
            "warning",
            "entries with wildcards: none of the targets reads globs",
            tuple(globs[:_SHOWN]),
            len(globs),
            span(list(targets)),
            "Write names, or re: and a regular expression; glmquant exclusions fix does.",
        )
    if phantoms:
        yield Finding(
            "entry-unmatched",
            "warning",
            "entries that match no module of any target and name none of the checkpoint",
            tuple(phantoms[:_SHOWN]),
            len(phantoms),
            "",
            "Remove them, or correct the names.",
        )


def _tensor_parallel(
    config: Mapping[str, object],
    formats: Mapping[str, str],
    expected: Mapping[str, Shape],
    layers: Layers,
    architecture: Architecture,
    targets: Sequence[Target],
) -> dict[str, list[int]]:
    legal = checks.tensor_parallel(config, formats, expected, layers, architecture.roles)
    width = config.get("moe_intermediate_size")
    packed = any(kind == "mxfp4" and f".{layers.container}." in module for module, kind in formats.items())
    found = {}
    for target in targets if expected else ():
        aligned = rules_for(target.engine, target.release, layers.family).get("moe_rank_multiple", 1)
        found[str(target)] = [
            # a single rank reads from the beginning, padded or not
            size
            for size in legal
            if size == 1 or not packed or type(width) is not int or width // size % aligned == 0
        ]
    return found


def _parallel_findings(parallel: Mapping[str, list[int]], targets: Sequence[Target]) -> Iterator[Finding]:
    groups: dict[tuple[int, ...], list[Target]] = {}
    for target in targets:
        if str(target) in parallel:
            groups.setdefault(tuple(parallel[str(target)]), []).append(target)
    for legal, found in groups.items():
        if missing := [size for size in (1, 2, 4, 8) if size not in legal]:
            yield Finding(
                "tensor-parallel",
                "warning",
                f"tensor-parallel sizes {', '.join(map(str, missing))} would cut MXFP4 blocks or attention heads "
                f"apart; legal are {', '.join(map(str, legal)) or 'none'}",
                tuple(f"--tp {size}" for size in missing),
                len(missing),
                span(found),
            )
