"""Config, stored formats and the division over GPUs -> the keys under which AITER looks its fused-MoE kernels up.

A key that the tuned tables lack gets a kernel from a heuristic instead. Which columns a key has depends on the
release: aiter_tables.py reads them; here is what each of them holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from glmquant.errors import CheckpointError, GlmquantError
from glmquant.serving.launch import Launch
from glmquant.serving.settings import Hardware
from glmquant.serving.subject import Subject


@dataclass(frozen=True, slots=True)
class KernelShape:
    """A fused MoE of one rank, without the number of tokens.

    Attributes:
        role: `target`, or `draft` for the MTP layer.
        expert: experts that the rank holds; the fused shared expert is one of them.
        topk: experts a token goes to, as in topk_ids.
        inter_dim: rows of gate_proj on the rank, padded as the engine pads them.
        masked: whether an expert mask is passed (expert parallelism).
    """

    role: str
    gfx: str
    cu_num: int
    model_dim: int
    inter_dim: int
    expert: int
    topk: int
    act_type: str
    dtype: str
    q_dtype_a: str
    q_dtype_w: str
    q_type: str
    use_g1u1: int = 1
    doweight_stage1: int = 0
    masked: bool = False

    def key(self, token: int) -> dict[str, str]:
        """Column -> value of a tuned table's row; a table has some or all of these columns."""
        values = {name: getattr(self, name) for name in self.__slots__ if name not in _NO_COLUMNS}
        return {name: str(value) for name, value in {**values, "token": token}.items()}

    def __str__(self) -> str:
        kind = "MXFP4" if self.q_type == rules()["mxfp4"]["q_type"] else "bf16"
        return f"{self.role} {kind} {self.model_dim}x{self.inter_dim}, {self.expert} experts, top {self.topk}"


_NO_COLUMNS = ("role", "masked")
COLUMNS = frozenset({*KernelShape.__slots__, "token"}.difference(_NO_COLUMNS))
"""All that a tuned table's key can have."""


@lru_cache
def rules() -> Mapping[str, Any]:
    data: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "aiter.yaml").read_text(encoding="utf-8"))
    return data


def kernel_shapes(
    subject: Subject, launch: Launch, hardware: Hardware, fused: bool | None = None
) -> tuple[KernelShape, ...]:
    """What the target and, if it drafts, the MTP layer will ask for.

    Args:
        fused: as if shared experts were fused, or not; None: as they are served.

    Raises:
        GlmquantError: an engine whose keys are not modelled (ATOM; vLLM with expert parallelism).
        CheckpointError: a size is missing in config.json.
    """
    if launch.engine == "atom" or (launch.engine == "vllm" and launch.ep > 1):
        what = "ATOM" if launch.engine == "atom" else "vLLM with expert parallelism"
        raise GlmquantError(f"kernel keys of {what} are not modelled", "They are for sglang, and vLLM without --ep.")
    shapes = [
        _shape(subject, launch, hardware, "target", _one(subject.routed), launch.fused if fused is None else fused)
    ]
    if launch.draft_depth:
        draft_fused = launch.draft_fused if fused is None else fused and subject.draft_routed == subject.draft_shared
        shapes.append(_shape(subject, launch, hardware, "draft", _one(subject.draft_routed), draft_fused))
    return tuple(shapes)


def _one(kinds: frozenset[str]) -> str:
    return next(iter(kinds)) if len(kinds) == 1 else "mxfp4"


def _shape(subject: Subject, launch: Launch, hardware: Hardware, role: str, kind: str, fused: bool) -> KernelShape:
    data = rules()
    ranks = launch.tp * (launch.dp if launch.engine == "vllm" else 1) // launch.ep
    width = -(-_size(subject.config, "moe_intermediate_size") // ranks)
    if kind == "mxfp4":
        padding = data["padding"][launch.engine]
        width = -(-width // padding) * padding
    form = data["mxfp4" if kind == "mxfp4" else "plain"]
    return KernelShape(
        role,
        hardware.gfx,
        hardware.compute_units,
        _size(subject.config, "hidden_size"),
        width,
        subject.layers.routed_experts // launch.ep + int(fused),
        _size(subject.config, "num_experts_per_tok") + int(fused),
        data["act_type"],
        data["dtype"],
        form["q_dtype"],
        form["q_dtype"],
        form["q_type"],
        masked=launch.ep > 1,
    )


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}, a positive number is needed")
    return value


def find_buckets(integers: Sequence[int]) -> Mapping[str, Any] | None:
    """The rule of the release whose get_padded_M has these integers in its source; None if it is not known."""
    wanted = sorted(set(integers))
    return next((rule for rule in rules()["buckets"] if rule["integers"] == wanted), None)


def buckets(rule: Mapping[str, Any], most: int) -> tuple[int, ...]:
    """Token counts that kernels are looked up under, when at most `most` tokens are computed at once."""
    low, high = rule["powers"]
    powers = [2**n for n in range(high.bit_length()) if low <= 2**n <= high]
    more = [size for size in rule.get("more", ()) if size <= most]
    return (*powers[: sum(size < most for size in powers) + 1], *more)


def most_tokens(launch: Launch) -> int:
    """Tokens computed at once at most: the chunk of prefill."""
    values = [flag.value for flag in launch.flags if flag.name == "--chunked-prefill-size" and flag.value]
    return int(values[-1]) if values else 32768
