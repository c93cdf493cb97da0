"""A small new file, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

from glmquant.errors import OutputError


def write_new(path: Path, text: str) -> None:
    """Write a text file that does not exist yet.

    Raises:
        OutputError: it exists, or cannot be written.
    """
    try:
        with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                temporary.chmod(0o644)
                os.link(temporary, path)  # fails where a rename would replace
            finally:
                temporary.unlink()
    except FileExistsError as err:
        raise OutputError(f"{path} exists", "Name a new file.") from err
    except OSError as err:
        raise OutputError(f"{path}: cannot be written: {err.strerror or err}") from err
