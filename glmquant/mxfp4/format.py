"""MXFP4 from the tables of the OCP Microscaling Formats (MX) specification v1.0: an independent decoder.

Written from the specification, not from any encoder, so that it can check one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK = 32
"""Elements per shared scale (section 5.2, MXFP4)."""

# E2M1 (section 5.3.3, table 6): sign, two exponent bits (bias 1), one mantissa bit; no Inf, no NaN.
E2M1 = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], dtype=np.float32
)

# E8M0 (section 5.4.1): an unsigned exponent with bias 127; 255 is NaN, there is no zero.
E8M0_BIAS = 127
E8M0_NAN = 255


def unpack(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Codes 0..15 from packed bytes: [..., n] -> [..., 2n]; the low nibble is the even column (Quark's order)."""
    codes = np.stack((packed & 0x0F, packed >> 4), axis=-1)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def decode(packed: npt.NDArray[np.uint8], scale: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Dequantize a weight.

    Args:
        packed: uint8 [out, in / 2].
        scale: uint8 [out, in / 32], E8M0 exponents.

    Returns:
        float32 [out, in]; NaN where the block's scale is NaN, Inf where float32 is too narrow.

    Raises:
        ValueError: shapes or dtypes do not belong together.
    """
    if packed.dtype != np.uint8 or scale.dtype != np.uint8:
        raise ValueError(f"packed and scale must be uint8, not {packed.dtype} and {scale.dtype}")
    if packed.ndim != 2 or scale.shape != (packed.shape[0], packed.shape[1] * 2 // BLOCK) or packed.shape[1] % 16:
        raise ValueError(f"packed {packed.shape} and scale {scale.shape} do not belong together")
    elements = E2M1[unpack(packed)].reshape(*scale.shape, BLOCK)
    exponent = scale.astype(np.int32) - E8M0_BIAS
    with np.errstate(over="ignore"):
        values = np.ldexp(elements, exponent[..., None])
    values[scale == E8M0_NAN] = np.nan
    return values.reshape(packed.shape[0], packed.shape[1] * 2)
