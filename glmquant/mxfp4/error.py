"""How far a quantized weight is from its source, measured with the independent decoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

WORST_BLOCK = 0.2 + 1e-6
"""No element of a block can be further off than this share of the block's largest: an even scale puts the largest at
3.5 to 7 (in units of the scale), the E2M1 values are at most 2 apart up to 6, and 7 becomes 6; 1 / 5 is the worst."""


@dataclass(frozen=True, slots=True)
class WeightError:
    """Of one weight, or a part of it.

    Attributes:
        signal, noise: sums of squares of the source and of the difference.
        worst_block: largest error of an element, as a share of its block's largest element; blocks at the ends of the
            exponent range, which E8M0 cannot hold, are left out.
    """

    name: str
    signal: float
    noise: float
    worst_block: float

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise in dB; inf without noise."""
        return 10 * math.log10(self.signal / self.noise) if self.noise and self.signal else math.inf

    @staticmethod
    def of_parts(parts: Sequence[WeightError]) -> WeightError:
        signal, noise = (sum(getattr(part, field) for part in parts) for field in ("signal", "noise"))
        return WeightError(parts[0].name, signal, noise, max(part.worst_block for part in parts))


def weight_error(
    name: str, source: memoryview, dtype: str, columns: int, packed: memoryview, scale: memoryview
) -> WeightError:
    """Of whole rows.

    Args:
        source: BF16, F16 or F32 values, little-endian, [rows, columns].
        packed, scale: uint8 [rows, columns / 2] and [rows, columns / 32].
    """
    import numpy as np

    from glmquant.mxfp4.format import BLOCK, decode

    values = _values(source, dtype).reshape(-1, columns)
    rows = len(values)
    ours = decode(
        np.frombuffer(packed, np.uint8).reshape(rows, columns // 2),
        np.frombuffer(scale, np.uint8).reshape(rows, columns // BLOCK),
    )
    blocks = values.reshape(-1, BLOCK)
    largest = np.abs(blocks).max(axis=1)
    known = (largest > 2.0**-124) & (largest < 2.0**127)
    with np.errstate(over="ignore", invalid="ignore"):
        off = np.abs(ours.reshape(-1, BLOCK) - blocks)
        share = off.max(axis=1)[known] / largest[known]
    noise = off[known].astype(np.float64)
    signal = blocks[known].astype(np.float64)
    return WeightError(
        name, float(np.vdot(signal, signal)), float(np.vdot(noise, noise)), float(share.max(initial=0.0))
    )


def _values(source: memoryview, dtype: str) -> npt.NDArray[np.float32]:
    import numpy as np

    if dtype == "BF16":
        return (np.frombuffer(source, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(source, {"F16": "<f2", "F32": "<f4"}[dtype]).astype(np.float32)
