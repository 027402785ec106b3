"""Public names: they take the arguments they name and no others, are documented, and show well."""

import doctest
import html.parser
import importlib
import inspect
import pkgutil
import subprocess
import sys

import numpy as np
import pytest

import experiments
import molora_jax
import pallas_kernels
from molora_jax.display import Table
from tests.adapters.make import arrays_for, modules_of


def public_callables():
    """Functions and classes of both packages, by qualified name, each where it is defined."""
    for package in (molora_jax, pallas_kernels):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if found.name.rpartition(".")[2].startswith("_"):
                continue
            module = importlib.import_module(found.name)
            for name, value in vars(module).items():
                if (
                    callable(value)
                    and not name.startswith("_")
                    and getattr(value, "__module__", None) == found.name
                ):
                    yield f"{found.name}.{name}", value


CALLABLES = dict(public_callables())
# The columns of a row of measurements are its writer's to name.
FREE_FORM = {"pallas_kernels.device_check.Rows.write"}


def methods(cls: type):
    """Its public methods; what it only refers to, such as a class of its own, is no method."""
    for name in vars(cls):
        value = getattr(cls, name)
        if not name.startswith("_") and callable(value) and not inspect.isclass(value):
            yield name, value


def test_a_misspelt_argument_is_a_type_error_everywhere():
    assert len(CALLABLES) > 150
    for name, function in CALLABLES.items():
        try:
            function(loar_path="x")
        except TypeError:
            continue
        pytest.fail(f"{name} took an argument that it does not have")


def test_nothing_public_swallows_arguments_by_name():
    sinks = []
    for name, value in CALLABLES.items():
        own = [(name, value)]
        if inspect.isclass(value):
            own = [(f"{name}.{method}", each) for method, each in methods(value)]
        for label, each in own:
            try:
                parameters = inspect.signature(each).parameters.values()
            except ValueError:  # a C function, whose own signature is not there to read
                continue
            sinks += [label for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    assert set(sinks) == FREE_FORM


# Documented, with an example that runs


DISPLAYED = ("Table", "loss_table", "show", "show_report", "terminal_text")
EXPORTED = [
    (package, name)
    for package in (molora_jax, pallas_kernels, experiments)
    for name in package.__all__
    if name != "display" and (package, name) != (pallas_kernels, "Routing")  # the same class
] + [(importlib.import_module("molora_jax.display"), name) for name in DISPLAYED]


@pytest.fixture(scope="module")
def base():
    return molora_jax.load_base("tiny-random")


@pytest.fixture
def names(base, tmp_path):
    """What the examples use, as the package's docstring says it."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    adapters = []
    for seed, name in enumerate(("code", "math")):
        modules = modules_of(base.config, ("q_proj", "k_proj"))
        arrays = arrays_for(modules, 4, seed=seed, config=base.config)
        adapters.append(
            molora_jax.Adapter.from_arrays(
                name, arrays, alpha=0.1, num_layers=base.config.num_layers
            )
        )
    composition = molora_jax.compose(base, adapters, router="arrow", top_k=1)
    bank = molora_jax.AdapterBank(base.config, num_slots=2, max_rank=4)
    for adapter in adapters:
        bank.load(adapter)
    tokens = np.random.default_rng(0).integers(32, 120, 64).tolist()
    return {
        **{name: getattr(pallas_kernels, name) for name in pallas_kernels.__all__},
        **{name: getattr(experiments, name) for name in experiments.__all__},
        "mj": molora_jax,
        "np": np,
        "jax": jax,
        "jnp": jnp,
        "nnx": nnx,
        "base": base,
        "bank": bank,
        "composition": composition,
        "tmp": tmp_path,
        **dict(zip(("code", "math"), adapters, strict=True)),
        "windows": molora_jax.pack([tokens], seq_len=16, separator=None),
    }


@pytest.mark.parametrize(("package", "name"), EXPORTED, ids=[name for _, name in EXPORTED])
def test_a_public_name_is_documented_by_an_example_that_runs(package, name, names, monkeypatch):
    value = getattr(package, name)
    monkeypatch.chdir(pallas_kernels.__path__[0] + "/..")  # the repository, where results/ lies
    if package.__name__ == "molora_jax.display":
        names |= {each: getattr(package, each) for each in package.__all__}
    text = inspect.getdoc(value)
    examples = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert text.partition(">>>")[0].strip(), "what it is"
    assert any(example.want for example in examples.examples), "an example with its result"
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(examples, out=said.append)
    assert runner.failures == 0, "".join(said)


def test_importing_the_package_is_quick():
    program = """
import sys
import molora_jax, experiments
assert not {"jax", "numpy", "flax", "matplotlib"} & set(sys.modules)
from molora_jax import display
molora_jax.display.show(molora_jax.display.Table(["a"], [[1.5]]))
assert not {"jax", "numpy", "matplotlib", "rich"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)


def test_an_unknown_name_is_an_attribute_error():
    for package in (molora_jax, experiments):
        with pytest.raises(AttributeError, match=f"'{package.__name__}' has no attribute 'nought'"):
            _ = package.nought


# Shown in a notebook


class Nested(html.parser.HTMLParser):
    """The text of a page; fails on tags that do not nest."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.tags = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def shown(value):
    return Nested(value._repr_html_()).text


def test_banks_compositions_reports_and_losses_show_the_same_as_text_and_html(names):
    bank, composition = names["bank"], names["composition"]
    for value in (bank, composition):
        for part in ("code", "math", names["code"].digest[:12]):
            assert part in repr(value)
            assert part in shown(value)
    assert "(free)" in shown(molora_jax.AdapterBank(names["base"].config, num_slots=1, max_rank=2))
    report = bank.inspect("code")
    assert "adapter 'code' in slot 0" in shown(report)
    assert "layers 0..3, rank 4, scale 0.025" in shown(report)
    measured = molora_jax.Evaluation(np.array([[1.5, 0.0]]), weights=np.array([[1.0, 0.0]]))
    assert "1.5000 nats a token over 1 tokens" in repr(measured)
    assert "1.5" in shown(measured)
    comparison = experiments.compare(experiments.load_runs("results/table14"))
    assert "table14/molora/ari/start" in str(comparison)
    assert "table14/molora/ari/start" in shown(comparison)


def test_a_routing_shows_a_cell_for_every_layer_and_token():
    import jax

    ids = np.array([[[0, 1], [2, -1], [-1, -1]]] * 2)
    gates = np.array([[[0.25, 0.75], [1.0, 0.0], [0.0, 0.0]]] * 2)
    routing = pallas_kernels.Routing(ids, gates)
    page = routing._repr_html_()
    assert Nested(page).tags.count("td") == 6
    assert "layer 1, token 0: slot 1 0.750, slot 0 0.250" in page
    assert "layer 0, token 2: base only" in page
    assert "Routing of 3 tokens in 2 layers, k = 2" in page
    long = pallas_kernels.Routing(np.zeros((1000, 1), int), np.full((1000, 1), np.nan))
    assert "the first 120 tokens are shown" in long._repr_html_()
    seen = []
    jax.jit(lambda r: seen.append(r._repr_html_()) or r.gates)(routing)
    assert seen == [None]  # nothing to read there


def test_a_table_escapes_and_refuses_rows_of_another_length():
    table = Table(["<b>", "x"], [["<script>", 1.5], ["a & b", None]], title="<i>")
    assert set(Nested(table._repr_html_()).tags) == {
        "div", "table", "thead", "tbody", "tr", "th", "td"
    }  # fmt: skip
    assert "<script>" in shown(table)
    assert str(table).splitlines() == ["<i>", "<b>         x", "<script>  1.5", "a & b       –"]
    numbers = [[2.409, 12.0, 1e-6], [2.99, 0.5, 1e3], [float("nan"), None, -0.0]]
    columns = zip(*(row.split() for row in str(Table("abc", numbers)).splitlines()), strict=True)
    assert [list(column[1:]) for column in columns] == [
        ["2.409", "2.990", "nan"],
        ["12.0", "0.5", "–"],
        ["1e-06", "1000", "-0"],
    ]
    assert str(Table(["a"], [])) == "a"
    with pytest.raises(ValueError, match="2 cells and the header 1"):
        Table(["a"], [[1, 2]])


def test_shares_of_an_evaluation_need_its_routing():
    from molora_jax.training.evaluate import TokenRouting

    ids = np.array([[[[0], [1], [1], [-1]]]])
    measured = molora_jax.Evaluation(
        np.zeros((1, 4)),
        weights=np.ones((1, 4)),
        routing=TokenRouting(ids, np.ones(ids.shape), None),
    )
    shares = measured.shares(np.array([[0, 0, 1, -1]]), num_domains=2, num_slots=2)
    np.testing.assert_allclose(shares, [[0.5, 0.5], [0.0, 1.0]])
    bare = molora_jax.Evaluation(np.zeros((1, 4)), weights=np.ones((1, 4)))
    with pytest.raises(ValueError, match="return_routing=True"):
        bare.shares(np.zeros((1, 4), int), num_domains=1, num_slots=1)
