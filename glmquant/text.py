"""Strangers' text made safe to show: names come from files, and files come from strangers."""

from __future__ import annotations

import re
from reprlib import Repr
from typing import Any

# C0 but tab and newline, DEL, C1 (they move cursors and set titles); lone surrogates (no encoding can write them);
# line separators and bidi controls (the text reads as something else).
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")

_repr = Repr()
_repr.maxstring = _repr.maxother = 200
_repr.maxlevel, _repr.maxlist, _repr.maxdict = 2, 20, 5


def printable(text: str) -> str:
    """The text with what a terminal would act on written out, as in `\\x1b[31m`; newlines and tabs stay."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def short(value: Any) -> str:
    """`repr` of a value from a file, cut to a size that fits in a message whatever the value is."""
    text = _repr.repr(value)
    return text if len(text) <= 500 else text[:500] + "..."
