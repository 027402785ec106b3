"""Training, evaluation and serving on a mesh give the numbers of one device."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest

AXES = "data=2,fsdp=2,tensor=2"
OTHERS = "slots=2,fsdp=2,tensor=2"


def run(folder, *, steps, parts, meshes, processes=1, devices=8):
    """{mesh: outcome} of tests/parallel/program.py, run by so many processes of so many devices."""
    out = folder / f"{processes}.json"
    command = [sys.executable, "-m", "tests.parallel.program", str(out), str(steps), parts, meshes]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    coordinator = free_address()
    with contextlib.ExitStack() as stack:
        started, logs = [], []
        for index in range(processes):
            joined = [coordinator, str(processes), str(index)] if processes > 1 else []
            logs.append(stack.enter_context((folder / f"{processes}.{index}.log").open("w+")))
            process = subprocess.Popen(
                [*command, *joined], env=env, stdout=logs[-1], stderr=logs[-1]
            )
            started.append(process)
            stack.callback(process.kill)  # nothing where it has ended
        codes = [process.wait(1500) for process in started]
        for log in logs:
            log.seek(0)
        assert not any(codes), [log.read()[-3000:] for log in logs]
    return json.loads(out.read_text())


def free_address():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def check_same(found, whole):
    """Loss curves within 1e-4, routing and served tokens the same."""
    assert found.keys() == whole.keys()
    for name in sorted({"adapter", "router"} & found.keys()):
        pairs = zip(found[name], whole[name], strict=True)
        print(f"{name}: losses differ by {max(abs(a - b) for a, b in pairs):.1e} at most")
        assert found[name] == pytest.approx(whole[name], abs=1e-4, rel=0)
        assert whole[name][0] != pytest.approx(whole[name][-1], abs=1e-3)  # it was trained
    if "nll" in found:
        assert found["nll"] == pytest.approx(whole["nll"], abs=1e-4)
        assert found["ids"] == whole["ids"]
    if "tokens" in found:
        assert found["tokens"] == whole["tokens"]
        assert len({str(each) for each in whole["tokens"].values()}) > 5


def test_a_mesh_of_eight_devices_computes_what_one_does(tmp_path):
    found = run(tmp_path, steps=4, parts="ars", meshes=f"none+{AXES}")
    check_same(found[AXES], found["none"])


def test_two_processes_compute_what_one_does(tmp_path):
    found = run(tmp_path, steps=3, parts="a", meshes="none", devices=1)
    both = run(tmp_path, steps=3, parts="a", meshes="fsdp=2,tensor=2", processes=2, devices=2)
    check_same(both["fsdp=2,tensor=2"], found["none"])


def test_processes_that_were_told_different_things_all_say_so():
    script = """
        import sys
        from molora_jax import parallel
        parallel.start_processes(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
        parallel.check_same("run", lambda: {"seed": 3})
        assert parallel.gather(int(sys.argv[2])) == [0, 1]
        def fails_in_one():
            if not parallel.is_primary():
                raise OSError("no such file here")
        try:
            parallel.together(fails_in_one)
        except OSError as error:
            print(error)
        parallel.check_same("run", lambda: {"seed": int(sys.argv[2])})
    """
    coordinator, env = free_address(), os.environ | {"JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), coordinator, str(index)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    for index, process in enumerate(started):
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 1
        assert ("process 1: " if not index else "") + "no such file here" in said
        assert "seed is 0 in process 0 and 1 in process 1" in said


@pytest.mark.long
def test_fifty_steps_on_every_kind_of_mesh(tmp_path):
    meshes = [AXES, OTHERS, "fsdp=8", "slots=2,data=4"]
    found = run(tmp_path, steps=50, parts="ars", meshes="+".join(["none", *meshes]))
    for mesh in meshes:
        check_same(found[mesh], found["none"])
    four = run(tmp_path, steps=50, parts="ars", meshes=AXES, processes=4, devices=2)
    check_same(four[AXES], found["none"])
