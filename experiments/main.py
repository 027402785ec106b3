"""run.py: flags and gin become one resolved config, and one experiment runs with it.

Exit codes: 0 done, 1 an experiment failed or was stopped, 2 misused (and nothing was started).
"""

import dataclasses
import difflib
import logging
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NoReturn

from absl import app, flags

from experiments import devices, registry, sweeps
from experiments.registry import one_line

# In a checkout run.py and configs/ lie beside this package; an installed one has configs/ in it.
_HERE = pathlib.Path(__file__).resolve().parent
_SCRIPT = _HERE.parent / "run.py"
CONFIGS = (_HERE.parent if _SCRIPT.is_file() else _HERE) / "configs"
NAME = "run.py" if _SCRIPT.is_file() else "molora run"
PROGRAM = (sys.executable, *([str(_SCRIPT)] if _SCRIPT.is_file() else ["-m", "experiments.main"]))
SCALES = ("tiny", "cpu", "paper")
# What fields of ours are called in PEFT, transformers and TRL; for hints alone.
USUAL_NAMES = {
    "base_model": "base",
    "base_model_name_or_path": "base",
    "cutoff_len": "seq_len",
    "dataset": "data",
    "eval_dataset": "heldout",
    "eval_file": "heldout",
    "gradient_accumulation_steps": "accumulate",
    "learning_rate": "lr",
    "lora_alpha": "alpha",
    "lora_r": "rank",
    "lora_rank": "rank",
    "max_grad_norm": "clip",
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
    "max_steps": "steps",
    "model_name_or_path": "base",
    "num_steps": "steps",
    "output_dir": "out",
    "per_device_train_batch_size": "batch_size",
    "r": "rank",
    "save_steps": "checkpoint_every",
    "seq_length": "seq_len",
    "target_modules": "projections",
    "train_batch_size": "batch_size",
    "train_dataset": "data",
    "train_file": "data",
    "warmup": "warmup_steps",
}
OWN_PACKAGES = ("__gin__", "experiments", "molora_jax", "pallas_kernels")

_LIST = flags.DEFINE_bool("list", False, "Print every experiment, a line each, and leave.")
_EXPERIMENT = flags.DEFINE_string("experiment", "compose", "Which experiment; see --list.")
_SCALE = flags.DEFINE_enum(
    "scale",
    "cpu",
    SCALES,
    "tiny: seconds, random weights, for tests; cpu: minutes on two cores, a real model and data; "
    "paper: the paper's own sizes, on a GPU.",
)
MAX_INCLUDES = 32
MAX_SEED = 2**32 - 1  # what jax.random and numpy take alike

_GIN_FILE = flags.DEFINE_multi_string(
    "gin_file", [], "A gin file laid over the experiment's own; may be given several times."
)
_GIN_BINDINGS = flags.DEFINE_multi_string(
    "gin_bindings", [], "A binding, such as compose.Config.rank=4; may be given several times."
)
_SWEEP = flags.DEFINE_multi_string(
    "sweep", [], "A named sweep of the experiment, such as seed; several, as lr,rank, multiply."
)
_LAUNCHER = flags.DEFINE_enum(
    "launcher",
    "here",
    ("here", "local", "slurm"),
    "Who runs a sweep's points. here: this process, one after another; local: processes of this "
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
_WORKDIR = flags.DEFINE_string("workdir", "runs", "Folder that run folders are written to.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of data, initialisation and training.")
_RERUN = flags.DEFINE_bool(
    "rerun", False, "Measure a finished run again, with the adapters and routers it trained."
)
_RETRAIN = flags.DEFINE_bool("retrain", False, "Train those anew too, then measure again.")


class Misuse(ValueError):
    """What the caller got wrong, in words; ends with exit code 2 before anything starts."""


def parse_flags(argv: Sequence[str]) -> list[str]:
    """absl's flags, but with exit code 0 for --help and 2 for a mistake (absl's own: 1)."""
    if any(re.fullmatch(r"--?(help|helpshort|helpfull|h|\?)", argument) for argument in argv[1:]):
        print(f"{__doc__}\nFlags:\n{flags.FLAGS.module_help(sys.modules[__name__])}")
        print("\nExperiments:\n  " + "\n  ".join(registry.lines()))
        sys.exit(0)
    try:
        rest = flags.FLAGS(list(argv))
    except flags.UnrecognizedFlagError as error:
        _misused(f"unknown flag --{error.flagname}", error.flagname, _own_flags(), prefix="--")
    except (flags.Error, ValueError) as error:  # absl's own for --nolist=value
        _misused(str(error))
    if len(rest) > 1:
        near = [*registry.nearest(rest[1], registry.EXPERIMENTS), "compose"][0]
        _misused(f"unexpected argument {rest[1]!r}: write --name=value, as in --experiment={near}")
    return rest


def _own_flags() -> list[str]:
    return [f.name for f in flags.FLAGS.get_flags_for_module(sys.modules[__name__])]


def _misused(
    message: str, name: str = "", known: Sequence[str] = (), *, prefix: str = ""
) -> NoReturn:
    """Prints the message, with the known names nearest to `name`, and leaves with code 2."""
    text = f"{one_line(message)}{_hint(name, known, prefix=prefix)}"
    # A terminal need not have the letters that a caller typed.
    print(f"{NAME}: {text.encode('utf-8', 'backslashreplace').decode()}", file=sys.stderr)
    sys.exit(2)


def _hint(name: str, known: Sequence[str], *, prefix: str = "") -> str:
    close = [prefix + each for each in registry.nearest(name, known)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def main(
    argv: Sequence[str],
    *,
    entries: Mapping[str, registry.Experiment] = registry.EXPERIMENTS,
    configs: pathlib.Path = CONFIGS,
    program: Sequence[str] = PROGRAM,
) -> int:
    """Runs what the flags ask for; returns the exit code.

    program  what a sweep's workers are started with, before their flags
    """
    del argv  # parse_flags has refused what is no flag
    # It tells of every kind of device that is not here.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
    if _LIST.value:
        try:
            print("\n".join(registry.lines(entries)), flush=True)
        except BrokenPipeError:  # `| head` has read enough; Python would complain at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    name = _EXPERIMENT.value
    if name not in entries:
        known = f"known: {', '.join(entries)}"
        _misused(f"unknown experiment {name!r} ({known})", name, list(entries))

    logging.getLogger("absl").addFilter(_worth_reading)
    # Everything that takes time to import comes after this line.
    try:
        sweeps.check_flags(flags.FLAGS)
        if _LAUNCHER.value != "here":
            sweeps.keep_off_devices()
        devices.join(flags.FLAGS)

        def resolve_all():
            module = entries[name].load()
            points = sweeps.points(module, sweeps.names_of(_SWEEP.value))
            configs_of = [resolve(name, module, configs=configs, sweep_point=p) for p in points]
            # What a config names (a data file, a base model) is read before anything starts, too.
            return module, points, configs_of, [module.digests(each) for each in configs_of]

        from molora_jax.parallel import together

        module, points, resolved, digests = together(resolve_all)
    except ValueError as error:
        _misused(str(error))
    except OSError as error:  # a model that cannot be fetched, a file that cannot be read
        print(f"{NAME}: {error}", file=sys.stderr)
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
                execute=execute,
                program=program,
            )
        sweeps.make_workdir(pathlib.Path(_WORKDIR.value))
        status, _ = execute(resolved[0], digests[0])
    except ValueError as error:
        _misused(str(error))
    return devices.leave(0 if status == "complete" else 1)


def _worth_reading(record: logging.LogRecord) -> bool:
    """Orbax logs some thirty lines a checkpoint, and the trace of what it raises besides: only its
    warnings are worth reading."""
    return record.levelno == logging.WARNING or "orbax" not in pathlib.Path(record.pathname).parts


def resolve(name: str, module: Any, *, configs: pathlib.Path, sweep_point: str = "") -> Any:
    """The experiment's Config from, each over the one before: its defaults (scale cpu),
    configs/NAME.gin, configs/SCALE.gin, --gin_file, --gin_bindings, the sweep's point, --seed.

    Raises:
      Misuse: what is unknown, unused, or refused by the Config, with the nearest known names.
    """
    own = configs / f"{name}.gin"
    values = bindings(module, files=[own] if own.exists() else [])
    if _SCALE.value != "cpu":
        scale_file = configs / f"{_SCALE.value}.gin"
        of_scale = bindings(module, files=[scale_file], shared=True) if scale_file.exists() else {}
        if not of_scale:
            has_none = f"{scale_file.name} binds nothing of it"
            raise Misuse(f"experiment {name!r} has no --scale={_SCALE.value}: {has_none}")
        values |= of_scale
    texts = [*_GIN_BINDINGS.value, sweep_point]
    values |= bindings(module, files=_GIN_FILE.value, texts=texts)
    if flags.FLAGS["seed"].present:
        values["seed"] = _SEED.value
    try:
        config = module.Config(**values)
    except ValueError as error:
        raise Misuse(one_line(str(error))) from None
    if not 0 <= config.seed <= MAX_SEED:
        raise Misuse(f"seed {config.seed}: expected 0 to {MAX_SEED}")
    return config


def bindings(
    module: Any, *, files: Sequence[Any] = (), texts: Sequence[str] = (), shared: bool = False
) -> dict[str, Any]:
    """What gin files and binding strings say about `module.Config`: {field: value}.

    gin accepts a binding of anything that can be imported, and macros that nobody reads; both
    would do nothing without a word, so they are refused, except that a `shared` file may bind other
    experiments. It would also import, and so run, any module that a file names: only the project's
    own are let through.

    Raises:
      Misuse: as `resolve` has it.
    """
    import gin

    package, _, short = module.__name__.rpartition(".")
    imports = f"from {package} import {short}" if package else f"import {short}"
    preamble = f"from __gin__ import dynamic_registration\n{imports}\nexperiment = @{short}.Config"
    own = {module.__name__.partition(".")[0], *OWN_PACKAGES}
    gin.clear_config()
    try:
        sources = [text for file in files for text in _with_includes(file, own)]
        for text in texts:
            sources += _checked(text, "--gin_bindings", own)
        for file in files:
            gin.parse_config_file(str(file))
        gin.parse_config("\n".join([preamble, *texts]))
        values = gin.get_bindings(module.Config)
        written = gin.config_str(max_line_length=10**4)  # gin pads its comments to it
    except Misuse:
        raise
    except Exception as error:
        if shared:  # the project's own file: a mistake in the code, not the caller's
            raise
        raise Misuse(_explain(error, module, short)) from None
    finally:
        gin.clear_config()
    if not shared:
        for binding in _without_effect(written, [written, *sources], short):
            near = _nearest_fields(binding, module, short)
            shown = one_line(binding)
            raise Misuse(f"binding {shown!r} has no effect on this experiment{near}")
    return values


def _with_includes(file: Any, own: Set[str]) -> list[str]:
    """The text of a gin file and of all that it includes, in which only `own` is imported."""
    try:
        found = pathlib.Path(file).is_file()
        text = pathlib.Path(file).read_text(encoding="utf-8") if found else ""
    except (OSError, ValueError) as error:
        raise Misuse(f"--gin_file={one_line(str(file))}: {one_line(str(error))}") from None
    if not found:
        near = _hint(pathlib.Path(file).name, sorted(path.name for path in CONFIGS.glob("*.gin")))
        raise Misuse(f"--gin_file={one_line(str(file))}: there is no such file{near}")
    return _checked(text, f"--gin_file={one_line(str(file))}", own)


def _checked(text: str, where: str, own: Set[str], *, depth: int = 0) -> list[str]:
    """`text` and all that it includes, read as gin reads them but without importing anything."""
    from gin import config_parser

    class Nothing(config_parser.ParserDelegate):
        """Takes references and macros without looking for what they name."""

        def configurable_reference(self, scoped_configurable_name, evaluate):
            return scoped_configurable_name

        def macro(self, scoped_name):
            return scoped_name

    found = [text]
    for statement in config_parser.ConfigParser(text, Nothing()):
        if isinstance(statement, config_parser.ImportStatement):
            package = statement.module.partition(".")[0]
            if package not in own:
                raise Misuse(
                    f"{where}: import of {one_line(statement.module)!r}: a gin file may import "
                    f"only from {', '.join(sorted(own))}, since an import runs code"
                )
        elif isinstance(statement, config_parser.IncludeStatement):
            if depth == MAX_INCLUDES:
                raise Misuse(f"{where}: more than {MAX_INCLUDES} files include each other")
            inner = pathlib.Path(statement.filename)
            if inner.suffix != ".gin" or not inner.is_file():
                name = one_line(statement.filename)
                raise Misuse(f"{where}: include {name!r}: there is no such .gin file")
            found += _checked(inner.read_text(encoding="utf-8"), where, own, depth=depth + 1)
    return found


def _without_effect(written: str, sources: Sequence[str], short: str) -> Iterator[str]:
    """Bindings, among those that gin wrote out, that the Config of module `short` never sees."""
    for binding in re.findall(r"^([\w./]*) = ", written, flags=re.MULTILINE):
        target, _, _ = binding.rpartition(".")
        if target:
            if not re.search(rf"(^|\.){re.escape(short)}\.Config$", target):
                yield binding
        elif not binding:  # gin's own macro without a scope, which is a macro without a name
            yield "gin.macro.value"
        # A macro counts as read if any source reads it: a later binding may have replaced that one.
        elif binding != "experiment" and not re.search(rf"%{binding}\b", "\n".join(sources)):
            yield binding


def _explain(error: Exception, module: Any, short: str) -> str:
    """gin's message, and the nearest names to the binding that it quotes."""
    text = str(error) or type(error).__name__
    # Python 3.12's tokenizer counts parentheses itself.
    if isinstance(error, RecursionError | MemoryError) or "too many nested" in text:
        return "a binding is nested too deep, or refers to itself"
    if undefined := re.search(r"In call to configurable 'macro' .* in scope '(.*)'", text):
        return f"macro %{one_line(undefined[1])} is read and not defined"
    if "Failed to parse token" in text:
        text += ". A string needs quotes of its own: --gin_bindings=\"NAME.Config.field='text'\""
    quoted = re.findall(r"^\s*([\w./]+)\s*=", text, flags=re.MULTILINE)
    return one_line(text) + (_nearest_fields(quoted[-1], module, short) if quoted else "")


def _nearest_fields(binding: str, module: Any, short: str) -> str:
    """A hint for a misspelt binding: its field's name counts, and not what stands before."""
    names = [field.name for field in dataclasses.fields(module.Config)]
    elsewhere = {other: name for other, name in USUAL_NAMES.items() if name in names}
    wanted = re.split(r"[./]", binding)[-1]
    usual = difflib.get_close_matches(wanted, elsewhere, n=1, cutoff=0.8)
    close = [elsewhere[name] for name in usual] or registry.nearest(wanted, names)
    listed = [f"{short}.Config.{name}" for name in close or names]
    return f"; did you mean {' or '.join(listed)}?" if close else f"; known are {', '.join(listed)}"


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
