"""glmquant.mxfp4.format: the decoder, against values written out from the OCP MX specification v1.0."""

import numpy as np
import pytest

from glmquant.mxfp4.format import decode, unpack

# Table 6 of the specification, E2M1: the value of each code.
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
ALL_CODES = bytes.fromhex("1032547698badcfe")


def block(codes: bytes, scale: int) -> np.ndarray:
    """One block of 32 elements: the given bytes, then zeros."""
    packed = np.zeros((1, 16), np.uint8)
    packed[0, : len(codes)] = list(codes)
    return decode(packed, np.array([[scale]], np.uint8))[0]


def test_all_16_codes_have_the_values_of_the_specification() -> None:
    decoded = block(ALL_CODES, 127)
    assert decoded.dtype == np.float32
    assert decoded.tolist() == VALUES + [0.0] * 16
    assert np.signbit(decoded).tolist() == [False] * 8 + [True] * 8 + [False] * 16


def test_the_low_nibble_is_the_even_column() -> None:
    assert unpack(np.array([[0x21, 0xF3]], np.uint8)).tolist() == [[1, 2, 3, 15]]
    assert block(b"\x21\xf3", 127)[:4].tolist() == [0.5, 1.0, 1.5, -6.0]


@pytest.mark.parametrize(
    ("scale", "factor"), [(0, 2.0**-127), (1, 2.0**-126), (126, 0.5), (127, 1.0), (128, 2.0), (252, 2.0**125)]
)
def test_a_scale_byte_is_an_exponent_with_bias_127(scale: int, factor: float) -> None:
    # Float32 has all of these values, some as subnormals: no rounding.
    assert block(ALL_CODES, scale)[:16].tolist() == [value * factor for value in VALUES]


def test_scale_byte_255_makes_the_whole_block_nan_and_no_other() -> None:
    packed = np.full((2, 32), 0x11, np.uint8)
    decoded = decode(packed, np.array([[127, 255], [128, 127]], np.uint8))
    assert np.isnan(decoded[0, 32:]).all()
    assert (decoded[0, :32] == 0.5).all() and (decoded[1, :32] == 1.0).all() and (decoded[1, 32:] == 0.5).all()


def test_what_float32_cannot_hold_is_inf() -> None:
    assert block(ALL_CODES, 254)[:8].tolist() == [v * 2.0**127 for v in VALUES[:4]] + [np.inf] * 4


def test_scales_belong_to_their_row_and_their_32_columns() -> None:
    packed = np.full((3, 64), 0x22, np.uint8)
    scale = np.arange(127, 139, dtype=np.uint8).reshape(3, 4)
    expected = np.repeat(2.0 ** np.arange(12).reshape(3, 4), 32, axis=1)
    assert (decode(packed, scale) == expected).all()


@pytest.mark.parametrize(
    ("packed", "scale"),
    [
        ((4, 32), (4, 1)),  # too few scales
        ((4, 32), (4, 3)),  # too many
        ((4, 32), (3, 2)),  # another number of rows
        ((4, 24), (4, 1)),  # 48 columns are no whole number of blocks
        ((2, 4, 32), (2, 4, 2)),
        ((32,), (2,)),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(packed: tuple[int, ...], scale: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        decode(np.zeros(packed, np.uint8), np.zeros(scale, np.uint8))


def test_other_dtypes_than_uint8_are_refused() -> None:
    with pytest.raises(ValueError, match="must be uint8, not int8 and uint8"):
        decode(np.zeros((1, 16), np.int8), np.zeros((1, 1), np.uint8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be uint8, not uint8 and float32"):
        decode(np.zeros((1, 16), np.uint8), np.ones((1, 1), np.float32))  # type: ignore[arg-type]
