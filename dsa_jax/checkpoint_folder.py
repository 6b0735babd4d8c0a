"""Making a folder that appears whole or not at all, by one process at a time."""

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from dsa_jax.safetensors_headers import CheckpointError

LOCK_FILE = ".lock"


@contextlib.contextmanager
def new_folder(
    folder: Path | str, extra_files: Iterable[Path | str], kept: Callable[[Path], bool] | None
) -> Iterator[Path]:
    """A folder to fill, with copies of files, that takes its place if the block ends without an error.

    Args:
      folder: Folder to make; it must not exist or be empty.
      extra_files: Files to copy into it.
      kept: Tells of a folder that an earlier block left unfinished whether this one goes on with it; after an error it
        is then kept. None keeps nothing.

    Raises:
      CheckpointError: `folder` holds something, a file to copy is missing, or another process is at work.
    """
    folder = Path(folder).resolve()
    files = [Path(file) for file in extra_files]
    _check_place(folder, files)
    folder.parent.mkdir(parents=True, exist_ok=True)
    suffix = uuid.uuid4().hex[:8] if kept is None else "resumable"
    unfinished = folder.parent / f".{folder.name}.{suffix}.unfinished"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_locked(unfinished, folder))
        _check_place(folder, files)  # Again: another process may have finished it since.
        if kept is None or not kept(unfinished):
            _empty(unfinished)
        try:
            for file in files:
                shutil.copyfile(file, unfinished / file.name)
            yield unfinished
            os.replace(unfinished, folder)
        except BaseException:
            if kept is None or not kept(unfinished):
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        # Only now: without it in place another process could have entered a folder that is about to move.
        (folder / LOCK_FILE).unlink()


def _check_place(folder: Path, files: Sequence[Path]) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"output folder {folder} exists already and is not empty")
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"files to copy to {folder} are missing: {', '.join(missing)}")


@contextlib.contextmanager
def _locked(unfinished: Path, folder: Path) -> Iterator[None]:
    """Make `unfinished` and hold its lock, which the kernel takes back from a process that ends in any way."""
    unfinished.mkdir(exist_ok=True)
    lock = unfinished / LOCK_FILE
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with contextlib.suppress(OSError):  # A file system without locks: as before there were any.
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"output folder {folder} is being written by another process") from None
        if not lock.exists() or not os.path.samestat(os.fstat(descriptor), lock.stat()):
            raise CheckpointError(f"output folder {folder} was being written by another process, which has just ended")
        yield
    finally:
        os.close(descriptor)


def _empty(unfinished: Path) -> None:
    """Remove what an earlier block left, but the lock."""
    for entry in unfinished.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != LOCK_FILE:
            entry.unlink()
