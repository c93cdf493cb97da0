"""What can go wrong, as one small family. Every message says what is wrong, where, and what to do."""

from __future__ import annotations


class GlmquantError(Exception):
    """An expected failure: bad input, a refused request, a missing tool.

    Attributes:
        message: what is wrong and where (file, tensor, key).
        hint: what the user can do about it, or an empty string.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message if not hint else f"{message}\n  {hint}")
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type[GlmquantError], tuple[str, str]]:
        """So that it survives the way from another process."""
        return type(self), (self.message, self.hint)

    def also(self, hint: str) -> GlmquantError:
        """The same error with one more thing that the user can do."""
        return type(self)(self.message, "\n  ".join(filter(None, (self.hint, hint))))


class CheckpointError(GlmquantError):
    """A checkpoint on disk is damaged, incomplete or not what the verb needs."""


class RecipeError(GlmquantError):
    """A recipe file, a recipe name or an override is wrong, or asks for what no engine can load."""


class ExclusionError(GlmquantError):
    """No exclusion list serves every target engine."""


class OutputError(GlmquantError):
    """The output folder cannot be used or written."""


class BackendError(GlmquantError):
    """The quantization backend is missing, cannot run, or met a value it must not quantize."""
