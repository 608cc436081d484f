"""What lies on disk appears whole or not at all, files and folders; locks; where the user's cache is."""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from widecli.errors import UsageError, WideError

_BUILDING = ".building-"
_STALE_AFTER_S = 24 * 3600
_RACES = 100  # for one lock: more are none
# EBADF: NFS locks no folder that is only read
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


def home() -> Path | None:
    """The user's home directory; None for a user without one, as containers have them."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/wide`, or `~/.cache/wide`; for a user without a home, a private folder among the temporary ones.

    Raises WideError where that one is somebody else's.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    if root:
        return Path(root) / "wide"
    if (own := home()) is not None:
        return own / ".cache" / "wide"
    folder = Path(tempfile.gettempdir()) / f"wide-cache-{os.getuid()}"
    with contextlib.suppress(OSError):  # whoever writes there says so
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
            raise WideError(
                f"there is no home directory, and {folder} is not this user's alone: name a folder for caches in "
                "XDG_CACHE_HOME"
            )
    return folder


def replace_unusable_caches(warn: Callable[[str], None]) -> None:
    """Where a folder that torch or Triton compile into cannot be written, let them use a temporary one and say so.

    torch fails as soon as it is used otherwise, also where nothing is compiled.
    """
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        named = os.environ.get(variable)
        if not named:
            continue
        try:
            Path(named).mkdir(parents=True, exist_ok=True)
            reason = None if os.access(named, os.W_OK | os.X_OK) else "not writable"
        except OSError as error:
            reason = error.strerror or str(error)
        if reason is None:
            continue
        os.environ[variable] = folder = tempfile.mkdtemp(prefix="wide-compiled-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        warn(f"{variable}={named} cannot be used ({reason}): what is compiled now is compiled again next time")


def given_path(name: str) -> Path:
    """The path that somebody wrote: `~` stands for the home directory where there is nothing of that very name.

    Raises UsageError for what no file can be called, or what lies where this user may not look.
    """
    path = Path(name)
    try:
        if name.startswith("~") and not path.exists():
            path = path.expanduser()
        path.exists()
    except RuntimeError:  # no such user
        return path
    except PermissionError:
        raise UsageError(f"{shortened(name)} lies in a folder that may not be read (permission denied)") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{shortened(name)} is no name that a file can have: {reason}") from None
    if "\0" in name:
        raise UsageError(f"{shortened(name)} is no name that a file can have: it holds a null character")
    return path


def refuse_name_for_tensors(path: Path, flag: str) -> None:
    """Refuses a folder for tensors whose name is no UTF-8: safetensors writes there and reads nothing back."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{path} is no UTF-8, and checkpoints can't be read from there: name another with {flag}."
        ) from None


def shortened(text: str, longest: int = 80) -> str:
    """A text as a message shows it."""
    return repr(text if len(text) <= longest else text[: longest - 3] + "...")


@contextlib.contextmanager
def disk_errors_named(folder: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn a full disk, or a cache folder that cannot be made or written, into one sentence."""
    try:
        yield
    except (OSError, WideError) as raised:
        error = raised if isinstance(raised, OSError) else raised.__cause__
        about_folder = isinstance(error, OSError) and _concerns(error, folder)
        if not isinstance(error, OSError) or (error is not raised and not about_folder):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = f" (about {max(needed_bytes // 2**20, 1)} MiB needed)" if needed_bytes else ""
            raise WideError(
                f"No space left for the cache in {folder}{needed}: free some, or point XDG_CACHE_HOME elsewhere"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM) or about_folder:
            raise WideError(
                f"The cache folder {folder} is not writable: point XDG_CACHE_HOME at one that is"
            ) from error
        raise


def _concerns(error: OSError, folder: Path) -> bool:
    """Whether an error names this folder, something in it, or a folder that it would lie in."""
    if not isinstance(error.filename, (str, bytes)):
        return False
    file, folder = Path(os.fsdecode(error.filename)).absolute(), folder.absolute()
    return file.is_relative_to(folder) or folder.is_relative_to(file)


def write_text(path: Path, text: str) -> None:
    """Writes `path` so that a reader, or a kill at any moment, sees the old content or the new one, never a part.

    Raises:
        WideError: no space left, or the folder cannot be written.
    """
    write_bytes(path, as_bytes(text))


def as_bytes(text: str) -> bytes:
    """UTF-8. A byte of a file's name that is none is written `\\udce9`: JSON and YAML give the name back from that."""
    return text.encode("utf-8", "backslashreplace")


def printable(value: Any) -> Any:
    """Plain data in which every text is UTF-8, as `as_bytes` writes it: for tables and for people."""
    if isinstance(value, str):
        return value if value.isascii() else as_bytes(value).decode()
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, list) else value


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`, for bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> WideError:
    """The sentence for a failed write: what could not be written, why, what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WideError(f"No space left to write {path}: free some, or name another folder with --run-dir.")
    return WideError(f"{path} cannot be written ({error.strerror or error}): name another folder with --run-dir.")


def write_json(path: Path, value: object) -> None:
    """Writes plain data as indented JSON, atomically; see `plain` for what becomes of numbers."""
    write_text(path, json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """Plain data for JSON: 0-d arrays and tensors become numbers, paths text, tuples lists, NaN and infinity null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # NumPy and torch, without importing either
        return plain(value.tolist())
    raise TypeError(f"a {type(value).__name__} cannot be recorded as JSON")


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a scratch directory beside `target` that takes its place, whole, when the block ends without an error.

    A process killed inside the block leaves `target` as it was; the scratch directory's name starts with a dot. Of a
    link it is what that leads to. A directory that cannot be moved, such as a mount, is filled where it is: the scratch
    directory lies in it, and its content takes the place of what was there.
    """
    from safetensors import SafetensorError

    target = target.resolve()
    scratch: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        in_place = stays_in_place(target)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target if in_place else target.parent))
        yield scratch
        _share(scratch)
        if in_place:
            _replace_content(target, scratch)
            return
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".old-{target.name}.", dir=target.parent))
            target.replace(old)  # replacing an empty directory is allowed
            scratch.replace(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            scratch.replace(target)
    except (OSError, SafetensorError) as error:  # safetensors wraps the errors of its own writes, a full disk too
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise WideError(f"cannot write {target}: {reason}; free some space or name another folder") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def stays_in_place(folder: Path) -> bool:
    """Whether a folder that is there cannot be put aside: a mount, one where this process is, or in a locked parent."""
    folder = folder.resolve()
    if not folder.is_dir():
        return False
    return os.path.ismount(folder) or Path.cwd().is_relative_to(folder) or not os.access(folder.parent, os.W_OK)


def _replace_content(folder: Path, scratch: Path) -> None:
    """Put what lies in `scratch`, itself in `folder`, in the place of everything else there."""
    old = Path(tempfile.mkdtemp(prefix=".old-", dir=folder))
    for entry in list(folder.iterdir()):
        if entry not in (old, scratch):
            entry.replace(old / entry.name)
    for entry in list(scratch.iterdir()):
        entry.replace(folder / entry.name)
    shutil.rmtree(old, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Take a folder away with all it holds; one that cannot be moved is emptied. A kill leaves no half under its name.

    Of a link it is what that leads to. Raises WideError where it cannot be taken away.
    """
    path = path.resolve()
    aside = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        if stays_in_place(path):
            with tempfile.TemporaryDirectory(prefix=".old-", dir=path, ignore_cleanup_errors=True) as nothing:
                _replace_content(path, Path(nothing))
            return
        path.rename(aside)
    except OSError as error:
        raise unwritable(path, error) from error
    shutil.rmtree(aside, ignore_errors=True)


def try_lock(file: Path, warn: Callable[[str], None] = lambda _: None) -> int | None:
    """Lock `file`, made where it is not there; None where another process has it locked.

    The lock ends with the descriptor that is returned, and with those of the children that inherit it. Where the file
    system has no locks nobody is kept out, and `warn` is told. Raises WideError where the file cannot be written.
    """
    for _ in range(_RACES):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise unwritable(file.parent, error) from error
        if not _lock(handle, file, warn):
            return None
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # whoever had it has taken it away meanwhile
    raise WideError(f"{file} cannot be locked, it is taken away each time: name another folder with --run-dir.")


def _share(folder: Path) -> None:
    """Give a folder and all in it the modes that new ones have there, and see its files safely on the disk.

    mkdtemp and safetensors make private ones; who may read these is for the umask and the folder around to say.
    """
    probe = folder / f".mode-{uuid.uuid4().hex}"
    probe.mkdir()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.rmdir()
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            continue
        if path.is_dir():
            path.chmod(mode)
        elif path.is_file():
            path.chmod(mode & 0o666)
            _sync(path)


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def changed_file(folder: Path, checksums: Mapping[str, str], names: Iterable[str]) -> str | None:
    """The first of the named files whose content is not what its checksum says; one without a checksum is not asked."""
    for name in names:
        if name in checksums and checksum(folder / name) != checksums[name]:
            return name
    return None


def _lock(handle: int, path: Path, warn: Callable[[str], None]) -> bool:
    """Lock an open file or folder; False, and closed, where another process has it."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(handle)
            raise unwritable(path, error) from error
        warn(f"{path.parent} has no locks ({error.strerror}): see to it that only one process works there")
    return True


@contextlib.contextmanager
def held(path: Path, flag: str = "--run-dir", warn: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Keep other processes out of a folder that a command writes inside the block; dead ones hold nothing.

    The lock is a file beside the folder, since `--overwrite` puts another folder in its place. Where nothing may be
    written there, as beside a mount, it is the folder itself, if that is there; where nothing can be locked `warn` is
    told so. `flag` names another folder on the command line. Raises WideError when another process holds it.
    """
    path = path.resolve()
    beside: Path | None = path.with_name(f".{path.name}.lock") if path.name else None
    try:
        handle = try_lock(beside, warn) if beside is not None else None
        taken = beside is not None and handle is None
    except WideError:  # what else cannot be written says so itself
        beside, taken, handle = None, False, None
    if beside is None and path.is_dir():
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise unwritable(path, error) from error
        taken = not _lock(handle, path, warn)
    if taken:
        raise WideError(
            f"another process works on {path}: wait for it or stop it, or name another directory with {flag}."
        )
    try:
        yield
    finally:
        if handle is not None:
            if beside is not None:
                with contextlib.suppress(OSError):
                    beside.unlink()  # while it is held: who locks it after that sees that it is gone
            os.close(handle)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def folder_in_one_piece(final: Path, is_valid: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield a folder to fill; when the block ends well it becomes `final` by one rename.

    A block that fails leaves nothing. If another process finished `final` first and it `is_valid`, that one stays;
    an invalid one is replaced.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final.parent)
    building = final.parent / f"{_BUILDING}{uuid.uuid4().hex}"
    building.mkdir()
    try:
        yield building
        for _ in range(3):  # another process may replace a broken folder at the same moment
            try:
                building.rename(final)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                if is_valid(final):
                    return
                # Renamed before it is deleted, so that no reader meets a half-deleted folder under the final name.
                with contextlib.suppress(FileNotFoundError):
                    final.rename(final.parent / f"{_BUILDING}{uuid.uuid4().hex}")
        raise WideError(f"{final} is being replaced by other processes again and again: run one at a time")
    finally:
        if building.exists():
            shutil.rmtree(building, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Delete what killed builds left behind, once it is surely nobody's work in progress."""
    for left in parent.glob(f"{_BUILDING}*"):
        with contextlib.suppress(OSError):
            newest = max((item.stat().st_mtime for item in left.iterdir()), default=left.stat().st_mtime)
            if time.time() - newest > _STALE_AFTER_S:
                shutil.rmtree(left, ignore_errors=True)
