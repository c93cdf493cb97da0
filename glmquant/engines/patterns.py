"""Exclude entries that are patterns, matched within bounds: the list comes from a stranger's config.json.

A pattern that can match a name in few ways is matched by `re` in no time; any other by the `regex` package, which takes
a time limit. What either would need much memory or time to compile is refused.
"""

from __future__ import annotations

import fnmatch
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from glmquant.errors import ExclusionError
from glmquant.text import short

# A list that names every expert of GLM-5.2 has 59,904 entries; a pattern that spells out 256 experts, 900 characters.
MAX_ENTRIES = 500_000
MAX_ENTRY = 5_000
# Seconds that the patterns of one list may take for all module names of an engine; real ones take some 0.05.
BUDGET = 5.0
_LONG_NAME = 200
_MAX_WAYS = math.log(10_000_000)
_MAX_UNROLLED = math.log(1_000_000)

Test = Callable[[str], bool]


def check_list(entries: Iterable[str]) -> list[str]:
    """The entries without repetitions.

    Raises:
        ExclusionError: there are too many, or one is too long.
    """
    found = list(dict.fromkeys(entries))
    if len(found) > MAX_ENTRIES:
        raise ExclusionError(f"the exclude list has {len(found):,} entries; the limit is {MAX_ENTRIES:,}", _SHORTER)
    for entry in found:
        _check_length(entry)
    return found


def _check_length(entry: str) -> None:
    if len(entry) > MAX_ENTRY:
        text = f"entry {short(entry)} has {len(entry):,} characters; the limit is {MAX_ENTRY:,}"
        raise ExclusionError(text, _SHORTER)


_SHORTER = "`glmquant exclusions CKPT --form regex` writes a short list."


@lru_cache(64)
def any_of(entries: tuple[str, ...], how: str) -> Test:
    """Whether any of the entries matches a name. The answers are kept: all releases ask about the same names.

    Args:
        how: see `Patterns`.

    Raises:
        ExclusionError: as `Patterns`; the function returned, as `Patterns.hit`.
    """
    return lru_cache(65536)(Patterns(entries, how).hit) if entries else lambda _: False


class Patterns:
    """Some entries of one list and the time they have left.

    Args:
        how: `match` at the beginning of the name or `search` anywhere in it, for regexes behind `re:`; `glob`.
        left: seconds, by default BUDGET; the attribute counts down.

    Raises:
        ExclusionError: names an entry that is no valid regular expression, or too costly.
    """

    def __init__(self, entries: Iterable[str], how: str, left: float | None = None) -> None:
        self._entries, self.left = tuple(entries), BUDGET if left is None else left
        self._quick: list[Callable[[str], Any]] = []
        self._slow: list[tuple[str, Callable[..., Any]]] = []
        begun = time.perf_counter()
        for entry in self._entries:
            pattern, is_quick = compile_entry(entry, how == "glob")
            test = getattr(pattern, "search" if how == "search" else "match")
            if is_quick:
                self._quick.append(test)
            else:
                self._slow.append((entry, test))
            if time.perf_counter() - begun > self.left:
                raise _too_slow(entry)

    def hit(self, name: str) -> bool:
        """Whether one of the entries matches.

        Raises:
            ExclusionError: they took too much time.
        """
        if self.left <= 0:
            raise _too_slow(max(self._entries, key=_ways))
        begun = time.perf_counter()
        deadline = begun + self.left
        try:
            return any(test(name) for test in self._quick) or any(
                self._timed(entry, test, name, deadline) for entry, test in self._slow
            )
        finally:
            self.left -= time.perf_counter() - begun

    def _timed(self, entry: str, test: Callable[..., Any], name: str, deadline: float) -> bool:
        try:
            return bool(test(name, timeout=max(deadline - time.perf_counter(), 0.001)))
        except TimeoutError:
            raise _too_slow(entry) from None


@lru_cache(10_000)
def compile_entry(entry: str, is_glob: bool = False) -> tuple[Any, bool]:
    """A compiled entry, and whether `re` compiled it; if not, matching wants a `timeout`.

    Raises:
        ExclusionError: not a valid regular expression, or one that takes too much to compile.
    """
    text = fnmatch.translate(entry) if is_glob else entry.removeprefix("re:")
    bad = f"entry {short(entry)} is not a valid regular expression"
    _check_length(entry)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what other releases of Python may read differently
        try:
            pattern = re.compile(text)
        except (re.error, ValueError, RecursionError, OverflowError) as err:
            raise ExclusionError(f"{bad}: {err}") from err
        if is_glob or _ways(text) <= _MAX_WAYS:  # a glob never tries a second way
            return pattern, True
        if _unrolled(text) > _MAX_UNROLLED:
            raise _too_slow(entry)
        import regex  # type: ignore[import-untyped]

        try:
            return regex.compile(text), False
        except (regex.error, ValueError, RecursionError, OverflowError) as err:
            raise ExclusionError(f"{bad}: {err}") from err


def _ways(pattern: str) -> float:
    """Logarithm of the number of ways to match a long name, at most; infinite where that is not easily seen.

    A repeat has a way for each length, an alternative one for each branch. Repeated groups, references to groups, and
    extensions other than a plain group make it hard to see.
    """
    if re.search(r"\)[*+{]|\\[1-9]|\(\?[^:P]|\(\?P=", pattern):
        return math.inf
    repeats, maybe, groups = (sum(map(pattern.count, chars)) for chars in ("*+{", "?", "("))
    branches = (groups + 1) * math.log(1 + pattern.count("|") / (groups + 1))
    return repeats * math.log(_LONG_NAME) + maybe * math.log(2) + branches


def _unrolled(pattern: str) -> float:
    """Logarithm of the size that the regex package may unroll it to: counted repeats in full, nested ones doubled."""
    nested = min(pattern.count("("), sum(map(pattern.count, "*+{")))
    counts = [int(n[:9]) for braces in re.findall(r"\{[\s\d,]*\}", pattern) for n in re.findall(r"\d+", braces)]
    return math.log(len(pattern)) + nested * math.log(2) + sum(math.log(max(n, 1)) for n in counts)


def _too_slow(entry: str) -> ExclusionError:
    return ExclusionError(
        f"entry {short(entry)} takes too long: an exclude list gets {BUDGET:g} s to be matched with all module names",
        "Write it without repeats inside of repeats, or remove it from quantization_config.exclude.",
    )
