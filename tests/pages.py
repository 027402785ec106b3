"""What the guides say that can be checked: commands, code blocks, links, quoted messages."""

import ast
import dataclasses
import functools
import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = {
    "cd",
    "curl",
    "export",
    "git",
    "hf",
    "make",
    "molora",
    "pip",
    "pytest",
    "python",
    "python3",
}
PROGRAMS |= {"source", "srun", "uv"}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
DOTS = ("...", "…")


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of a page: its words without comments and settings before it.

    partial  it is part of a sentence, or leaves something out as ..., so that it need not be whole
    """

    page: str
    words: tuple[str, ...]
    partial: bool

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"

    @property
    def called(self) -> str:
        """Its words with the ways to name the same program made one: `molora VERB`."""
        words = [re.sub(r"^.*/bin/", "", self.words[0]), *self.words[1:]]
        if words[0].startswith("python"):
            words[0] = "python"
        text = " ".join(words)
        for long, short in (
            ("python run.py", "molora run"),
            ("python -m molora_jax.parallel --plan", "molora plan"),
            ("python -m molora_jax.tools", "molora"),
            ("python -m experiments.results", "molora results"),
            ("python -m pytest", "pytest"),
        ):
            if text == long or text.startswith(f"{long} "):
                return short + text.removeprefix(long)
        return text

    @property
    def arguments(self) -> list[str]:
        """The words behind `molora VERB`, or behind the program's own name."""
        if self.words[1:3] == ("-m", "molora_jax.tools"):
            skipped = 4
        elif self.words[0].startswith("python"):
            skipped = 3 if self.words[1] == "-m" else 2
        else:
            skipped = 2 if self.called.startswith("molora ") else 1
        return [word for word in self.words[skipped:] if word not in DOTS]


@functools.cache
def text_of(page: pathlib.Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: pathlib.Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language; "" for those without."""
    return [
        re.sub(f"^{indent}", "", body, flags=re.MULTILINE)
        for indent, found, body in FENCE.findall(text_of(page))
        if found == language
    ]


def commands(page: pathlib.Path) -> list[Command]:
    """Every line of a fence that begins with a program, and every such `code` of a sentence."""
    found = []
    for body in blocks(page, ""):
        joined = re.sub(r"\\\n\s*", " ", body)
        for line in joined.splitlines():
            for part in line.split(" && "):
                found.append((part, False))
    for code in re.findall(r"`([^`]+)`", FENCE.sub("", text_of(page))):
        found.append((code, True))
    made = []
    for line, inline in found:
        if not re.match(r"[\w./=-]", line.strip()):
            continue
        try:
            words = shlex.split(line, comments=not inline)
        except ValueError:  # a part of a program, with a quote of its own
            continue
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if len(words) < 2 or not (words[0] in PROGRAMS or "/bin/" in words[0]):
            continue
        shortened = inline or any(each.endswith(DOTS) for each in words)
        made.append(Command(page.name, tuple(words), shortened))
    return made


def anchors(page: pathlib.Path) -> set[str]:
    """What GitHub makes of its headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def links(page: pathlib.Path) -> list[str]:
    """Targets of its links and pictures that are not on the network."""
    found = re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", FENCE.sub("", text_of(page)))
    return [each for pair in found for each in pair if each and "://" not in each]


def imports(code: str) -> list[tuple[str, str | None]]:
    """(module, name) of each import of a block; name None for the module itself."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
    return found


def messages() -> list[str]:
    """Every text in the code, with … for what is filled in."""

    def text(node) -> str | None:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            return "".join(text(each) or "…" for each in node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return "".join(text(each) or "…" for each in (node.left, node.right))
        return None

    files = [
        f for p in ("molora_jax", "pallas_kernels", "experiments") for f in (ROOT / p).rglob("*.py")
    ]
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    return [found for tree in trees for node in ast.walk(tree) if (found := text(node))]
