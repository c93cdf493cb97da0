"""What is installed, and whether it serves the checkpoint right and fast: one line for each thing, with what to do.

Only files and package metadata are read. What a file is searched for, and in which releases it is there, was read in
the wheels of sglang 0.5.13.post1-0.5.23 and is compared with every one of them (tests/conformance/test_serving.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from glmquant.engines.model import rules_for
from glmquant.engines.targets import ENGINES
from glmquant.errors import GlmquantError
from glmquant.serving.aiter_tables import Tables
from glmquant.serving.guard import Guard, find_guard
from glmquant.serving.key_report import look_up
from glmquant.serving.launch import Launch
from glmquant.serving.settings import Hardware
from glmquant.serving.stack import Stack, read_text
from glmquant.serving.subject import Subject, nearest

OK, FIX, NOTE = "ok", "fix", "note"


@dataclass(frozen=True, slots=True)
class Line:
    """One thing looked at.

    Attributes:
        code: stable, for scripts.
        status: `ok`, `fix` (something is wrong or slow; `fix` says what to do) or `note` (worth knowing).
        source: where the fact is from, '' where it was just read.
    """

    code: str
    status: str
    text: str
    fix: str = ""
    source: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All lines. `guard` is the file that a patch can mend, None if it is not there."""

    lines: tuple[Line, ...]
    guard: Guard | None

    @property
    def ok(self) -> bool:
        return not any(line.status == FIX for line in self.lines)


def examine_stack(stack: Stack) -> Iterator[Line]:
    """The installed packages, whatever is to be served."""
    release = stack.release("sglang")
    yield from _engine(stack, release)
    if stack.package("sglang"):
        yield from _semantics(stack, release)
        yield _guard(find_guard(stack))
        yield from _attention(stack)
    yield from _torch(stack)
    yield from _transformers(stack)
    yield _quark(stack)


def _engine(stack: Stack, release: str) -> Iterator[Line]:
    for other in ("vllm", "atom"):
        if found := stack.release(other):
            yield Line(other, NOTE, f"{other} {found}; the lines below are about sglang")
    if not release and not stack.package("sglang"):
        hint = "Run this in the engine's environment, or name it: --site-packages DIR."
        yield Line("sglang", FIX, "sglang is not installed here", hint)
        return
    known = list(ENGINES["sglang"].releases())
    if not _numbered(release):
        yield Line("sglang", NOTE, f"sglang has no release number ({release or 'a checkout'}): judged by its files")
        return
    try:
        target = nearest("sglang", release)
    except GlmquantError as err:
        why = "it does not read index_skip_topk_offset, so GLM-5.2's indexer schedule is wrong"
        yield Line(
            "sglang", FIX, f"{err.message}: {why}", f"Install sglang {known[-1]}.", "0.5.13.post1 deepseek_v2.py"
        )
        return
    if Version(release) > Version(known[-1]) and target.release == known[-1]:
        yield Line("sglang", NOTE, f"sglang {release} is newer than {known[-1]}, the newest that glmquant knows")
    else:
        yield Line("sglang", OK, f"sglang {release}")


def _numbered(release: str) -> bool:
    with suppress(InvalidVersion):
        return bool(Version(release))
    return False


def observed(stack: Stack) -> dict[str, object]:
    """How the installed sglang reads exclude lists, in the words of engines/sglang.yaml, from its files."""

    def has(path: str, text: str) -> bool:
        return text in read_text(stack.find("sglang", [f"srt/{path}"]))

    quark = "layers/quantization/quark"
    asks = has("models/deepseek_common/utils.py", "can_fuse_shared_expert")
    exempt = has(f"{quark}/quark.py", "def _is_draft_layer")
    return {
        "draft_list": "literals" if has("models/glm4_moe.py", "_resolve_nextn_quant_config") else "mapped",
        "veto": "none" if not asks else "not_mtp" if exempt else "all",
        "container_leaf": has(f"{quark}/utils.py", 'layer_name.endswith(".experts")'),
    }


_SAYS = {
    (
        "draft_list",
        "literals",
    ): "draft class GlmMoeDsaForCausalLMNextN: literal entries of the MTP layer reach the draft",
    ("draft_list", "mapped"): "draft class DeepseekV3ForCausalLMNextN: the draft reads the entries of layer 61 as its "
    "own; lists that glmquant writes name model.layers.<MTP> too, and load",
    ("veto", "none"): "shared-expert gate: none, shared experts are fused whatever their format is",
    (
        "veto",
        "all",
    ): "shared-expert gate: any entry with the text shared_expert switches fusion off, the MTP layer's too",
    (
        "veto",
        "not_mtp",
    ): "shared-expert gate: entries with the text shared_expert switch fusion off, but for the MTP layer's",
    ("container_leaf", True): "one excluded expert excludes the container of its layer",
    ("container_leaf", False): "experts are excluded by the name of their container only",
}
_SOURCES = {
    "draft_list": "sglang#30265, 0.5.16",
    "veto": "sglang#35200, 0.5.18; sglang#36124, 0.5.19",
    "container_leaf": "sglang#39317, 0.5.21",
}


def _semantics(stack: Stack, release: str) -> Iterator[Line]:
    found = observed(stack)
    expected: Mapping[str, object] = {}
    with suppress(GlmquantError):  # said already
        expected = rules_for("sglang", nearest("sglang", release).release) if release else {}
    for name, value in found.items():
        text = _SAYS[name, value]
        if name in expected and expected[name] != value:
            why = f"sglang {release} as released does otherwise: {_SAYS[name, expected[name]]}"
            fix = f"This tree is patched: check with --release of the one it resembles, not {release}."
            yield Line(name.replace("_", "-"), NOTE, f"{text}; {why}", fix, _SOURCES[name])
        else:
            yield Line(name.replace("_", "-"), OK, text, "", _SOURCES[name])


def _guard(guard: Guard | None) -> Line:
    source = "sglang#29373, 0.5.15"
    if guard is None:
        return Line("rocm-guard", NOTE, "fused_metadata_copy.cuh is not there: nothing to guard", "", source)
    if guard.present:
        return Line(
            "rocm-guard", OK, "fused_metadata_copy.cuh compiles on ROCm: drafts may be deeper than 3", "", source
        )
    return Line(
        "rocm-guard",
        FIX,
        f"{guard.path} includes cuda_runtime.h without a USE_ROCM guard: with drafts of 4 and deeper every step tries "
        "to compile it (reported: 227 tokens a second at depth 3, 7 at depth 4)",
        "Draft at most 3 ahead (serve does so), take sglang 0.5.15 or later, or mend it: glmquant doctor --write-patch "
        "FILE, then patch -p1 in the folder that holds sglang.",
        source,
    )


def _attention(stack: Stack) -> Iterator[Line]:
    """sglang's kernels of sparse attention on ROCm where no flag names others: tilelang, since 0.5.20 triton."""
    paths = ("server_args.py", "arg_groups/overrides.py")
    text = "".join(read_text(stack.find("sglang", [f"srt/{path}"])) for path in paths)
    named = re.findall(r'dsa_prefill_backend(?:"\])? = "(triton|tilelang)"', text)
    if not named:
        yield Line("sparse-attention", NOTE, "which kernels sparse attention uses on ROCm is not known")
    elif stack.package(named[0]):
        yield Line("sparse-attention", OK, f"{named[0]}, which sparse attention uses on ROCm, is installed")
    else:
        yield Line(
            "sparse-attention",
            FIX,
            f"sparse attention uses {named[0]} on ROCm, and it is not installed",
            f"Install {named[0]} as the ROCm image of this release has it.",
            "sglang arg_groups/overrides.py _dsa_split_backend_resolution",
        )


def _torch(stack: Stack) -> Iterator[Line]:
    if not stack.package("torch"):
        yield Line("torch", FIX, "torch is not installed here", "Install a ROCm build of torch.")
        return
    text = read_text(stack.find("torch", ["version.py"]))
    hip = [line.partition("=")[2].strip().strip("'\"") for line in text.splitlines() if line.startswith("hip")]
    release = stack.release("torch")
    if hip and hip[0] not in ("None", ""):
        yield Line("torch", OK, f"torch {release} for ROCm {hip[0]}")
    else:
        yield Line("torch", FIX, f"torch {release} is not a ROCm build", "Install torch for ROCm.")


def _transformers(stack: Stack) -> Iterator[Line]:
    release = stack.release("transformers")
    if not release:
        yield Line("transformers", FIX, "transformers is not installed here", "Install what the engine pins.")
        return
    if not stack.find("transformers", ["models/glm_moe_dsa/configuration_glm_moe_dsa.py"]):
        text = f"transformers {release} does not know glm_moe_dsa: KeyError while the config is read"
        yield Line("transformers", FIX, text, "Install transformers 5.8.1 or later, as the engine pins it.")
        return
    pin = _pin(stack, "transformers")
    if pin and not pin.specifier.contains(release, prereleases=True):
        text = f"transformers {release} knows glm_moe_dsa; the installed sglang was released with {pin.specifier}"
        yield Line("transformers", NOTE, text)
    else:
        yield Line("transformers", OK, f"transformers {release} knows glm_moe_dsa")


def _pin(stack: Stack, name: str) -> Requirement | None:
    for text in stack.requirements("sglang"):
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.name == name and requirement.marker is None:
            return requirement
    return None


def _quark(stack: Stack) -> Line:
    release = stack.release("amd-quark")
    if not release:
        return Line("quark", OK, "AMD Quark is not installed; serving does not need it")
    if _numbered(release) and Version(release) < Version("0.13"):
        return Line(
            "quark", NOTE, f"AMD Quark {release}: glmquant quantizes with 0.13 or later; serving does not need it"
        )
    return Line("quark", OK, f"AMD Quark {release}")


def examine_tables(tables: Tables | None) -> Iterator[Line]:
    """The installed AITER."""
    if tables is None:
        yield Line(
            "aiter",
            FIX,
            "AITER is not installed here: MXFP4 experts have no other kernel on ROCm",
            "Install amd-aiter as the engine's ROCm image has it.",
        )
        return
    text = f"AITER {tables.release or '(a checkout)'}: {len(tables.rows):,} tuned rows in {len(tables.files)} tables"
    if not tables.known:
        yield Line("aiter", NOTE, text + "; how it rounds token counts is not known, that of newer releases is assumed")
    else:
        yield Line("aiter", OK, f"{text}; token counts rounded as in {tables.rule['about']}")


def examine_checkpoint(subject: Subject, launch: Launch | GlmquantError) -> Iterator[Line]:
    """What the engine release does with a checkpoint; an error is why it cannot be launched."""
    if isinstance(launch, GlmquantError):
        yield Line("checkpoint", FIX, launch.message, launch.hint)
        return
    yield Line("checkpoint", OK, f"{subject.folder} loads in {subject.target}")
    for flag in subject.evaluation.flags:
        reason = next((setting.reason for setting in launch.flags if setting.name == flag), "")
        yield Line("flag", NOTE, f"needs {flag}: {reason}", "serve adds it.")
    for fault in subject.evaluation.faults:
        if fault.verdict.value == "slow":
            yield Line("fusion", FIX, f"{fault.role}: {fault.message}", f"glmquant exclusions fix {subject.folder}")
    for note in launch.notes:
        yield Line("launch", NOTE, note)


def examine_keys(subject: Subject, launch: Launch, hardware: Hardware, tables: Tables | None) -> Iterator[Line]:
    """Tuned kernels for what a launch will ask for."""
    if tables is None:
        return
    try:
        report = look_up(subject, launch, hardware, tables)
    except GlmquantError as err:
        yield Line("kernel-keys", NOTE, err.message, err.hint)
        return
    for line in report.lines:
        if not line.served:
            state = "fused" if line.fused else "not fused"
            yield Line("kernel-keys", NOTE, f"if shared experts were {state}: {line.shape}: {line.tuned}")
        elif line.misses:
            yield Line(
                "kernel-keys",
                FIX if line.shape.role == "target" else NOTE,  # the draft is one layer of 76
                f"{line.shape}: {line.tuned}; the rest is left to a heuristic",
                f"glmquant tune-input {subject.folder} -o FILE writes the input for AITER's tuner.",
            )
        else:
            yield Line("kernel-keys", OK, f"{line.shape}: {line.tuned}")
