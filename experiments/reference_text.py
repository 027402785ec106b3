"""Technical prose that every machine has: the reference documentation in installed packages.

A document is one module: its longer docstrings, in order, less their examples. So whole modules
are held out, though packages repeat a paragraph here and there.
"""

import ast
import functools
import importlib.metadata
import pathlib
import re
import textwrap
from collections.abc import Iterator

# Packages that this project depends on, and that say much about themselves: {package: folder}.
PACKAGES = {
    "flax": "flax",
    "matplotlib": "matplotlib",
    "numpy": "numpy",
    "optax": "optax",
    "scikit-learn": "sklearn",
}
SOURCE = "docstrings of " + ", ".join(PACKAGES)
LICENCE = "BSD-3-Clause, Apache-2.0, Matplotlib licence"

SHORTEST_DOCSTRING = 300  # characters; below that there is little but a signature in words
SHORTEST_DOCUMENT = 1_500
LARGEST_FILE = 60_000  # bytes; a few giants cost as much time as many others
SKIPPED = {"test", "tests", "testing", "_vendor", "externals", "_array_api", "vendored"}


@functools.cache
def documents() -> tuple[str, ...]:
    """One a module, in the order of packages and paths; the installed versions decide them."""
    found = []
    for package, folder in PACKAGES.items():
        root = pathlib.Path(str(importlib.metadata.distribution(package).locate_file(folder)))
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).parts
            if SKIPPED.intersection(parts[:-1]) or re.match("test_|_version", parts[-1]):
                continue
            if SHORTEST_DOCUMENT <= path.stat().st_size <= LARGEST_FILE:
                document = prose(path.read_text(encoding="utf-8"))
                if len(document) >= SHORTEST_DOCUMENT:
                    found.append(document)
    return tuple(found)


def prose(source: str) -> str:
    """The longer docstrings of one module's source, a blank line between them; may be empty."""
    texts = (without_examples(text) for text in _docstrings(ast.parse(source)))
    # A method that hands on its docstring would say the same twice.
    return "\n\n".join(dict.fromkeys(text for text in texts if len(text) >= SHORTEST_DOCSTRING))


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Of the module, its classes, their methods and its functions, from top to bottom."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                nodes[:0] = node.body


def without_examples(docstring: str) -> str:
    """The prose of a docstring: no doctests, no literal blocks, no headings left with nothing."""
    kept: list[str] = []
    literal = None  # the indentation of the line that opened a literal block
    in_doctest = False
    for line in textwrap.dedent(docstring).splitlines():
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if literal is not None and text:
            if indent > literal:
                continue
            literal = None
        in_doctest = bool(text) and (in_doctest or text.startswith(">>>"))
        if in_doctest:
            continue
        if re.match(r"\.\. (plot|code|code-block|testcode|ipython|jupyter-execute)::", text):
            literal = indent
            continue
        kept.append(line.rstrip())
        if text.endswith("::"):
            literal = indent
    text = "\n".join(kept).strip()
    text = re.sub(r"(?m)^(Examples?|References)\n-+\n+(?=\S[^\n]*\n[-=]{3,}$|\Z)", "", text + "\n")
    return re.sub(r"\n{3,}", "\n\n", text).strip()
