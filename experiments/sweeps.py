"""Named sweeps: the points of a grid, the command line of each, and all of them run.

experiments.main imports this before it reads its flags, so nothing heavy is imported at the top.
"""

import dataclasses
import math
import os
import pathlib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from experiments import devices, registry, settings

if TYPE_CHECKING:
    from experiments import launcher

SEEDS = (0, 1, 2, 3)
LOG = "worker.log"  # in a run's folder: what it printed where it ran in a process of its own
# Flags that are about the sweep: a worker gets all others.
OWN_FLAGS = frozenset({"sweep", "launcher", "jobs", "memory_gb", "retries", "slurm"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a sweep.

    label     what it varies, on a short line: "lr = 0.001, seed = 2"
    bindings  the same as gin text
    path      its run folder
    """

    label: str
    bindings: str
    config: Any
    digests: Mapping[str, str]
    path: pathlib.Path

    @property
    def name(self) -> str:
        """The run's id and what it varies."""
        return f"{self.path.name} {self.label}".rstrip()


def names_of(values: Iterable[str]) -> list[str]:
    """The names that --sweep was given: each value is a comma list, and several add up."""
    return [name.strip() for value in values for name in value.split(",")]


def of_module(module: types.ModuleType) -> dict[str, Callable[[], list[str]]]:
    """An experiment's own sweeps, and `seed`, which all have."""
    short = module.__name__.rpartition(".")[2]

    def seeds() -> list[str]:
        return [f"{short}.Config.seed = {seed}" for seed in SEEDS]

    return {"seed": seeds, **getattr(module, "SWEEPS", {})}


def points(module: types.ModuleType, names: Sequence[str]) -> list[str]:
    """The bindings of every point of the product; one point without any where no sweep is named.

    Raises:
      ValueError: a name is not known, or stands twice.
    """
    known = of_module(module)
    for name in names:
        if name not in known:
            near = registry.hint(name, known)
            raise ValueError(f"unknown sweep {name!r} (known: {', '.join(known)}){near}")
    if twice := registry.repeated(names):
        raise ValueError(f"sweep {twice[0]!r} is named twice; each multiplies the others")
    return registry.product(known[name]() for name in names)


def settings_of_a_run(module: types.ModuleType, given: Sequence[str], bindings: str) -> list[str]:
    """The settings of one point's own command line: those given, less what the point sets, and the
    point's."""
    from experiments import gin_files

    of_point = gin_files.bindings(module, texts=[bindings]) if bindings else {}
    kept = [word for word in given if word.partition("=")[0] not in of_point]
    for name, value in of_point.items():
        kept += settings.written(module, name, value)
    return kept


def label(bindings: str) -> str:
    """Bindings as a line for people, without the name of the config."""
    text = ", ".join(line.rpartition(".Config.")[2] for line in bindings.splitlines())
    return text if len(text) <= 80 else f"{text[:79]}…"


def check_flags(values: flags.FlagValues) -> None:
    """Refuses flags that would say nothing.

    Raises:
      ValueError: names the flag, and what it needs.
    """
    asked = values.launcher
    if not math.isfinite(values.memory_gb):
        raise ValueError(f"--memory_gb={values.memory_gb}: expected a number of GB")
    if values.slurm and asked != "slurm":
        raise ValueError(f"--slurm={values.slurm}: it is for --launcher=slurm, not for {asked}")
    if asked == "here" and (values.jobs > 1 or values.memory_gb):
        flag = f"jobs={values.jobs}" if values.jobs > 1 else f"memory_gb={values.memory_gb:g}"
        raise ValueError(f"--{flag}: needs --launcher=local, which has processes to bound")
    if values.sweep or asked != "here":
        for name in devices.PROCESSES:  # a run of several; those of a sweep are one each
            if values[name].present:
                raise ValueError(f"--{name}: every run of a sweep is one process; leave it out")


def make_workdir(path: pathlib.Path) -> None:
    """Makes the folder that runs are written to.

    Raises:
      ValueError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        said = f"no folder can be made there ({error.strerror})"
        raise ValueError(f"--workdir={path}: {said}") from None


def check(planned: Sequence[Point]) -> None:
    """Refuses points that would be one run, or write over what another hands out.

    Raises:
      ValueError: names the two points and what makes them clash.
    """
    seen: dict[pathlib.Path, Point] = {}
    for point in planned:
        if other := seen.get(point.path):
            raise ValueError(
                f"points {other.label!r} and {point.label!r} of the sweep make the same run: what "
                "they vary is set by another sweep, or by --seed"
            )
        seen[point.path] = point
    outs = [out for point in planned if (out := getattr(point.config, "out", ""))]
    if twice := registry.repeated(outs):
        raise ValueError(
            f"Config.out = {twice[0]!r}: every run of the sweep would be copied over the one "
            "before; leave it out, and take the best run's folder"
        )


def flags_of_a_run(values: flags.FlagValues) -> list[str]:
    """The flags of this command line that a worker gets: all that were given, less the sweep's."""
    handed = []
    for name in values:
        flag = values[name]
        if not flag.present or name in OWN_FLAGS or name != flag.name:  # -v is another --verbosity
            continue
        if isinstance(flag, flags.MultiFlag):  # its own serialize() joins them to one text
            handed += [f"--{name}={value}" for value in flag.value or ()]
        else:
            handed.append(flag.serialize())
    return handed


def run(
    name: str,
    module: types.ModuleType,
    values: flags.FlagValues,
    *,
    points: Sequence[str],
    configs: Sequence[Any],
    digests: Sequence[Mapping[str, str]],
    given: Sequence[str],
    execute: Callable[[Any, Mapping[str, str]], tuple[str, pathlib.Path]],
    program: Sequence[str],
) -> int:
    """Runs every point as the flags say, and prints the table; returns the exit code.

    Args:
      points, configs, digests: of each run, what `points` gave and what was made of it.
      given: settings of the command line, which every point has unless it sets them itself.
      execute: measures one in this process: (status, folder).
      program: what a process of its own is started with, before its flags.

    Raises:
      ValueError: the flags do not fit together or this machine; nothing was started.
    """
    # What is needed at the end, too: a sweep takes long, and the code may have changed by then.
    from experiments import artifacts, launcher, results, sweep_report

    within, names = pathlib.Path(values.workdir) / name, names_of(values.sweep)
    planned = [
        Point(
            label=label(point),
            bindings=point,
            config=config,
            digests=digest,
            path=within / results.run_id(name, config, digest),
        )
        for point, config, digest in zip(points, configs, digests, strict=True)
    ]
    check(planned)
    folder = within / "-".join(
        ["sweep", *names, artifacts.digest_of([point.path.name for point in planned])[:8]]
    )
    handed = flags_of_a_run(values)
    pool = pool_of(
        values,
        lambda point: [*program, *handed, *settings_of_a_run(module, given, point.bindings)],
        execute=execute,
        folder=folder / "slurm",
        name=name,
        points=len(planned),
    )

    def finished(point: Point) -> bool:
        again = values.rerun or values.retrain
        return not again and results.is_finished(module, point.config, point.path)

    make_workdir(pathlib.Path(values.workdir))
    outcomes = launcher.launch(planned, pool, finished=finished, retries=values.retries)
    sweep_report.show_end(name, planned, outcomes, folder=folder)
    return 0 if all(outcome.status in ("found", "done") for outcome in outcomes) else 1


def pool_of(
    values: flags.FlagValues,
    command: Callable[[Point], list[str]],
    *,
    execute: Callable[[Any, Mapping[str, str]], tuple[str, pathlib.Path]],
    folder: pathlib.Path,
    name: str,
    points: int,
) -> "launcher.Pool":
    """The pool that the flags ask for, for so many points.

    Args:
      command: a point's command line, for all but --launcher=here.
      execute: what measures a point here.
      folder: where Slurm's own files go.

    Raises:
      ValueError: what it needs is not here.
    """
    from experiments import launcher

    jobs, memory_gb = values.jobs, values.memory_gb
    if values.launcher == "here":
        return launcher.Here(execute)
    if values.launcher == "slurm":
        from experiments import slurm_pool

        settings = slurm_pool.parse(values.slurm)
        slurm_pool.check_machine()
        return slurm_pool.SlurmPool(
            command, folder=folder, name=name, settings=settings, jobs=jobs, memory_gb=memory_gb
        )
    from experiments import local_pool

    # Under a mesh every run takes all devices, so one fits at a time.
    whole_machine = bool(values.mesh)
    gpus = [] if whole_machine else local_pool.visible_gpus(os.environ)
    cores = local_pool.available_cores()
    room, share = local_pool.fit(
        points=points,
        jobs=jobs or int(whole_machine),
        memory_gb=memory_gb,
        gpus=len(gpus),
        free_gb=local_pool.free_memory_gb(),
        cores=cores,
    )
    print(f"{points} points, {room} at once, each in at most {share:.1f} GB of memory")
    return local_pool.LocalPool(command, room=room, memory_gb=share, gpus=gpus, cores=cores)


def keep_off_devices() -> None:
    """This process leaves accelerators to those that it starts; they read their own variables."""
    import jax

    jax.config.update("jax_platforms", "cpu")
