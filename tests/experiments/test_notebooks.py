"""The notebooks run as scripts at tiny scale, draw, and import public names alone."""

import ast
import functools
import importlib
import io
import pathlib
import re
import runpy
import sys

import pytest

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "experiments" / "notebooks"
# Each after those whose files it reads.
ORDER = [
    "compose_and_look_inside",
    "explore_routing",
    "kernels_and_strategies",
    "bring_your_own_adapters",
    "reproduce_a_table",
]
NEEDS = {"explore_routing": "compose_and_look_inside"}
PUBLIC = {"molora_jax", "pallas_kernels", "experiments"}
# Modules of `pallas_kernels` that README documents, beside the names that it exports.
DOCUMENTED = {("pallas_kernels", "bench"), ("pallas_kernels", "cost")}
OTHERS = {"matplotlib", "numpy", "safetensors"}


@pytest.fixture(scope="module")
def namespace(tmp_path_factory):
    """namespace(name): the variables that a notebook ends with; each runs once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOLORA_SCALE", "tiny")
        patch.setenv("MOLORA_OUT", str(tmp_path_factory.mktemp("out")))
        patch.chdir(NOTEBOOKS)  # where Jupyter would be
        for name in ("MOLORA_COMPOSITION", "MOLORA_ADAPTERS", "MOLORA_BASE", "MOLORA_RUNS"):
            patch.delenv(name, raising=False)

        @functools.cache
        def run(name):
            if name in NEEDS:
                run(NEEDS[name])
            return runpy.run_path(str(NOTEBOOKS / f"{name}.py"))

        yield run


def test_every_notebook_is_run_and_its_pair_is_not_committed():
    assert sorted(ORDER) == sorted(path.stem for path in NOTEBOOKS.glob("*.py"))
    assert "/experiments/notebooks/*.ipynb\n" in (NOTEBOOKS.parents[1] / ".gitignore").read_text()


@pytest.mark.parametrize("name", ORDER)
def test_a_notebook_runs_and_ends_with_a_picture(name, namespace):
    from matplotlib.image import imread

    last = cells(name)[-1].rstrip().splitlines()[-1]
    content, beside = namespace(name)[last]._repr_png_()
    picture = imread(io.BytesIO(content))
    assert min(picture.shape[:2]) > 150
    assert len({tuple(pixel) for row in picture[::3, ::3] for pixel in row}) > 10
    axes = namespace(name)[last].axes[0]
    assert axes.images or axes.lines
    assert (axes.get_title() or namespace(name)[last].get_suptitle()) in beside["alt"] != ""


@pytest.mark.parametrize("name", ORDER)
def test_a_notebook_imports_public_names_alone(name):
    tree = ast.parse((NOTEBOOKS / f"{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                assert each.name in PUBLIC | OTHERS | set(sys.stdlib_module_names), each.name
                assert each.name != "molora_jax" or each.asname == "mj"
        if isinstance(node, ast.ImportFrom):
            package = str(node.module).split(".")[0]
            if package in OTHERS | set(sys.stdlib_module_names):
                continue
            assert node.module in PUBLIC, node.module
            for each in node.names:
                public = each.name in importlib.import_module(node.module).__all__
                assert public or (node.module, each.name) in DOCUMENTED, each.name
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "mj"
    }
    assert used <= set(importlib.import_module("molora_jax").__all__)


@pytest.mark.parametrize("name", ORDER)
def test_a_notebook_is_short_prose_between_short_cells(name):
    text = (NOTEBOOKS / f"{name}.py").read_text()
    assert "formats: ipynb,py:percent" in text
    prose = [cell for cell in cells(name) if cell.startswith("[markdown]")]
    (title,) = [line for cell in prose for line in cell.splitlines() if line.startswith("# # ")]
    assert title.endswith("?")  # one question
    assert len(prose) >= 4
    assert max(len(cell.splitlines()) for cell in cells(name)) < 50


def cells(name):
    return re.split(r"\n# %% ?", (NOTEBOOKS / f"{name}.py").read_text())[1:]
