"""Writing a folder so that it is there whole or not at all."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Set
from pathlib import Path

from molora_jax.files import naming_path


@contextlib.contextmanager
def new_folder(path: str | Path, *, owned: Set[str], overwrite: bool) -> Iterator[Path]:
    """Yields a temporary folder beside `path`, renamed to `path` when the block ends without error.

    An existing folder is replaced only with `overwrite`, and only where it holds nothing but
    `owned` names, so that a mistyped path cannot delete somebody's data.

    Raises as `check_folder`; in the block a full disk, and an OSError without a file, name `path`.
    """
    path = Path(path)
    check_folder(path, owned=owned, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(4)
    temporary = path.with_name(f".{path.name}.new-{mark}")
    temporary.mkdir()
    try:
        with naming_path(path):
            yield temporary
        if path.exists():
            old = path.rename(path.with_name(f".{path.name}.old-{mark}"))
            try:
                temporary.rename(path)
            except OSError:
                old.rename(path)
                raise
            shutil.rmtree(old)
        else:
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_folder(path: str | Path, *, owned: Set[str], overwrite: bool) -> None:
    """What `new_folder` would refuse, without writing: for before the work that the folder is for.

    Raises:
      ValueError: a file is there or on the way there, or a folder that is not to be replaced.
      OSError: no folder can be made there; as `check_writable`.
    """
    path = Path(path)
    if path.exists():
        _check_replaceable(path, owned, overwrite)
    check_writable(path)


def check_writable(path: str | Path) -> None:
    """Whether a folder can be made beside `path`; names the folder in which it cannot.

    Raises ValueError where a file is on the way there, OSError where the system refuses.
    """
    path = Path(path)
    nearest = next(each for each in path.absolute().parents if os.path.lexists(each))
    if not nearest.is_dir():
        raise ValueError(f"{path} cannot be written: {nearest} is no folder. Choose another path")
    # Only trying tells: root may write anywhere by the mode bits, and yet not in /proc.
    trial = nearest / f".{path.name}.new-{secrets.token_hex(4)}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        raise OSError(
            f"{path} cannot be written: no folder can be made in {nearest} ({error.strerror}). "
            "Choose another path"
        ) from None


def _check_replaceable(path: Path, owned: Set[str], overwrite: bool) -> None:
    if not path.is_dir():
        raise ValueError(f"{path} is a file; expected a folder to write. Choose another path")
    inside = sorted(each.name for each in path.iterdir())
    if inside and not overwrite:
        raise ValueError(f"{path} exists already. Choose another path, or pass overwrite=True")
    foreign = [name for name in inside if name not in owned]
    if foreign:
        raise ValueError(
            f"{path} is not replaced: it holds {foreign[0]!r}, which is not one of the files "
            f"written there ({', '.join(sorted(owned))}). Choose another path, or clear it first"
        )
