"""Every command, code block, link and quoted message of README and the guides holds.

A command is run here in small, or checked as far as it goes without running, or stands in NOT_RUN
of page_commands.py with the reason. What is in none of them fails.
"""

import ast
import contextlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import page_commands
from tests.page_commands import NOT_RUN, check
from tests.pages import PAGES, ROOT, anchors, blocks, commands, imports, links, messages, text_of
from tests.tools.conftest import make

# Blocks of Python that are compiled, and whose imports are resolved, but that do not run: why.
BLOCKS_NOT_RUN = {
    "= generate(": "compiles for long: `test_blocks_that_compile_for_long` runs it",
    "from openai import OpenAI": "needs a server; tests/serving/test_clients.py has the same calls",
    "parallel.use_mesh": "needs eight devices and a model of 16 GB",
    "Engine(base, hot": "compiles a minute; tests/generation/test_engine.py runs the same",
}
COMMANDS = {page: commands(page) for page in PAGES}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with what the pages speak of: texts, adapters and a composition of them."""
    from molora_jax.adapters import compose, load_adapter, save_adapter
    from molora_jax.models import load_base
    from molora_jax.tools.__main__ import main

    root, base = tmp_path_factory.mktemp("pages"), load_base("tiny-random")
    for seed, name in enumerate(("code", "math", "law", "sql")):
        folder = save_adapter(make(base, name, seed=seed), root / "out" / name)
        text = "".join(json.dumps({"text": f"{name} {n} " * 4}) + "\n" for n in range(12))
        (root / f"{name}.jsonl").write_text(text)
        options = ["--base", base.name, "--seq_len", "32", "--rows", "4", "--features", "8"]
        if name != "sql":
            assert (
                main(["statistics", str(folder), "--data", f"{root / name}.jsonl", *options]) == 0
            )
    shutil.copy(root / "code.jsonl", root / "my.jsonl")
    shutil.copy(root / "math.jsonl", root / "heldout.jsonl")
    two = compose(base, [load_adapter(root / "out" / name)[0] for name in ("code", "math")])
    two.save(root / "out" / "two")
    for run in ("<id>", "ID"):
        shutil.copytree(root / "out" / "two", root / "runs" / "compose" / run / "composition")
    for short, name in (("a", "code"), ("b", "math")):
        shutil.copytree(root / "out" / name, root / short)
    return root


@pytest.fixture
def here(made, monkeypatch):
    monkeypatch.chdir(made)
    monkeypatch.setenv("BASE", "tiny-random")
    return made


# --- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_run_or_checked_or_listed_with_its_reason(page, here, capsys):
    for command in COMMANDS[page]:
        check(command, capsys)


def test_the_pages_hold_commands_and_no_reason_is_left_without_one():
    called = [each.called for page in PAGES for each in COMMANDS[page]]
    assert len(called) > 100
    for begins in NOT_RUN:
        assert any(each == begins or each.startswith(f"{begins} ") for each in called), begins


def test_a_wrong_command_fails(here, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(page_commands, "RUN_ALREADY", set())
    for line in (
        "molora expirement --list",
        "molora run --experiment=tabel13",
        "molora run --experiment=table13 --gin_bindings=synthetic.Config.stepz=1",
        "molora run --experiment=table13 stepz=1",
        "molora run --experiment=table13 steps=many",
        "molora run table13",
        "molora run --experiment=train_adapter --sweep=nosuch ...",
        "molora inspect out/code --bass tiny-random",
        "molora probe out/nowhere --base tiny-random",
        "molora serve --model tiny-random --adaptors a=b",
        "python -m pallas_kernels.device_check --minuets=5",
        "make tset",
        "pytest tests/nowhere.py",
        "python docs/nowhere.py",
    ):
        page = tmp_path / "page.md"
        page.write_text(f"```\n{line}\n```\n")
        text_of.cache_clear()
        (command,) = commands(page)
        with pytest.raises((Exception, SystemExit, pytest.fail.Exception)):
            check(command, capsys)


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_of_python_run_or_at_least_import_what_is_there(page, here, capsys):
    names = {"__name__": "page"}
    for block in blocks(page, "python"):
        code = re.sub(r"smollm2-135m|Qwen/Qwen3-8B", "tiny-random", block)
        code = code.replace("max_new_tokens=40", "max_new_tokens=2")
        for module, name in imports(code):
            found = importlib.import_module(module)
            assert name is None or hasattr(found, name), f"{page.name}: {module}.{name}"
        ast.parse(code)
        if not any(sign in code for sign in BLOCKS_NOT_RUN):
            with changed_here(here):
                exec(compile(code, page.name, "exec"), names)
    for block in blocks(page, "json"):
        json.loads(block if block.startswith("{") else f"{{{block}}}")
    if page.name == "writing_a_router.md":
        check_router(names)


@pytest.mark.long
@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/tutorial.md"], ids=str)
def test_blocks_that_compile_for_long_run(page, here, capsys):
    (block,) = [each for each in blocks(page, "python") if "= generate(" in each]
    exec(compile(block.replace("smollm2-135m", "tiny-random"), page.name, "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.long
def test_the_tutorial_runs_from_top_to_bottom_as_written(tmp_path):
    lines = ['python() { "$PYTHON" "$@"; }', 'molora() { "$PYTHON" -m experiments.command "$@"; }']
    for language, body in re.findall(
        r"^```(\w*)\n(.*?)^```$", text_of(ROOT / "docs/tutorial.md"), re.MULTILINE | re.DOTALL
    ):
        if language == "python":
            lines.append(f"python - <<'END'\n{body}END")
        elif not language and not re.search("venv|molora serve|curl|out/law", body):
            lines.append(body)
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(lines)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "adapters of the answer: code " in done.stdout and "== routed" in done.stdout
    assert list(tmp_path.glob("runs/analyse/*/explorer.html"))


@contextlib.contextmanager
def changed_here(folder: Path):
    """What a block writes is taken away again, so that no page leans on another."""
    before = {path for path in folder.rglob("*") if path.is_file()}
    texts = {path: path.read_bytes() for path in folder.glob("*.jsonl")}
    yield
    for path in {path for path in folder.rglob("*") if path.is_file()} - before:
        path.unlink()
    for path, text in texts.items():
        path.write_bytes(text)


def check_router(names) -> None:
    """The example's ids by layer, under jit, with padding, a moved adapter, and after saving."""
    import jax.numpy as jnp
    import numpy as np

    from molora_jax.routing import ROUTERS

    try:
        ids = np.asarray(names["out"].routing.adapter_ids)
        assert (ids == np.array([0, 0, 1, -1])[:, None, None]).all()
        tokens = jnp.asarray([[5, 6, 7]])
        mask = jnp.asarray([[True, True, False]])
        for columns, expected in (([0, 1], [0, 0, 1, -1]), ([1, 0], [1, 1, 0, -1])):
            columns = jnp.asarray(columns)
            out = names["read"](tokens, mask, names["bank"].stacks, names["same"], columns)
            ids = np.asarray(out.routing.adapter_ids)[..., 0]
            np.testing.assert_array_equal(ids[:, 1], expected)
            assert (ids[:, 2] == -1).all()
        layer = names["LayerRouter"](np.array([1]), num_columns=2)
        layer.columns = type(layer.columns)(jnp.asarray(1))
        routing, _, _ = layer(tokens, None, mask, None, jnp.asarray([1, 0]))
        np.testing.assert_array_equal(routing.adapter_ids[:, 0], [0, 0, -1])
    finally:
        del ROUTERS["layer"]


# --- links, messages, pictures, tables ------------------------------------------------------------


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "results" / "README.md"], ids=str
)
def test_links_lead_somewhere(page):
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = (page.parent / target) if target else page
        assert path.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(path), f"{page.name}: no heading for {link}"


def test_every_page_can_be_reached_from_the_readme():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop().resolve()
        if page not in reached and page.suffix == ".md" and page.exists():
            reached.add(page)
            todo += [page.parent / link.partition("#")[0] for link in links(page)]
    assert {page.name for page in PAGES} <= {page.name for page in reached}


def test_messages_are_quoted_as_the_code_says_them():
    rows = [
        r for r in text_of(ROOT / "docs/troubleshooting.md").splitlines() if r.startswith("| `")
    ]
    quotes = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert len(quotes) > 50
    known = messages()
    assert [quote for quote in quotes if not any(quote in each for each in known)] == []


def test_the_page_of_public_names_is_up_to_date():
    reference = module_of("reference")
    assert reference.page() == text_of(reference.PAGE), "run python docs/reference.py"


def test_the_table_of_experiments_is_up_to_date():
    tables = module_of("tables")
    page = text_of(tables.PAGE)
    assert tables.filled(page) == page, "run python docs/tables.py"


def test_pictures_are_drawn_by_their_script(tmp_path, monkeypatch):
    drawing = module_of("draw")
    monkeypatch.setattr(drawing, "HERE", tmp_path)
    drawing.main()
    for made_now in tmp_path.glob("*.png"):
        kept = (ROOT / "docs" / made_now.name).read_bytes()
        assert kept[:8] == b"\x89PNG\r\n\x1a\n"
        assert kept[16:24] == made_now.read_bytes()[16:24]  # width and height
    assert len(list(tmp_path.glob("*.png"))) == 2


def module_of(name: str):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
