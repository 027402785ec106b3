"""Writes reference.md: every public name with its arguments and the first line of its docstring."""

import importlib
import inspect
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"
HEAD = """\
# Every public name

`help(molora_jax.generate)` and the like print shapes, units, errors and an example that the
tests run. Written by `python docs/reference.py`.
"""
# What names are for: the package, and a pattern of the module that they live in and the name.
SECTIONS = {
    "Base models": ("molora_jax", r"models\."),
    "Adapters and compositions": ("molora_jax", r"adapters\."),
    "Routers": ("molora_jax", r"(?:molora_jax\.routing|pallas_kernels\.types)\b"),
    "Generation": ("molora_jax", r"generation\."),
    "Training and evaluation": ("molora_jax", r"training\."),
    "Looking inside": ("molora_jax", r"(?:analysis|tools|compilations)\b"),
    "Pictures and tables": ("molora_jax.display", r"."),
    "Many devices and processes": (
        "molora_jax.parallel",
        r"\.(make_mesh|use_mesh|start_processes|is_primary|fetch)$",
    ),
    "The operation": ("pallas_kernels", r"."),
    "Experiments and their runs": ("experiments", r"."),
}


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page as it must be."""
    parts = [HEAD]
    for title, (package, pattern) in SECTIONS.items():
        module = importlib.import_module(package)
        found = [(name, getattr(module, name)) for name in sorted(module.__all__)]
        rows = [
            f"| {_called(name, value)} | {_summary(value)} |"
            for name, value in found
            if callable(value) and re.search(pattern, f"{value.__module__}.{name}")
        ]
        parts.append(f"## {title}\n\n`from {package} import …`\n\n| | |\n| --- | --- |\n")
        parts[-1] += "\n".join(rows) + "\n"
    return "\n".join(parts)


def _called(name: str, value) -> str:
    """The name, linked to its file, and of a function its arguments without types and defaults."""
    path = pathlib.Path(inspect.getsourcefile(inspect.unwrap(value)) or "").resolve()
    linked = f"[`{name}`](../{path.relative_to(ROOT).as_posix()})"
    if inspect.isclass(value):
        return linked
    words, starred = [], False
    for each in inspect.signature(value).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not starred:
            words.append("\\*")
            starred = True
        words.append(each.name if each.default is each.empty else f"{each.name}=")
    return f"{linked} ({', '.join(words)})"


def _summary(value) -> str:
    text = (inspect.getdoc(value) or "").partition("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
