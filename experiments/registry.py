"""Names of the experiments, what a line of each says, and the checks that every Config shares.

Importing this file imports nothing heavy: an entry holds an import path, not a module, so that
`molora run --list` and `--help` answer at once. An experiment is a module with

    Config            frozen keyword-only dataclass: every field has a default (scale `cpu`), one is
                      `seed: int`; its `__post_init__` calls `check_config(self)` first
    digests(config)   {"data": ..., "base": ...}: content digests of what the run reads; with the
                      config they make the run's id
    main(config, run) measures, and ends with `run.finish(...)`; see experiments.results.Run
    found(config, path)
                      optional: a finished run at `path` is not measured again; puts what it made
                      where the config's places say
    check_place(config, path)
                      optional: before a run at `path` begins or is found; raises ValueError where
                      the config's places hold what it must not replace
    SWEEPS            optional: {name: function() -> list of gin bindings, one string a point};
                      `seed` is there without it

The docstring of a Config has an entry a field, `name  what it is`: --fields prints it.
"""

import collections.abc
import dataclasses
import difflib
import importlib
import math
import os
import pathlib
import sys
import types
import typing
from collections.abc import Iterable, Mapping

_HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One line of the registry: where the module is, what it answers, and the paper's tables.

    best  the metric that tables of its runs go by, or a pattern of several, and which is better
    """

    module: str
    summary: str
    tables: str = ""
    best: tuple[str, typing.Literal["higher", "lower"]] | None = None

    def load(self) -> types.ModuleType:
        """Imports the experiment's module (jax, models and all)."""
        return importlib.import_module(self.module)


EXPERIMENTS: Mapping[str, Experiment] = {
    "add_adapter": Experiment(
        module="experiments.add_adapter",
        summary="a fourth and a fifth adapter arrive: what each router makes of them, untrained",
    ),
    "analyse": Experiment(
        module="experiments.analyse",
        summary="what a composition's router does with a text, as a page to read",
    ),
    "compose": Experiment(
        module="experiments.compose",
        tables="Fig 3, Tab 15, 17",
        summary="four LoRAs trained apart, one router, one pass: held-out loss, share of tokens",
        best=("loss.MoLoRA_k1.mean", "lower"),
    ),
    "decode_overhead": Experiment(
        module="experiments.decode_overhead",
        tables="Tab 16",
        summary="time of an engine's decode step with adapters over the base's step",
    ),
    "fig3": Experiment(
        module="experiments.reasoning",
        tables="Fig 3",
        summary="a small base, four LoRAs and a router against a larger base: exact match",
    ),
    "fig5_fig9": Experiment(
        module="experiments.kernel_batch",
        tables="Fig 5, 9",
        summary="grouped against per-row BGMV over batch size, and where they cross",
    ),
    "fig6": Experiment(
        module="experiments.kernel_orders",
        tables="Fig 6",
        summary="per-token over per-sequence as the batch grows",
    ),
    "fig7": Experiment(
        module="experiments.latency",
        tables="Fig 7",
        summary="P99 latency of a step by batch size, hot set against paging",
    ),
    "fig8": Experiment(
        module="experiments.latency",
        tables="Fig 8",
        summary="P99 latency of a step by access pattern, hot set against paging",
    ),
    "modulated": Experiment(
        module="experiments.modulated",
        summary="a LoRA scale with a memory (MaLoRA) against plain LoRA and one without",
    ),
    "overhead": Experiment(
        module="experiments.overhead",
        tables="Tab 16",
        summary="time of the routed forward pass of a whole model over the base's",
    ),
    "paper_page": Experiment(
        module="experiments.paper_page",
        summary="one page of every table and figure of the paper, its numbers beside ours",
    ),
    "real_tasks": Experiment(
        module="experiments.real_tasks",
        tables="Fig 3",
        summary="GSM8K, SVAMP, AQuA by adapters and router, BBH asked alone: right answers",
    ),
    "serving": Experiment(
        module="experiments.serving",
        summary="throughput and latency over arrival rate and adapters: mixed, one at a time",
    ),
    "specialists": Experiment(
        module="experiments.specialists",
        summary="one budget, K adapters or one of K times the rank: where the curves cross",
    ),
    "strategies": Experiment(
        module="experiments.strategies",
        summary="every strategy over a grid of sizes, and what the choice of auto gives away",
    ),
    "swap": Experiment(
        module="experiments.swap",
        summary="loading an adapter into a slot: over copying its bytes, and beside a step",
    ),
    "table2": Experiment(
        module="experiments.kernel_layout",
        tables="Tab 2",
        summary="weights in one stacked array against arrays of their own",
    ),
    "table3": Experiment(
        module="experiments.kernel_passes",
        tables="Tab 3",
        summary="a pass for each adapter against one pass for all",
    ),
    "table4": Experiment(
        module="experiments.kernel_passes",
        tables="Tab 4",
        summary="the ladder: paging, hot set, per-token routing, one compiled program",
    ),
    "table5": Experiment(
        module="experiments.model_passes",
        tables="Tab 5",
        summary="a whole model: a pass for each adapter against one pass for all",
    ),
    "table6": Experiment(
        module="experiments.kernel_orders",
        tables="Tab 6",
        summary="per-token against per-sequence for three orders of tokens",
    ),
    "table7": Experiment(
        module="experiments.model_passes",
        tables="Tab 7",
        summary="three transformers: a pass for each adapter against one for all",
    ),
    "table8": Experiment(
        module="experiments.interleaved",
        tables="Tab 8",
        summary="text, pictures and grids in one vocabulary, generated in one pass",
    ),
    "table9": Experiment(
        module="experiments.kernel_tiling",
        tables="Tab 9",
        summary="fixed row blocks against the chosen one, uniform and skewed tokens",
    ),
    "table11": Experiment(
        module="experiments.latency",
        tables="Tab 11",
        summary="how much a step's latency varies: op by op, one program, paging",
    ),
    "table13": Experiment(
        module="experiments.synthetic",
        tables="Tab 13",
        summary="three vocabularies in a row: single adapter, oracle, joint training",
    ),
    "table14": Experiment(
        module="experiments.synthetic",
        tables="Tab 14",
        summary="three vocabularies in a row: are modalities found without labels",
    ),
    "table15": Experiment(
        module="experiments.content_types",
        tables="Tab 15",
        summary="code, math, prose: who gets a token and a document, three adapters",
    ),
    "table16": Experiment(
        module="experiments.kernel_overhead",
        tables="Tab 16",
        summary="time of k = 1, 2, 4 adapters a token over one LoRA on every token",
    ),
    "table17": Experiment(
        module="experiments.content_types",
        tables="Tab 17",
        summary="four content types, also where they change inside a sequence",
    ),
    "train_adapter": Experiment(
        module="experiments.train_adapter",
        summary="a LoRA adapter from your own JSON lines, saved as a PEFT folder",
        best=("heldout_adapter", "lower"),
    ),
    "train_router": Experiment(
        module="experiments.train_router",
        summary="a router over adapter folders, fitted on a data file of each",
        best=("routed/*", "lower"),
    ),
}


WORKDIR = "runs"  # where run folders lie, unless --workdir says otherwise


class Misuse(ValueError):
    """What the caller got wrong, in words; ends with exit code 2 before anything starts."""


def program() -> str:
    """What this program was started as: its name in help, messages and reports."""
    called = pathlib.Path(sys.argv[0]).resolve()
    if called == _HERE.parent / "run.py":
        return "python run.py"
    if called == _HERE / "main.py":
        return "python -m experiments.main"
    return "molora run"


def worker_program() -> tuple[str, ...]:
    """What starts the same in a process of its own, where it then has the same name."""
    if program() == "python run.py":
        return sys.executable, str(_HERE.parent / "run.py")
    if program() == "molora run":
        return sys.executable, "-m", "experiments.command", "run"
    return sys.executable, "-m", "experiments.main"


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The known names that begin with `name`, then those most like it, best first; may be empty."""
    known = list(known)
    longer = [each for each in known if name and each.startswith(name)]
    close = difflib.get_close_matches(name, known, n=count, cutoff=0.5)
    return list(dict.fromkeys([*longer, *close]))[:count]


def hint(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The end of a message about an unknown name: what may have been meant, if anything."""
    close = [prefix + each for each in nearest(name, known)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def one_line(text: str) -> str:
    """The text on one line, of at most 600 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 600 else f"{text[:500]} … {text[-80:]}"


def place(default: typing.Any = "") -> typing.Any:
    """A Config field that says where something lies, or, true or false, what may happen to what is
    there: it is left out of the run's id."""
    return dataclasses.field(default=default, metadata={"place": True})


def texts(default: typing.Any = ()) -> typing.Any:
    """A Config field of several texts to read: on the command line a comma does not part them."""
    return dataclasses.field(default=default, metadata={"texts": True})


def defaults(config_type: type) -> dict[str, typing.Any]:
    """The default of every field of a Config."""
    fields = dataclasses.fields(config_type)
    return {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in fields
    }


def check_config(
    config: typing.Any, *, least: Mapping[str, float] = types.MappingProxyType({})
) -> None:
    """Holds every field of a Config to its annotation, since gin checks no types.

    An int where a float is wanted becomes a float and a list becomes a tuple, so that equal
    configs have equal hashes however they were written; `~` is expanded where it starts a place.
    Call it first in `__post_init__`.

    Args:
      least: the smallest value of some fields.

    Raises:
      ValueError: names the class, the field, the value and what was expected.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        try:
            value = fit(value, hints[field.name])
        except TypeError as error:
            raise ValueError(f"{type(config).__name__}.{field.name} = {value!r}: {error}") from None
        if field.metadata.get("place") and not isinstance(value, bool):
            many = isinstance(value, tuple)
            value = tuple(map(os.path.expanduser, value)) if many else os.path.expanduser(value)
        object.__setattr__(config, field.name, value)
    for name, bound in least.items():
        if getattr(config, name) < bound:
            raise ValueError(
                f"{type(config).__name__}.{name} = {getattr(config, name)}: expected at least "
                f"{bound}"
            )


def fit(value: typing.Any, hint: typing.Any) -> typing.Any:
    """`value` as `hint` wants it; TypeError says what was expected. bool is not an int here."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if value in args:
            return value
        close = nearest(str(value), map(str, args), count=1)
        also = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"expected one of {', '.join(map(repr, args))}{also}")
    if origin in (types.UnionType, typing.Union):
        for option in args:
            try:
                return fit(value, option)
            except TypeError:
                continue
        raise TypeError(f"expected {hint}")
    if origin in (tuple, collections.abc.Sequence):
        if not isinstance(value, tuple | list):
            raise TypeError("expected a list or tuple")
        if origin is not tuple or args[-1] is Ellipsis:
            return tuple(fit(item, args[0]) for item in value)
        if len(args) != len(value):
            raise TypeError(f"expected {len(args)} values")
        return tuple(fit(item, arg) for item, arg in zip(value, args, strict=True))
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise TypeError("expected a finite number") from None
    expected = type(None) if hint is None else hint
    if type(value) is not expected:
        raise TypeError(f"expected {getattr(expected, '__name__', expected)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise TypeError("expected a finite number")
    return value


def table(registry: Mapping[str, Experiment] = EXPERIMENTS) -> typing.Any:
    """What `--list` prints: name, the paper's tables, what it answers, and the module of bindings.

    The last is left out where it is the experiment's own name: `kernel_passes.Config.rank = 4`, but
    `compose.Config.rank = 4`.
    """
    from molora_jax import display

    rows = []
    for name, entry in registry.items():
        module = entry.module.rpartition(".")[2]
        text = entry.summary + (f" ({module})" if module != name else "")
        rows.append([name, entry.tables or "–", text])
    return display.Table(["experiment", "paper", "what it answers"], rows)


def product(sweeps: Iterable[list[str]]) -> list[str]:
    """Every combination of one point from each sweep, as one string of bindings a combination."""
    points = [""]
    for sweep in sweeps:
        points = [f"{left}\n{right}".strip() for left in points for right in sweep]
    return points


def repeated(names: Iterable[str]) -> list[str]:
    """Names that occur more than once."""
    return [name for name, count in collections.Counter(names).items() if count > 1]
