"""The flags that say what a run computes on: what they refuse, and what they set up."""

import numpy as np
import pytest
from absl import flags

from experiments import devices
from molora_jax import parallel


def flag_values(*given):
    values = flags.FlagValues()
    for name in ("coordinator", "mesh", "workdir"):
        flags.DEFINE_string(name, {"mesh": "", "workdir": "runs"}.get(name), "", flag_values=values)
    for name in ("process_id", "num_processes"):
        flags.DEFINE_integer(name, None, "", flag_values=values)
    flags.DEFINE_bool("explain_sharding", False, "", flag_values=values)
    values(["run.py", *given])
    return values


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--coordinator=1.2.3.4:9"], "--process_id and --num_processes missing beside --coord"),
        (["--process_id=1"], "--coordinator and --num_processes missing beside --process_id"),
        (["--coordinator=auto"], r"SLURM_PROCID is not set\): start it with srun, or give"),
        (["--coordinator=auto", "--process_id=0"], "--process_id: --coordinator=auto finds it out"),
        (
            ["--coordinator=1.2.3.4:9", "--num_processes=2", "--process_id=2"],
            "process_id 2 of num_processes 2: expected 0 to 1",
        ),
        (
            ["--coordinator=1.2.3.4", "--num_processes=2", "--process_id=0"],
            "'1.2.3.4': expected host:port",
        ),
    ],
)
def test_processes_that_are_not_told_whole_are_refused(given, message, monkeypatch):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    with pytest.raises(ValueError, match=message):
        devices.join(flag_values(*given))


def test_a_run_without_the_flags_has_no_mesh():
    values = flag_values("--workdir=elsewhere")
    devices.join(values)
    with devices.use(values) as workdir:
        assert workdir.name == "elsewhere"
        assert parallel.current_mesh() is None


def test_a_mesh_holds_inside_and_says_how_it_splits(capsys):
    with devices.use(flag_values("--mesh=tensor=1", "--explain_sharding")):
        mesh = parallel.current_mesh()
        assert mesh is not None and set(mesh.shape.values()) == {1}
        parallel.place({"embedding": np.ones((2, 2))}, mesh, title="a base")
    assert parallel.current_mesh() is None
    assert "a base" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--mesh=tensor=3"], "needs 3 devices, and there are 1"),
        (["--explain_sharding"], "there is no --mesh"),
    ],
)
def test_what_cannot_be_split_is_refused(given, message):
    with pytest.raises(ValueError, match=message), devices.use(flag_values(*given)):
        pass
