"""What a quantization backend is, and one that checks another while it works."""

from __future__ import annotations

import zlib
from typing import Protocol

from glmquant.errors import BackendError

Buffer = bytearray | memoryview


class Backend(Protocol):
    """What turns weights into MXFP4; must be safe to call from several threads.

    Attributes:
        chunk_elements: how many elements it likes to be given at once.
        threads: how many threads it can use at once (0: any number).
    """

    name: str
    version: str
    chunk_elements: int
    threads: int

    def quantize_into(self, source: memoryview, dtype: str, columns: int, packed: Buffer, scale: Buffer) -> int:
        """Whole rows into the caller's buffers; the flat index of the first NaN or Inf, or -1."""
        ...


class CheckedBackend:
    """Gives what `backend` gives, and fails where `reference` differs in a single bit.

    Which chunks are checked depends on their bytes only, so a run can be repeated.

    Args:
        rate: share of the chunks to check, 0 to 1.
    """

    def __init__(self, backend: Backend, reference: Backend, rate: float) -> None:
        if not 0 <= rate <= 1:
            raise BackendError(f"--check-backend {rate} is not a share between 0 and 1")
        self.name, self.version = backend.name, reference.version
        self.chunk_elements, self.threads = backend.chunk_elements, reference.threads
        self._backend, self._reference, self._limit = backend, reference, rate * 2**32
        self.checked = 0

    def quantize_into(self, source: memoryview, dtype: str, columns: int, packed: Buffer, scale: Buffer) -> int:
        """As of `backend`.

        Raises:
            BackendError: the two differ; says where and how.
        """
        bad = self._backend.quantize_into(source, dtype, columns, packed, scale)
        if zlib.crc32(source[: 64 * columns]) < self._limit:
            self.checked += 1
            others = [bytearray(len(packed)), bytearray(len(scale))]
            theirs = self._reference.quantize_into(source, dtype, columns, *others)
            if (bad, theirs) != (-1, -1) and bad != theirs:
                raise self._differs(f"first non-finite element {bad} and {theirs}")
            for kind, ours, other in zip(("packed", "scale"), (packed, scale), others, strict=True):
                if bad < 0 and bytes(ours) != bytes(other):
                    at = next(i for i, (a, b) in enumerate(zip(ours, other, strict=True)) if a != b)
                    raise self._differs(
                        f"{kind} byte {at} of a chunk with {columns} columns is {ours[at]} and {other[at]}"
                    )
        return bad

    def _differs(self, what: str) -> BackendError:
        return BackendError(
            f"backend {self.name!r} and AMD Quark {self.version} differ: {what}",
            "Use --backend quark and report this.",
        )
