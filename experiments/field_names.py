"""Names of an experiment's fields without importing it, which would import JAX: for hints and
completion."""

import ast
import functools
import pathlib
from collections.abc import Iterator

_ROOT = pathlib.Path(__file__).resolve().parent.parent


def names(module: str) -> list[str]:
    """Fields of the Config of a module of this project, its own first.

    >>> names("experiments.paper_page")
    ['folders', 'run_missing', 'seed']
    """
    return list(dict.fromkeys(_fields(module, "Config")))


def _fields(module: str, name: str) -> Iterator[str]:
    """Annotated names of a class, then of what it inherits from, wherever that is defined."""
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            if any((alias.asname or alias.name) == name for alias in node.names):
                yield from _fields(node.module, name)
        elif isinstance(node, ast.ClassDef) and node.name == name:
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield line.target.id
            for base in node.bases:
                yield from _fields(module, ast.unparse(base))


@functools.cache
def _tree(module: str) -> ast.Module:
    path = _ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
