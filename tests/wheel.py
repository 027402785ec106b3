"""Does the wheel work alone? Checks what `dist/` holds; then, for each Python named, installs the
wheel into a fresh environment and follows the tutorial's short path in an empty folder:

    python -m tests.wheel dist python3.11 python3.12 python3.13

`make wheel PYTHONS="python3.11 ..."` builds `dist/` first. No constraints hold here: what a plain
`pip install` of today takes is what is tried. A warning counts as a fault.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath

UV = (sys.executable, "-m", "uv")
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("experiments", "molora_jax", "pallas_kernels")
NEVER = re.compile(r"(^|/)(\.ci|\.venv[^/]*|runs|out|data|dist|__pycache__)/|\.(jsonl|orig|pyc)$")


def main(arguments: list[str]) -> int:
    folder, *pythons = arguments
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (wheel,) = Path(folder).resolve().glob("*.whl")
    (source,) = Path(folder).resolve().glob("*.tar.gz")
    faults = [*faults_of_wheel(wheel, version), *faults_of_source(source, version)]
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return 1
    print(f"{wheel.name} and {source.name} hold what they should")
    with ThreadPoolExecutor(2) as pool:  # two at once: the compiler uses one core
        for log in pool.map(partial(try_it, wheel, version), pythons or [sys.executable]):
            print("\n  ".join(log), flush=True)
    return 0


# --- what the files hold --------------------------------------------------------------------------


def tracked(*folders: str) -> set[str]:
    """What git knows below the folders: what should be shipped, and nothing that lies about."""
    listed = subprocess.check_output(["git", "ls-files", "-z", *folders], cwd=ROOT, text=True)
    return set(listed.rstrip("\0").split("\0"))


def faults_of_wheel(wheel: Path, version: str) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = f"molora_jax-{version}.dist-info"
        metadata = archive.read(f"{about}/METADATA").decode()
        licence = archive.read(f"{about}/licenses/LICENSE")
    expected = tracked(*PACKAGES)
    expected |= {f"experiments/{name}" for name in tracked("configs")}
    own = {name for name in names if not name.startswith(f"{about}/")}
    faults = [f"{wheel.name} lacks {name}" for name in sorted(expected - own)]
    faults += [f"{wheel.name} should not hold {name}" for name in sorted(own - expected)]
    if f"\nVersion: {version}\n" not in metadata:
        faults.append(f"{wheel.name}: its METADATA does not say version {version}")
    if licence != (ROOT / "LICENSE").read_bytes():
        faults.append(f"{wheel.name}: another licence than LICENSE")
    return faults


def faults_of_source(source: Path, version: str) -> list[str]:
    top = f"molora_jax-{version}"
    with tarfile.open(source) as archive:
        names = {str(PurePosixPath(name).relative_to(top)) for name in archive.getnames()}
    needed = tracked(*PACKAGES, "configs", "docs", "tests", "LICENSE", "README.md", "run.py")
    faults = [f"{source.name} lacks {name}" for name in sorted(needed - names)]
    known = tracked() | {"PKG-INFO"}
    wrong = {name for name in names if name not in known or NEVER.search(name)}
    return [*faults, *(f"{source.name} should not hold {name}" for name in sorted(wrong))]


# --- what it does where nothing else is -----------------------------------------------------------


def try_it(wheel: Path, version: str, python: str) -> list[str]:
    """Returns what it did, a command a line, the interpreter's version first."""
    with tempfile.TemporaryDirectory() as fresh:
        here, bin = Path(fresh) / "empty", Path(fresh) / "env" / "bin"
        here.mkdir()
        call = Caller(here, bin)
        call(*UV, "venv", "--quiet", "--seed", "--python", python, str(bin.parent))
        call("python", "--version")
        # pip must find versions that fit together; its warnings are about the machine's settings.
        # uv finds the same ones and has them in place in seconds.
        call(
            "python",
            "-m",
            "pip",
            "install",
            "--dry-run",
            f"{wheel}[serve,slurm]",
            warnings_allowed=True,
        )
        call(*UV, "pip", "install", "--python", str(bin / "python"), str(wheel))
        assert call("molora", "--version").strip() == version
        assert re.search(r"^compose ", call("molora", "run", "--list"), re.MULTILINE)
        call("molora", "run", "--experiment=compose", "--scale=tiny")
        follow_the_tutorial(call, here)
    return call.log


class Caller:
    """Calls a command with nothing of the clone or of the caller's environment to help it; stops
    everything if it fails or warns. `log` has what was called."""

    def __init__(self, here: Path, bin: Path):
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MOLORA", "JAX"))
        }
        path = f"{bin}:{os.environ['PATH']}"
        # Half the time goes without LLVM's optimiser, as in tests/conftest.py.
        flags = "--xla_backend_optimization_level=0"
        self.env, self.here, self.log = {**kept, "PATH": path, "XLA_FLAGS": flags}, here, []

    def __call__(self, *command: str, warnings_allowed: bool = False) -> str:
        done = subprocess.run(
            command,
            cwd=self.here,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        warns = not warnings_allowed and "warning" in done.stdout.lower()
        if done.returncode or warns:
            what = "a warning" if warns else f"exit code {done.returncode}"
            raise SystemExit(f"{done.stdout}\n{what} in a fresh environment: {' '.join(command)}")
        self.log.append(textwrap.shorten(" ".join(command), 110, placeholder=" ..."))
        return done.stdout


def follow_the_tutorial(call: Caller, here: Path) -> None:
    base = ("--base", "tiny-random")
    for name, text in (("code", "def add(x): return x + {n}\n"), ("math", "{n} pens and {n}?\n")):
        lines = [json.dumps({"text": text.format(n=n) * 4}) for n in range(40)]
        (here / f"{name}.jsonl").write_text("\n".join(lines))
        settings = {"base": "tiny-random", "data": f"{name}.jsonl", "name": name}
        settings |= {"out": f"out/{name}", "steps": 3, "warmup_steps": 1, "batch_size": 2}
        bound = [f"--gin_bindings=train_adapter.Config.{k}={v!r}" for k, v in settings.items()]
        call("molora", "run", "--experiment=train_adapter", *bound)
        small = ("--seq_len", "32", "--rows", "4", "--features", "8")
        call("molora", "statistics", f"out/{name}", *base, "--data", f"{name}.jsonl", *small)
    call("molora", "compose", "out/code", "out/math", *base, "--out", "out/two")
    words = ("--prompt", "def add(x):", "--max_tokens", "4", "--only", "routed")
    assert "routed" in call("molora", "generate", *base, "--composition", "out/two", *words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
