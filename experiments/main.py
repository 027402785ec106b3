"""The command line: flags, settings and gin become one config, and one experiment runs with it.

Exit codes: 0 done, 1 an experiment failed or was stopped, 2 misused (and nothing was started).
"""

import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from absl import app, flags
from absl import logging as absl_logging

from experiments import devices, field_names, gin_files, registry, settings, sweeps, usage
from experiments.gin_files import CONFIGS, bindings
from experiments.registry import Misuse, one_line, program
from experiments.settings import USUAL_NAMES
from molora_jax import display
from molora_jax.ending import leave

__all__ = ["CONFIGS", "Misuse", "bindings", "main", "parse_flags", "resolve", "start", "values_of"]

SCALES = ("tiny", "cpu", "paper")
MAX_SEED = 2**32 - 1  # what jax.random and numpy take alike

_LIST = flags.DEFINE_bool("list", False, "Print every experiment, a line each, and leave.")
_FIELDS = flags.DEFINE_bool(
    "fields", False, "Print the settings of the experiment with the values they have, and leave."
)
_EXPERIMENT = flags.DEFINE_string("experiment", "compose", "Which one; they are listed below.")
_SCALE = flags.DEFINE_enum(
    "scale",
    "cpu",
    SCALES,
    "tiny: seconds, random weights, to try a command; cpu: minutes on two cores, a real model and "
    "data; paper: the paper's own sizes, on a GPU.",
)
_GIN_FILE = flags.DEFINE_multi_string(
    "gin_file",
    [],
    "A gin file laid over the experiment's own, such as a run's config.gin; several add up.",
)
_GIN_BINDINGS = flags.DEFINE_multi_string(
    "gin_bindings", [], "A binding as such a file has it, compose.Config.rank=4; several add up."
)
_SWEEP = flags.DEFINE_multi_string(
    "sweep", [], "Named sweeps of the experiment, such as seed; several, as lr,rank, multiply."
)
_LAUNCHER = flags.DEFINE_enum(
    "launcher",
    "here",
    ("here", "local", "slurm"),
    "Who runs the points. here: this process, one after another; local: processes of this "
    "machine, several at once (measure times with --jobs=1); slurm: jobs of a cluster.",
)
_JOBS = flags.DEFINE_integer(
    "jobs", 0, "Workers at once; 0: one a GPU or core, as memory allows.", lower_bound=0
)
_MEMORY_GB = flags.DEFINE_float(
    "memory_gb", 0, "Memory of a worker; one that takes more is killed. 0: its share.", 0
)
_RETRIES = flags.DEFINE_integer(
    "retries", 1, "How often a point that was killed or preempted is tried again.", lower_bound=0
)
_SLURM = flags.DEFINE_string(
    "slurm", "", "Settings of its jobs: partition=gpu,time=60,gpus=1,cpus=4 (time in minutes)."
)
flags.DEFINE_string(
    "mesh", "", "Devices along data, fsdp, tensor and slots, such as fsdp=4,tensor=2."
)
flags.DEFINE_bool(
    "explain_sharding", False, "Print how all that is placed on the mesh is split, with bytes."
)
flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of process 0, the same for all; auto under Slurm's srun."
)
flags.DEFINE_integer("process_id", None, "Which of the processes this is, from 0.")
flags.DEFINE_integer("num_processes", None, "How many there are.")
_WORKDIR = flags.DEFINE_string(
    "workdir", registry.WORKDIR, "Folder that run folders are written to."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of data, initialisation and training.")
_RERUN = flags.DEFINE_bool(
    "rerun", False, "Measure a finished run again, with the adapters and routers it trained."
)
_RETRAIN = flags.DEFINE_bool("retrain", False, "Train those anew too, then measure again.")


def parse_flags(argv: Sequence[str]) -> list[str]:
    """absl's flags, but with exit code 0 for --help and 2 for a mistake (absl's own: 1).

    Returns the program's name and the settings, `field=value`, which may stand among the flags.
    """
    if any(re.fullmatch(r"--?(help|helpshort|helpfull|h|\?)", argument) for argument in argv[1:]):
        display.show(usage.text(flags.FLAGS, program()))
        sys.exit(0)
    flags.FLAGS.set_gnu_getopt(True)
    try:
        rest = flags.FLAGS(list(argv))
    except flags.UnrecognizedFlagError as error:
        if error.flagname in _known_fields():
            _misused(f"--{error.flagname} is a setting, without dashes: {error.flagname}=VALUE")
        near = registry.hint(error.flagname, _own_flags(), prefix="--")
        _misused(f"unknown flag --{error.flagname}{near}")
    except (flags.Error, ValueError) as error:  # absl's own for --nolist=value
        _misused(str(error))
    # A shell leaves --workdir=~/runs as it is.
    flags.FLAGS.workdir = os.path.expanduser(flags.FLAGS.workdir)
    files: list[str] = flags.FLAGS.gin_file
    files[:] = map(os.path.expanduser, files)
    for word in rest[1:]:
        if "=" not in word:
            known = registry.nearest(word, registry.EXPERIMENTS)
            meant = "field=value or --flag=value, with quotes around a value with spaces"
            meant = f"--experiment={known[0]}" if known else meant
            meant = f"{word}=VALUE" if word in _known_fields() - set(known) else meant
            _misused(f"unexpected argument {word!r}: write {meant}")
    return rest


def _own_flags() -> list[str]:
    return [f.name for f in flags.FLAGS.get_flags_for_module(sys.modules[__name__])]


def _known_fields() -> set[str]:
    """What a setting of any experiment may be called, here or elsewhere."""
    modules = {entry.module for entry in registry.EXPERIMENTS.values()}
    return {name for each in modules for name in field_names.names(each)} | set(USUAL_NAMES)


def _misused(message: str) -> NoReturn:
    """Prints the message and leaves with code 2."""
    # A terminal need not have the letters that a caller typed.
    text = one_line(message).encode("utf-8", "backslashreplace").decode()
    print(f"{program()}: {text}", file=sys.stderr)
    sys.exit(2)


def main(
    argv: Sequence[str],
    *,
    entries: Mapping[str, registry.Experiment] = registry.EXPERIMENTS,
    configs: pathlib.Path = CONFIGS,
    started_with: Sequence[str] = (),
) -> int:
    """Runs what flags and settings ask for; returns the exit code.

    argv          the program's name and the settings, as parse_flags leaves them
    started_with  what a sweep's workers are started with, in place of this program
    """
    given = argv[1:]
    _log_plainly()
    if _LIST.value:
        display.show(registry.table(entries))
        return 0
    name = _EXPERIMENT.value
    if name not in entries:
        near = registry.hint(name, entries)
        _misused(f"unknown experiment {name!r} (known: {', '.join(entries)}){near}")

    # Everything that takes time to import comes after this line.
    try:
        if _FIELDS.value:
            return _show_fields(name, entries[name].load(), configs, given)
        sweeps.check_flags(flags.FLAGS)
        if _LAUNCHER.value != "here":
            sweeps.keep_off_devices()
        devices.join(flags.FLAGS)

        def resolve_all():
            module = entries[name].load()
            points = sweeps.points(module, sweeps.names_of(_SWEEP.value))
            configs_of = [
                resolve(name, module, configs=configs, given=given, sweep_point=point)
                for point in points
            ]
            # What a config names (a data file, a base model) is read before anything starts, too.
            return module, points, configs_of, [module.digests(each) for each in configs_of]

        from molora_jax.parallel import together

        module, points, resolved, digests = together(resolve_all)
    except ValueError as error:
        _misused(str(error))
    except OSError as error:  # a model that cannot be fetched, a file that cannot be read
        print(f"{program()}: {one_line(str(error))}", file=sys.stderr)
        return 1

    from experiments import results

    def execute(config, digest):
        with devices.use(flags.FLAGS) as workdir:
            return results.execute(
                name,
                module,
                config,
                digest,
                scale=_SCALE.value,
                configs=configs,
                workdir=workdir,
                rerun=_RERUN.value,
                retrain=_RETRAIN.value,
            )

    try:
        if _SWEEP.value or _LAUNCHER.value != "here":
            return sweeps.run(
                name,
                module,
                flags.FLAGS,
                points=points,
                configs=resolved,
                digests=digests,
                given=given,
                execute=execute,
                program=started_with or registry.worker_program(),
            )
        sweeps.make_workdir(pathlib.Path(_WORKDIR.value))
        status, _ = execute(resolved[0], digests[0])
    except ValueError as error:
        _misused(str(error))
    except BrokenPipeError:  # an OSError, and no failure: `leave` sees to it
        raise
    except OSError as error:  # a run's folder that cannot be written, as on a full disk
        print(f"{program()}: {one_line(str(error))}", file=sys.stderr)
        return 1
    return 0 if status == "complete" else 1


def _show_fields(name: str, module: Any, configs: pathlib.Path, given: Sequence[str]) -> int:
    """--fields: a row a field of the Config, with its value here."""
    from experiments import fields

    values = values_of(name, module, configs=configs, given=given)
    title = f"Settings of {name} at scale {_SCALE.value}, each written field=value"
    display.show(fields.table(module.Config, values, title=title))
    return 0


def _log_plainly() -> None:
    """Lines of the log as a user reads them: the project's own, and warnings; all with absl's
    prefixes where --verbosity asks for them."""
    # It tells of every kind of device that is not here.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
    handler = absl_logging.get_absl_handler()
    if flags.FLAGS["verbosity"].present:
        handler.setFormatter(absl_logging.PythonFormatter())
    else:
        handler.setFormatter(_Plain())
        handler.addFilter(_worth_reading)


class _Plain(logging.Formatter):
    """ "warning: what it is about"; what is no warning has no prefix."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def _worth_reading(record: logging.LogRecord) -> bool:
    """Whether a record is for a user: a warning, or a line of the experiments' own.

    Orbax logs some thirty lines a checkpoint, and the trace of what it raises besides: of it only
    warnings.
    """
    parts = pathlib.Path(record.pathname).parts
    if "orbax" in parts:
        return record.levelno == logging.WARNING
    return record.levelno >= logging.WARNING or "experiments" in parts


def resolve(
    name: str,
    module: Any,
    *,
    configs: pathlib.Path = CONFIGS,
    given: Sequence[str] = (),
    sweep_point: str = "",
) -> Any:
    """The experiment's Config of `values_of`.

    Raises:
      Misuse: what is unknown, unused, or refused by the Config, with the nearest known names.
    """
    values = values_of(name, module, configs=configs, given=given, sweep_point=sweep_point)
    try:
        config = module.Config(**values)
    except ValueError as error:
        raise Misuse(one_line(str(error))) from None
    if not 0 <= config.seed <= MAX_SEED:
        raise Misuse(f"seed {config.seed}: expected 0 to {MAX_SEED}")
    return config


def values_of(
    name: str,
    module: Any,
    *,
    configs: pathlib.Path = CONFIGS,
    given: Sequence[str] = (),
    sweep_point: str = "",
) -> dict[str, Any]:
    """The value of every field, each source over the one before: the experiment's own at --scale,
    --gin_file, --gin_bindings, the settings `given`, the sweep's point, --seed.

    Raises:
      Misuse: as `resolve` has it.
    """
    values = gin_files.own_values(name, module, _SCALE.value, configs=configs)
    values |= bindings(module, files=_GIN_FILE.value, texts=_GIN_BINDINGS.value)
    set_to = settings.read(module, given)
    values |= set_to
    if sweep_point:
        values |= bindings(module, texts=[sweep_point])
    if flags.FLAGS["seed"].present:
        if "seed" in set_to:
            raise Misuse(f"seed={set_to['seed']} and --seed={_SEED.value}: give one of the two")
        values["seed"] = _SEED.value
    return values


def start(program: Callable[[Sequence[str]], int] = main) -> NoReturn:
    """The whole program: absl's flags, `main` or another with it inside, the end of the process."""
    leave(lambda: app.run(program, flags_parser=parse_flags), registry.program())


if __name__ == "__main__":
    start()
