"""Uploads an output to the Hugging Face Hub while it is being written, and can free the disk of what has arrived.

With huggingface_hub's `create_commit` (Xet or LFS, whichever the hub speaks): its `upload_large_folder` is gone since
version 2 and, like `upload_folder`, looks once at a folder that is finished.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from glmquant.checkpoint.hub_client import PATIENT, SOON, HubFile, Repo, Stopped, api, explained, list_files, retried
from glmquant.checkpoint.manifest import MANIFEST
from glmquant.checkpoint.source import CONFIG, RUN_FOLDER, SUFFIX
from glmquant.errors import OutputError

logger = logging.getLogger(__name__)

# The hub allows 128 commits an hour to one repository; GLM-5.2 becomes 36 of these.
COMMIT_SHARDS = 8
_MEMO = ".pushed"
_CHUNK = 1024 * 1024


class Pusher:
    """Takes finished shards, some of which make a commit; `finish` adds everything else, and config.json last.

    An upload that was stopped is gone on with: what the repository has already is not sent again. A shard counts as
    arrived when the hub gives the checksum of the local file for it.

    Args:
        repo: created if it does not exist.
        shards: all that the output will have.
        private: for a repository that is created.
        drop: remove a local shard once it has arrived.
        max_pending: bytes of shards that may wait for their upload; while there are more, `add` does not return, so
            that there is at most one more for each thread that calls it.

    Raises:
        OutputError: the repository cannot be created or read, or holds another checkpoint.
    """

    def __init__(
        self,
        repo: Repo,
        output: Path,
        shards: Collection[str],
        *,
        private: bool = True,
        drop: bool = False,
        max_pending: int | None = None,
    ) -> None:
        self._repo, self._output, self._shards = Repo(repo.id), output, set(shards)
        self.drop, self.max_pending = drop, max_pending
        self._stop, self._changed = threading.Event(), threading.Condition()
        with explained(self._repo, kind=OutputError):
            retried(lambda: api().create_repo(repo.id, private=private, exist_ok=True), self._stop, SOON)
        _, self._remote = list_files(self._repo, self._stop, SOON, OutputError)
        self._refuse_others()
        self.arrived = {file for file in self._shards if self._memo(file) == self._digest(file)}
        """Shards that are in the repository and may be gone from the disk."""
        self._pending: list[str] = []
        self._sizes: dict[str, int] = {}
        self._last = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()

    def __enter__(self) -> Pusher:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(1.0)  # an upload cannot be interrupted; as a daemon it ends with the program

    def add(self, file: str) -> None:
        """A shard is finished and durable. Waits while `max_pending` is exceeded.

        Raises:
            OutputError: an upload failed; nothing more will be sent.
            Stopped: `stop` was called.
        """
        with self._changed:
            self._pending.append(file)
            self._sizes[file] = (self._output / file).stat().st_size
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stop.is_set() or not self._full())
        self._raise()

    def finish(self, files: Iterable[str]) -> None:
        """Send what is left of these files, all of a finished output; config.json, which makes it one, at the end.

        Raises:
            OutputError: an upload failed, or a shard is neither on the disk nor in the repository.
        """
        names = list(files)
        sent = MANIFEST in self._remote and self._same(MANIFEST)  # by an earlier run, after its shards
        for file in names:
            if file in self._shards and file not in self.arrived and file not in self._sizes:
                if not (self._output / file).exists():
                    if sent and file in self._remote:
                        continue
                    raise OutputError(f"{file} is neither in {self._output} nor in {self._repo}")
                self.add(file)
        with self._changed:
            self._last = True
            self._changed.notify_all()
        self._thread.join()
        self._raise()
        self._send([file for file in names if file not in self._shards and file != CONFIG], "Add side files")
        self._send([file for file in names if file == CONFIG], f"Add {CONFIG}")

    def stop(self) -> None:
        """Begin no upload any more, and end whoever waits in `add`; does not wait itself."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()

    def _raise(self) -> None:
        if self._error:
            raise self._error
        if self._stop.is_set():
            raise Stopped

    def _refuse_others(self) -> None:
        hint = "Name a new repository, or delete what is in this one."
        for file in self._remote:
            if file.endswith(SUFFIX) and file not in self._shards:
                raise OutputError(f"{self._repo} already holds {file}, which is no part of this output", hint)
        if CONFIG in self._remote and not (self._output / CONFIG).exists():
            raise OutputError(f"{self._repo} already holds a finished checkpoint ({CONFIG})", hint)

    def _full(self) -> bool:
        return (
            self.max_pending is not None
            and sum(self._sizes[file] for file in self._sizes.keys() - self.arrived) > self.max_pending
        )

    def _work(self) -> None:
        try:
            while batch := self._next():
                self._send(batch, f"Add {batch[0]}" + (f" and {len(batch) - 1} more" if len(batch) > 1 else ""))
                for file in batch:
                    self._drop_local(file)
                with self._changed:
                    self.arrived.update(batch)
                    self._changed.notify_all()
        except Stopped:
            pass
        except BaseException as err:
            self._error = err
            self.stop()

    def _next(self) -> list[str]:
        """Shards for a commit: as many as make one, fewer if somebody waits or none will come; [] at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stop.is_set()
                    or self._last
                    or len(self._pending) >= COMMIT_SHARDS
                    or (bool(self._pending) and self._full())
                )
            )
            if self._stop.is_set():
                raise Stopped
            batch, self._pending = self._pending[:COMMIT_SHARDS], self._pending[COMMIT_SHARDS:]
            return batch

    def _send(self, files: Sequence[str], message: str) -> None:
        """One commit with what the repository does not have yet, and proof that it arrived."""
        new = [file for file in files if not self._same(file)]
        if not new:
            return
        from huggingface_hub import CommitOperationAdd

        def commit() -> str:
            # Made anew in every try: they remember how far they got, the hub and its storage know it better.
            adds = [CommitOperationAdd(file, str(self._output / file)) for file in new]
            return api().create_commit(self._repo.id, adds, commit_message=message).oid

        logger.info("uploading %s", ", ".join(new))
        with explained(self._repo, new[0], kind=OutputError):
            oid = retried(commit, self._stop, PATIENT)
        _, self._remote = list_files(Repo(self._repo.id, oid), self._stop, PATIENT, OutputError)
        for file in new:
            if not self._same(file):
                raise OutputError(
                    f"{self._repo}: {file} did not arrive as it is in {self._output}: the Hub has "
                    + (self._digest(file) or "no such file"),
                    "Does a .gitignore in the repository name it? Nothing was removed here; try again with --resume.",
                )

    def _same(self, file: str) -> bool:
        """Whether the repository has exactly this local file."""
        remote, path = self._remote.get(file), self._output / file
        with explained(self._repo, file, self._output, OutputError):
            if not remote or path.stat().st_size != remote.size:
                return False
            state = remote.hasher()
            with open(path, "rb") as content:
                while chunk := content.read(_CHUNK):
                    if self._stop.is_set():
                        raise Stopped
                    state.update(chunk)
        return state.hexdigest() == remote.digest

    def _digest(self, file: str) -> str:
        return self._remote.get(file, HubFile(0, "")).digest

    def _memo(self, file: str) -> str | None:
        """What the hub gave as checksum when a shard had arrived."""
        try:
            return (self._output / RUN_FOLDER / (file + _MEMO)).read_text()
        except OSError:
            return None

    def _drop_local(self, file: str) -> None:
        """Remember that a shard has arrived before it goes: `arrived` of the next run depends on it."""
        with explained(self._repo, file, self._output, OutputError):
            (self._output / RUN_FOLDER).mkdir(exist_ok=True)  # a finished output has none
            (self._output / RUN_FOLDER / (file + _MEMO)).write_text(self._digest(file))
            if self.drop:
                (self._output / file).unlink()
