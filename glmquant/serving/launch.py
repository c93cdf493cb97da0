"""A checkpoint, a profile and an engine release -> the environment and command of a server, each with its reason."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.version import Version

from glmquant.checks import SIZES
from glmquant.engines.model import DISABLE_FUSION
from glmquant.errors import GlmquantError
from glmquant.serving.settings import DraftLimit, EngineSettings, Hardware, Profile, Row, in_range
from glmquant.serving.subject import Subject


@dataclass(frozen=True, slots=True)
class Setting:
    """An environment variable or a flag; `value` is None for a switch."""

    name: str
    value: str | None
    reason: str
    source: str


@dataclass(frozen=True)
class Launch:
    """How to start a server.

    Attributes:
        release: the engine's, as asked for or installed; `modelled` is the one whose verdicts were used.
        tp, dp, ep: GPUs of a replica, replicas, ranks over which the routed experts are spread.
        draft_depth: tokens drafted ahead by the MTP layer; 0: it does not draft.
        program: the words before the flags; `extra` come last, as the user gave them.
        fused, draft_fused: whether the shared expert is computed as one more routed expert, in the target and in the
            draft (sglang's rules; vLLM by its environment variable).
        notes: what was changed or is unknown.
    """

    engine: str
    release: str
    modelled: str
    profile: str
    tp: int
    dp: int
    ep: int
    draft_depth: int
    program: tuple[str, ...]
    env: tuple[Setting, ...]
    flags: tuple[Setting, ...]
    extra: tuple[str, ...]
    fused: bool
    draft_fused: bool
    notes: tuple[str, ...]

    @property
    def argv(self) -> list[str]:
        """The command, word by word."""
        words = [*self.program]
        for flag in self.flags:
            words += [flag.name] if flag.value is None else [flag.name, flag.value]
        return [*words, *self.extra]

    @property
    def environ(self) -> dict[str, str]:
        return {setting.name: setting.value or "" for setting in self.env}

    def script(self) -> str:
        """The same for a shell, one flag a line."""
        lines = [f"export {shlex.quote(name)}={shlex.quote(value)}" for name, value in self.environ.items()]
        words = [shlex.join(self.program)]
        for flag in self.flags:
            words.append(flag.name if flag.value is None else f"{flag.name} {shlex.quote(flag.value)}")
        words += [shlex.join(self.extra)] if self.extra else []
        return "\n".join([*lines, " \\\n  ".join(words)])


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for beyond the profile; None where nothing."""

    tp: int | None = None
    dp: int | None = None
    ep: int | None = None
    draft_depth: int | None = None
    host: str | None = None
    port: int | None = None
    gpus: int | None = None
    extra: tuple[str, ...] = ()


def make_launch(
    subject: Subject,
    settings: EngineSettings,
    profile: Profile,
    hardware: Hardware,
    release: str,
    wish: Wish,
    guard: bool | None = None,
) -> Launch:
    """Choose environment and flags.

    Args:
        release: of the engine; subject.target is the modelled one that answers for it.
        guard: whether the installed fused_metadata_copy.cuh has its USE_ROCM guard; None: what the release has.

    Raises:
        GlmquantError: the release does not load the checkpoint, or sizes that do not divide it (names the legal ones).
    """
    if not in_range(release, settings.releases):
        raise GlmquantError(f"{settings.name} {release}: flags are known for {settings.releases} only")
    tp = profile.tp if wish.tp is None else wish.tp
    dp = profile.dp if wish.dp is None else wish.dp
    ep = 1 if wish.ep is None else wish.ep
    _check_sizes(subject, hardware, tp, dp, hardware.gpus if wish.gpus is None else wish.gpus)
    _check_experts(subject, settings, tp, dp, ep)
    depth, notes = _draft_depth(subject, settings, profile, release, wish.draft_depth, guard)
    _check_loads(subject, depth)
    conditions = {
        "draft": depth > 0,
        "dp": dp > 1,
        "ep": ep > 1,
        "fusable": subject.fusable,
        "unfuse": DISABLE_FUSION in subject.evaluation.flags,
        "host": wish.host is not None,
        "port": wish.port is not None,
    }
    words = {
        "checkpoint": str(subject.folder),
        "tp": str(tp),
        "dp": str(dp),
        "ep": str(ep),
        "draft_depth": str(depth),
        "draft_tokens": str(depth + 1),
        "host": wish.host or "",
        "port": "" if wish.port is None else str(wish.port),
        "engine": settings.name,
        "release": release,
    }

    def chosen(rows: Sequence[Row]) -> tuple[Setting, ...]:
        return tuple(_fill(row, words) for row in rows if row.applies(profile.name, release, conditions))

    env, flags = chosen(settings.env), chosen(settings.flags)
    if Version(release).public != subject.target.release:
        notes.append(
            f"{settings.name} {release} is not modelled: what is said here holds for {subject.target.release}."
        )
    notes += [setting.reason for setting in chosen(settings.notes)]
    notes += _memory_note(subject, hardware, tp)
    fused = _fused(subject, settings.name)
    return Launch(
        settings.name,
        release,
        subject.target.release,
        profile.name,
        tp,
        dp,
        ep,
        depth,
        tuple(word.format(**words) for word in settings.command),
        env,
        flags,
        wish.extra,
        *fused,
        tuple(notes),
    )


def _fill(row: Row, words: Mapping[str, str]) -> Setting:
    value = None if row.value is None else row.value.format(**words)
    return Setting(row.name, value, row.reason.format(**words), row.source)


def _fused(subject: Subject, engine: str) -> tuple[bool, bool]:
    """Shared-expert fusion of target and draft: sglang decides by its list, vLLM by the variable set for `fusable`."""
    if engine == "vllm":
        return subject.fusable, subject.fusable and subject.draft_shared == subject.draft_routed
    return subject.evaluation.fused_target, subject.evaluation.fused_draft


def legal_tp(subject: Subject) -> list[int]:
    """Tensor-parallel sizes, of 1 to 16, that cut no MXFP4 block apart and that the release loads right."""
    return subject.report.tensor_parallel.get(str(subject.target), list(SIZES))


def legal_ep(subject: Subject, tp: int) -> list[int]:
    """Expert-parallel sizes for a tensor-parallel size: they divide it and the number of routed experts."""
    return [size for size in SIZES if tp % size == 0 and subject.layers.routed_experts % size == 0]


def _check_sizes(subject: Subject, hardware: Hardware, tp: int, dp: int, gpus: int) -> None:
    legal = legal_tp(subject)
    fits = [size for size in legal if subject.nbytes / size <= hardware.memory]
    shown = ", ".join(map(str, fits)) or "none"
    if tp not in legal:
        raise GlmquantError(
            f"tensor-parallel size {tp} is not possible with {subject.target}: heads or blocks of 32 would be cut "
            "apart, or a rank would read the wrong part of an expert",
            f"Legal here: {shown}.",
        )
    if tp not in fits:
        raise GlmquantError(
            f"{subject.nbytes / tp / 1e9:,.0f} GB of weights a GPU do not fit into {hardware.memory / 1e9:,.0f} GB at "
            f"tensor-parallel size {tp}",
            f"Legal here: {shown}.",
        )
    if dp < 1 or tp * dp > gpus:
        raise GlmquantError(
            f"{dp} replicas of {tp} GPUs need {tp * dp} GPUs, the node has {gpus}",
            f"Legal with tensor-parallel size {tp}: at most {max(gpus // tp, 1)}. --gpus says how many GPUs there are.",
        )


def _check_experts(subject: Subject, settings: EngineSettings, tp: int, dp: int, ep: int) -> None:
    legal = legal_ep(subject, tp)
    if settings.expert_parallel == "all":
        legal = [size for size in (1, tp * dp) if subject.layers.routed_experts % size == 0]
    if ep not in legal:
        raise GlmquantError(
            f"expert-parallel size {ep} is not possible for {subject.layers.routed_experts} experts on {tp * dp} ranks",
            f"Legal with tensor-parallel size {tp}: {', '.join(map(str, dict.fromkeys(legal)))}.",
        )


def _memory_note(subject: Subject, hardware: Hardware, tp: int) -> list[str]:
    share = subject.nbytes / tp / hardware.memory
    if share < 0.6:
        return []
    return [
        f"Weights take {share:.0%} of each GPU's memory at tensor-parallel size {tp}: little is left for the KV cache."
    ]


def _draft_depth(
    subject: Subject,
    settings: EngineSettings,
    profile: Profile,
    release: str,
    asked: int | None,
    guard: bool | None,
) -> tuple[int, list[str]]:
    """How deep to draft, and why not as deep as wished."""
    wanted = profile.draft_depth if asked is None else asked
    if wanted < 0:
        raise GlmquantError(f"--draft-depth {wanted} is negative", "0 switches drafting off.")
    if wanted and not subject.drafts:
        text = (
            "The checkpoint has no MTP layer to draft with (config.json and tensors): one token a step, about a third"
        )
        return 0, [f"{text} of the speed for a single stream."]
    for limit in settings.draft_limits:
        if in_range(release, limit.releases) and wanted > limit.depth and not (limit.guard and guard):
            return limit.depth, [_limit_note(limit, wanted)]
    if guard is False and wanted > 3:
        found = next((limit for limit in settings.draft_limits if limit.guard), None)
        if found:
            return found.depth, [_limit_note(found, wanted)]
    return wanted, []


def _limit_note(limit: DraftLimit, wanted: int) -> str:
    return f"Draft depth {limit.depth} instead of {wanted}: {limit.reason} ({limit.source})."


def _check_loads(subject: Subject, depth: int) -> None:
    """Refuse what the release does not load right; what concerns the draft alone does not matter without a draft."""
    draft = (*(subject.layers.at(layer) for layer in subject.layers.mtp), "model.decoder.", "model.eh_proj")
    errors = [finding for finding in subject.report.findings if finding.severity == "error"]
    others = [f for f in errors if not (f.names and all(name.startswith(draft) for name in f.names))]
    blocking = errors if depth else others
    if not blocking:
        return
    first = blocking[0]
    names = f" ({first.names[0]}{', ...' if first.count > 1 else ''})" if first.names else ""
    see = f"See: glmquant validate {subject.folder} --targets '{subject.target.engine}=={subject.target.release}'."
    hint = f"{first.fix} {see}".strip()
    if not others:
        hint += " Only the draft is concerned: --draft-depth 0 serves without it."
    raise GlmquantError(
        f"{subject.target} does not load this checkpoint right: {first.code}: {first.message}{names}", hint
    )
