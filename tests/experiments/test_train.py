"""train_adapter and train_router on a user's own files, through the command line's own pieces."""

import json
import pathlib

import jax
import pytest

from experiments import main as command_line
from experiments import results, train_adapter, train_router
from molora_jax.adapters import (
    PROJECTIONS,
    Composition,
    compose,
    init_adapter,
    load_adapter,
    save_adapter,
)
from molora_jax.adapters.peft_folder import STATISTICS_FILE
from molora_jax.models import load_base
from molora_jax.training import AdapterTrainConfig

TEXTS = {
    "code": "def add_{i}(x):\n    return x + {i}\n",
    "verse": "And the {i}th day was a day of rest, and the people were glad.\n",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, pathlib.Path]:
    folder = tmp_path_factory.mktemp("data")
    found = {}
    for name, text in TEXTS.items():
        found[name] = folder / f"{name}.jsonl"
        rows = [json.dumps({"text": text.format(i=i) * 3}) for i in range(12)]
        found[name].write_text("\n".join(rows) + "\n")
    return found


def _tiny(module) -> dict:
    return command_line.bindings(module, files=[command_line.CONFIGS / "tiny.gin"], shared=True)


def execute(module, workdir, **values):
    name = module.__name__.rpartition(".")[2]
    config = module.Config(**_tiny(module) | values)
    status, path = results.execute(
        name, module, config, module.digests(config), scale="tiny", workdir=workdir
    )
    result = json.loads((path / "result.json").read_text())
    assert status == "complete", result["error"]
    return path, result["metrics"]


def test_adapters_then_a_router_over_them(files, tmp_path, monkeypatch):
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    folders = []
    for name, file in files.items():
        out = tmp_path / name
        path, metrics = execute(
            train_adapter,
            tmp_path / "runs",
            data=str(file),
            heldout=str(file),
            name=name,
            out=str(out),
            steps=4,
            lr=1e-2,
            statistics=8,
        )
        card = (out / "README.md").read_text()
        assert f"  data={name}.jsonl " in card  # and not where it lay
        assert "  steps=4 " in card and str(tmp_path) not in card
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert [(line["phase"], line["step"]) for line in lines] == [
            ("adapter", step) for step in range(4)
        ]
        assert metrics["first_loss"] == lines[0]["loss"]
        assert metrics["last_loss"] == lines[-1]["loss"]
        assert metrics["heldout_adapter"] < metrics["heldout_base"]
        adapter, _ = load_adapter(out)
        assert adapter.rank == 8
        assert any(pair.b.any() for pair in adapter.modules.values())
        assert adapter.statistics.num_features == 8
        assert adapter.statistics.count > 100
        folders.append(str(out))

    # What they brought along is enough for a router that nobody trains.
    composed = compose(load_base("tiny-random"), [load_adapter(each)[0] for each in folders])
    assert composed.column_names == ("code", "verse")

    data = tuple(str(file) for file in files.values())
    path, metrics = execute(
        train_router, tmp_path / "runs", adapters=tuple(folders), data=data, heldout=data
    )
    composition = Composition.load(path / "composition", load_base("tiny-random"))
    assert composition.column_names == ("code", "verse")
    assert composition.labels_used is True
    for name in TEXTS:
        assert metrics[f"oracle/{name}"] < metrics[f"base/{name}"]
        assert metrics[f"routed/{name}"] != metrics[f"uniform/{name}"]


def test_a_finished_run_is_copied_to_where_the_next_config_wants_it(files, tmp_path, monkeypatch):
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    values = {"data": str(files["code"]), "name": "code", "steps": 1}
    outs = [tmp_path / name for name in "abc"]
    paths = [execute(train_adapter, tmp_path, out=str(out), **values)[0] for out in outs[:2]]
    assert paths[0] == paths[1]
    digests = {load_adapter(folder)[0].digest for folder in (*outs[:2], paths[0] / "code")}
    assert len(digests) == 1
    # Someone's own files are not replaced.
    outs[2].mkdir()
    (outs[2] / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"Config\.out: .*'thesis\.tex'"):
        execute(train_adapter, tmp_path, out=str(outs[2]), **values)
    assert [each.name for each in outs[2].iterdir()] == ["thesis.tex"]


def test_what_another_run_left_in_out_is_replaced_only_where_that_is_asked_for(
    files, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    values = {"data": str(files["code"]), "out": str(out)}

    def said(**others) -> str:
        execute(train_adapter, tmp_path / "runs", **values | others)
        about = (f"Copied to {out}", f"{out}: ")
        (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith(about)]
        return line

    assert said(steps=1) == f"Copied to {out}"
    before = load_adapter(out)[0].digest
    (out / STATISTICS_FILE).write_text("of `molora statistics`")
    runs = sorted((tmp_path / "runs").rglob("*"))
    for others in ({"steps": 2}, {"steps": 1, "name": "other"}):
        with pytest.raises(ValueError, match=r"exists already, .* overwrite=true"):
            said(**others)
    assert sorted((tmp_path / "runs").rglob("*")) == runs  # nothing was begun
    assert said(steps=1) == f"{out}: unchanged"
    assert (out / STATISTICS_FILE).exists()
    assert said(steps=2, overwrite=True) == f"{out}: replaced"
    assert load_adapter(out)[0].digest != before
    assert not (out / STATISTICS_FILE).exists()
    assert said(steps=2) == f"{out}: unchanged"
    assert "overwrite" not in (out / "README.md").read_text()

    # A run that was found does not replace it either, as a sweep finds them.
    config = train_adapter.Config(**_tiny(train_adapter) | values | {"steps": 1})
    path = tmp_path / "runs/train_adapter"
    path /= results.run_id("train_adapter", config, train_adapter.digests(config))
    assert results.read_result(path)["status"] == "complete"
    assert not results.is_finished(train_adapter, config, path)
    assert said(steps=2) == f"{out}: unchanged"


def test_a_router_over_default_folders_of_another_base(files, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    data = tuple(str(file) for file in files.values())
    runs = [execute(train_adapter, tmp_path, data=file, steps=1)[0] for file in data]
    about = runs[0] / "adapter" / "adapter_config.json"
    stated = json.loads(about.read_text()) | {"base_model_name_or_path": "org/other"}
    about.write_text(json.dumps(stated))
    values = {
        "adapters": tuple(str(path / "adapter") for path in runs),
        "data": data,
        "start": "random",
        "steps": 0,
    }
    for out in (tmp_path / "a", tmp_path / "b"):
        execute(train_router, tmp_path, out=str(out), **values)
        composition = Composition.load(out, load_base("tiny-random"))
        assert composition.column_names == tuple(f"{path.name}-adapter" for path in runs)
    assert "trained on other, used with tiny-random" in caplog.text.replace("org/", "")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "Config.data is empty"),
        ({"data": __file__, "name": "../x"}, "expected the name of a folder"),
        ({"data": "nowhere.jsonl"}, "there is no such file"),
        ({"data": __file__, "rank": 0}, "rank"),
    ],
)
def test_train_adapter_refuses(values, said):
    with pytest.raises(ValueError, match=r"Config|rank") as caught:
        train_adapter.Config(**values)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"adapters": ("a",), "data": (__file__,)}, "expected two adapters or more"),
        ({"adapters": ("a", "b"), "data": (__file__,)}, "one data file for each"),
        ({"adapters": ("a", "b"), "data": (__file__, "nowhere")}, "there is no such file"),
        ({"adapters": ("a", "b/../a"), "data": (__file__,) * 2}, "twice"),
        ({"adapters": ("a", "b"), "data": (__file__,) * 2, "top_k": 3}, "top_k = 3"),
        ({"adapters": ("a", "b"), "data": (__file__,) * 2, "gate": "sofmax"}, "sofmax"),
    ],
)
def test_train_router_refuses(values, said):
    with pytest.raises(ValueError, match=r"Config|gate") as caught:
        train_router.Config(**values)
    assert said in str(caught.value)


def test_train_router_names_an_adapter_that_is_not_there(files):
    data = tuple(str(file) for file in files.values())
    config = train_router.Config(base="tiny-random", adapters=("no/a", "no/b"), data=data)
    with pytest.raises(ValueError, match="no/a"):
        train_router.digests(config)


@pytest.mark.parametrize("module", [train_adapter, train_router])
def test_an_out_that_cannot_be_written_is_refused_before_training(files, tmp_path, module):
    file, foreign = tmp_path / "a_file", tmp_path / "foreign"
    foreign.mkdir()
    for path in (file, foreign / "thesis.tex"):
        path.write_text("years")
    data = str(files["code"])
    values = {
        train_adapter: {"data": data},
        train_router: {"data": (data, data), "adapters": ("a", "b")},
    }[module]
    for out, said in (
        (file, "is a file"),
        (file / "deeper/x", "a_file is no folder"),
        (foreign, "thesis.tex"),
        ("/proc/nope/x", "no folder can be made in /proc"),
    ):
        with pytest.raises(ValueError, match=r"Config\.out: ") as caught:
            module.Config(**values, out=str(out))
        assert said in str(caught.value)
    module.Config(**values, out=str(tmp_path / "new/x"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a_file", "foreign"]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> str:
    """An adapter of rank 2 with rsLoRA on two projections."""
    base = load_base("tiny-random")
    trainable = init_adapter(
        base.config,
        rank=2,
        alpha=5.0,
        projections=("q_proj", "down_proj"),
        rng=jax.random.key(3),
        use_rslora=True,
    )
    folder = tmp_path_factory.mktemp("start") / "mine"
    save_adapter(trainable.to_adapter("mine", base_name="tiny-random"), folder)
    return str(folder)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rank": 8}, "Config.rank = 8, but the adapter of Config.init_from has 2"),
        ({"alpha": 16.0}, "Config.alpha = 16.0"),
        ({"use_rslora": False}, "Config.use_rslora = False"),
        ({"projections": PROJECTIONS}, "Config.projections"),
        ({"projections": ()}, "Config.projections"),
    ],
)
def test_a_setting_that_is_not_the_adapters_is_refused_also_where_it_is_the_default(
    files, start, values, said
):
    with pytest.raises(ValueError, match="set it to that, or leave it out") as caught:
        train_adapter.Config(data=str(files["code"]), init_from=start, **values)
    assert said in str(caught.value)


def test_an_adapter_is_not_written_over_its_start(files, start):
    with pytest.raises(ValueError, match="is what init_from reads"):
        train_adapter.Config(data=str(files["code"]), init_from=start, out=start)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rank": 2, "alpha": 5, "use_rslora": True},
        {"projections": ["down_proj", "q_proj"]},
    ],
)
def test_settings_left_out_or_the_same_are_the_adapters(files, start, values):
    given = _tiny(train_adapter) | {"data": str(files["code"]), "init_from": start}
    config, plain = train_adapter.Config(**given | values), train_adapter.Config(**given)
    assert (config.rank, config.alpha, config.use_rslora) == (2, 5.0, True)
    assert config.training().projections == ("q_proj", "down_proj")
    assert results.run_id("x", config, {}) == results.run_id("x", plain, {})


def test_without_a_start_what_is_left_out_is_the_default(files):
    data = str(files["code"])
    config, default = train_adapter.Config(data=data), AdapterTrainConfig()
    for name in train_adapter.OF_THE_ADAPTER:
        assert getattr(config, name) == getattr(default, name)
    spelt = train_adapter.Config(data=data, rank=8, alpha=16, projections=PROJECTIONS)
    assert results.run_id("x", spelt, {}) == results.run_id("x", config, {})


def test_a_start_that_is_no_adapter_is_refused_wherever_it_fails(files, tmp_path):
    composition = tmp_path / "composition"
    composition.mkdir()
    (composition / "molora.json").write_text("{}")
    for path in ("nowhere", str(composition)):
        with pytest.raises(ValueError, match=r"Config\.init_from = "):
            train_adapter.Config(data=str(files["code"]), init_from=path)
