"""What a run computes on, from its flags: processes that run in step, and a mesh of all devices."""

import contextlib
import functools
import os
import pathlib
import tempfile
from collections.abc import Iterator

from absl import flags

PROCESSES = ("coordinator", "process_id", "num_processes")


def join(values: flags.FlagValues) -> None:
    """Joins the processes that --coordinator tells of; before JAX looks for its devices.

    Raises:
      ValueError: the flags do not say who the processes are.
      RuntimeError: the others did not come.
    """
    given = [name for name in PROCESSES if values[name].present]
    if not given:
        return
    from molora_jax.parallel import start_processes

    if values.coordinator == "auto":
        if len(given) > 1:
            raise ValueError(f"--{given[-1]}: --coordinator=auto finds it out; leave it out")
        if "SLURM_PROCID" not in os.environ:
            raise ValueError(
                "--coordinator=auto: this is no job step of Slurm (SLURM_PROCID is not set): start "
                "it with srun, or give --coordinator=HOST:PORT, --num_processes and --process_id"
            )
        start_processes()
        return
    missing = [f"--{name}" for name in PROCESSES if name not in given]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} missing beside {', '.join(f'--{name}' for name in given)}: "
            "every process is told --coordinator=HOST:PORT, --num_processes and its own "
            "--process_id from 0; under Slurm --coordinator=auto says all of it"
        )
    start_processes(
        values.coordinator,
        num_processes=values.num_processes,
        process_id=values.process_id,
    )


@contextlib.contextmanager
def use(values: flags.FlagValues) -> Iterator[pathlib.Path]:
    """Splits what happens inside over the mesh of --mesh; yields the workdir of this process.

    Of several processes the first alone prints and writes to --workdir. The others have a folder of
    their own, which goes at the end.

    Raises:
      ValueError: the mesh does not fit the devices.
    """
    import jax

    from molora_jax.parallel import is_primary, make_mesh, use_mesh

    with contextlib.ExitStack() as stack:
        workdir = pathlib.Path(values.workdir)
        if not is_primary():
            workdir = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        if values.mesh or jax.process_count() > 1:
            explain = functools.partial(print, flush=True) if values.explain_sharding else None
            stack.enter_context(use_mesh(make_mesh(values.mesh), explain=explain))
        elif values.explain_sharding:
            raise ValueError("--explain_sharding: there is no --mesh, so nothing is split")
        yield workdir
