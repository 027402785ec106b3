"""Writing a folder so that it is there whole or not at all."""

import contextlib
import secrets
import shutil
from collections.abc import Iterator, Set
from pathlib import Path


@contextlib.contextmanager
def new_folder(path: str | Path, *, owned: Set[str], overwrite: bool) -> Iterator[Path]:
    """Yields a temporary folder beside `path`, renamed to `path` when the block ends without error.

    An existing folder is replaced only with `overwrite`, and only where it holds nothing but
    `owned` names, so that a mistyped path cannot delete somebody's data.
    """
    path = Path(path)
    if path.exists():
        _check_replaceable(path, owned, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(4)
    temporary = path.with_name(f".{path.name}.new-{mark}")
    temporary.mkdir()
    try:
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
