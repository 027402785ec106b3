"""Programs that are stopped or fail end with their code and one line, whatever runs beside them."""

import subprocess
import sys
from pathlib import Path

import pytest

# A shell starts what runs in its background with SIGINT ignored.
START = """
import atexit, os, signal, sys, time
from molora_jax.ending import leave
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
# XLA computes for a minute beside Python, whose teardown would wait for it or take its memory away.
COMPUTING = """
import jax, jax.numpy as jnp
def program():
    x = jnp.ones((600, 600))
    jax.jit(lambda x: jax.lax.fori_loop(0, 9000, lambda i, x: x @ x, x))(x)
    atexit.register(print, "torn down")
    print("written", end="")
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""
IN_A_DESTRUCTOR = """
class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))
def program():
    Dying()
    print("written", end="")
    time.sleep(60)
"""
IN_AN_IMPORT = """
def program():
    sys.path.insert(0, sys.argv[1])
    import interrupted
    print("written", end="")
    time.sleep(60)
"""


def ended(program: str, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{START}{program}\nleave(program, 'toy')", *arguments],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=50,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("program", [COMPUTING, IN_A_DESTRUCTOR, IN_AN_IMPORT])
def test_an_interrupt_is_one_line_and_code_1(program, tmp_path):
    (tmp_path / "interrupted.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    sum(range(1000))\n"
        "except KeyboardInterrupt:\n"
        "    os.abort()\n"  # as a module in C++ does
    )
    assert ended(program, str(tmp_path)) == (1, "written", "toy: stopped\n")


@pytest.mark.parametrize(
    ("program", "code", "out"),
    [
        ("return 0", 0, "torn down\n"),
        ("return 3", 3, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('why')", 1, "torn down\n"),
    ],
)
def test_a_program_ends_with_its_code(program, code, out):
    registered = "atexit.register(print, 'torn down')\n"
    found = ended(f"{registered}def program(): {program}")
    assert found == (code, out, "why\n" if "why" in program else "")
