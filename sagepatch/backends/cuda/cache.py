"""Machine code kept on disk: compiled once a user, checked at every reading, rebuilt where anything
is wrong with it. Never a reason to fail.

An entry is a line of JSON (format, key, SHA-256 of the rest, what it was made from, the compiler's
remarks) and the cubin behind it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from sagepatch.backends.cuda.build import Compiled, Program, compile_program, nvrtc_version
from sagepatch.backends.cuda.cubin import is_cubin
from sagepatch.env import cache_dir
from sagepatch.errors import MachineError

logger = logging.getLogger("sagepatch")
# Progress of compiling: information that the command line shows and a library keeps to itself.
progress = logging.getLogger("sagepatch.compile")

FORMAT = 1
MOST_BYTES = 64 << 20
_LOCKS: dict[str, threading.Lock] = {}
_LOCKS_LOCK = threading.Lock()


def _forget_locks() -> None:
    """In a process forked while another thread held one: nobody there would ever let it go."""
    global _LOCKS_LOCK
    _LOCKS.clear()
    _LOCKS_LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def kept(program: Program, *, folder: Path | None = None) -> Compiled:
    """The machine code of a program: from `folder` (default: `kernels` in the cache directory), or
    compiled now and kept there. Threads and processes that want the same one wait for the first.

    Raises `MachineError` as `compile_program` does.
    """
    version = nvrtc_version()
    if version is None:
        return compile_program(program)  # raises, with the reason
    key = program.key(version)
    with _LOCKS_LOCK:
        lock = _LOCKS.setdefault(key, threading.Lock())
    with lock:
        folder = _folder() if folder is None else folder
        if folder is None:
            return _compile(program)
        path = folder / f"{Path(program.source).stem}-{program.target}-{key[:32]}.cubin"
        found = read(path, key)
        if found is not None:
            return found
        with _only_process(path.with_suffix(".lock")):
            found = read(path, key)  # another process may have been first
            if found is None:
                found = _compile(program)
                _write(path, key, program, found)
            return found


def read(path: Path, key: str) -> Compiled | None:
    """The entry at `path` if it is ours, whole and of this key; None, with a remark, where not."""
    try:
        data = _read_own(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("sagepatch: %s is not read but made anew: %s", path, error)
        return None
    line, _, body = data.partition(b"\n")
    try:
        header = json.loads(line)
        sound = (
            header["format"] == FORMAT
            and header["key"] == key
            and header["sha256"] == sha256(body).hexdigest()
            and is_cubin(body)
        )
        log = str(header["log"])
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        logger.warning("sagepatch: %s is damaged or not what it says, and is made anew", path)
        return None
    return Compiled(body, log)


def _read_own(path: Path) -> bytes:
    """The bytes of a regular file that only this user can write."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(handle, "rb") as file:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError("no regular file")
        if hasattr(os, "getuid"):
            if facts.st_uid != os.getuid():
                raise ValueError(f"it belongs to user {facts.st_uid}")
            if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ValueError("others may write to it")
        if facts.st_size > MOST_BYTES:
            raise ValueError(f"it has {facts.st_size} bytes")
        return file.read()


def _write(path: Path, key: str, program: Program, made: Compiled) -> None:
    header = {
        "format": FORMAT,
        "key": key,
        "sha256": sha256(made.cubin).hexdigest(),
        "source": program.source,
        "arguments": program.arguments,
        "log": made.log,
    }
    line = json.dumps(header).encode() + b"\n"
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=path.stem, suffix=".new", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(line + made.cubin)
        os.replace(temporary, path)
    except OSError as error:
        logger.warning("sagepatch: a compiled kernel is not kept: %s", error)
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _compile(program: Program) -> Compiled:
    progress.info("compiling %s for %s (once)", program.source, program.target)
    return compile_program(program)


def _folder() -> Path | None:
    try:
        root = cache_dir()
        if root is None:
            return None
        folder = root / "kernels"
        folder.mkdir(mode=0o700, exist_ok=True)
    except (MachineError, OSError) as error:
        logger.warning("sagepatch: compiled kernels are not kept: %s", error)
        return None
    return folder


@contextlib.contextmanager
def _only_process(path: Path) -> Iterator[None]:
    """Hold the lock file while the block runs; where locks do not exist, several may compile the
    same, and the last rename stands.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError as error:
        logger.debug("sagepatch: no lock at %s: %s", path, error)
        yield
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            logger.debug("sagepatch: no lock at %s: %s", path, error)
        yield
    finally:
        # A process forked meanwhile has the file open, too, and would hold what is not let go.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
