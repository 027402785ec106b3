"""Kills training at random moments and checks that each run goes on exactly.

python -m tests.training.kill_and_resume --kills=20 [--seed=0]

Each kill (SIGKILL) hits a run of its own of `run.py --experiment=train_adapter` on a small random
base: half of them at any moment after the first record, half while a checkpoint is being written.
The same command is run again, to the end: the adapter's files and every record, the speed aside,
must be those of a run that was never killed. Prints a line a kill; exit code 1 where one differs.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parents[2]
STEPS, EVERY = 60, 4
SETTINGS = {"steps": STEPS, "checkpoint_every": EVERY, "accumulate": 2, "weight_decay": 0.01}
WORDS = ["red", "green", "blue", "sun", "moon", "sea", "tree", "stone"]


class Try:
    """One run: its own workdir and cache; data and compiled programs are shared by all."""

    def __init__(self, shared: pathlib.Path, name: str):
        self.shared, self.folder = shared, shared / name
        self.made = self.folder / "cache" / "artifacts" / "adapter"

    def start(self) -> subprocess.Popen:
        """The command, as a user gives it."""
        bindings = {"data": str(self.shared / "data.jsonl"), **SETTINGS}
        environment = {
            "JAX_PLATFORMS": "cpu",
            "MOLORA_CACHE": str(self.folder / "cache"),
            "JAX_COMPILATION_CACHE_DIR": str(self.shared / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        words = ["--experiment=train_adapter", "--scale=tiny", f"--workdir={self.folder / 'runs'}"]
        words += [f"--gin_bindings=train_adapter.Config.{k}={v!r}" for k, v in bindings.items()]
        return subprocess.Popen(
            [sys.executable, "run.py", *words],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self) -> str:
        """Runs to the end and returns what was printed."""
        with self.start() as process:
            printed, _ = process.communicate(timeout=300)
        if process.returncode:
            raise RuntimeError(f"run.py ended with exit code {process.returncode}:\n{printed}")
        return printed

    def records(self) -> list[str]:
        """Whole lines written so far, be the adapter finished or not."""
        text = ""
        for path in self.made.glob("*/metrics.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # renamed just now
                text = path.read_text()
        return text.splitlines()[: text.count("\n")]

    def checkpoints(self, pattern: str) -> list[pathlib.Path]:
        return sorted(self.made.glob(f"*.partial/checkpoints/{pattern}"))

    def result(self) -> dict[str, object]:
        """What must not depend on kills: {file: its content, without what a clock measured}."""
        (run,) = (self.folder / "runs" / "train_adapter").iterdir()
        files = ("adapter_model.safetensors", "adapter_config.json")
        found: dict[str, object] = {name: (run / "adapter" / name).read_bytes() for name in files}
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found["metrics.jsonl"] = [
            {key: value for key, value in record.items() if key != "tokens_per_s"}
            for record in records
        ]
        found["result.json"] = json.loads((run / "result.json").read_text())["metrics"]
        return found


def straight(run: Try) -> tuple[dict, float, float]:
    """A run that nobody kills: (its result, seconds it trained, seconds a checkpoint took)."""
    run.finish()  # compiles
    shutil.rmtree(run.folder)
    begun, writing, looks = 0.0, 0, 0
    with run.start() as process:
        while process.poll() is None and len(run.records()) < STEPS:
            begun = begun or (time.monotonic() if run.records() else 0.0)
            writing += bool(run.checkpoints("*tmp*"))
            looks += bool(begun)
            time.sleep(0.002)
        span = time.monotonic() - begun
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    return run.result(), span, span * writing / max(looks, 1) / (STEPS / EVERY)


def kill(run: Try, sign: Callable[[], bool], delay: float) -> bool:
    """Starts it and kills it `delay` seconds after the sign; False if it had ended by then."""
    with run.start() as process:
        latest = time.monotonic() + 300  # what hangs is killed too, and says so when run again
        while not sign() and process.poll() is None and time.monotonic() < latest:
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    return process.returncode == -signal.SIGKILL


def try_once(run: Try, rng: random.Random, span: float, window: float, *, aimed: bool) -> str:
    """Kills a run and says what lay there then; empty if it was too late for that."""
    if aimed:
        step = EVERY * rng.randint(1, STEPS // EVERY)
        when, delay = f"as step {step} was being written", rng.uniform(0.0, window)
        begun = f"step_{step:08d}*"
        killed = kill(run, lambda: bool(run.checkpoints(begun)), delay)
    else:
        when, delay = "anywhere", rng.uniform(0.0, span)
        killed = kill(run, lambda: bool(run.records()), delay)
    if not killed:
        return ""
    half = [path.name.partition(".")[0] for path in run.checkpoints("*tmp*")]
    left = f", half-written {', '.join(half)}" if half else ""
    return f"{when} + {delay:.3f} s: {len(run.records())} records{left}"


def resume(run: Try, expected: dict) -> tuple[str, list[str]]:
    """Runs the same command again: (where it went on, what differs from the run never killed)."""
    whole = run.checkpoints("step_????????")
    newest = int(whole[-1].name.partition("_")[2]) if whole else 0
    trained = not list(run.made.glob("*.partial"))  # only what follows training is to be done
    found = re.search(r"resumed after step (\d+)", run.finish())
    step = int(found[1]) if found else 0
    result = run.result()
    differing = [name for name, value in expected.items() if result.get(name) != value]
    if not trained and step != newest:
        differing.append(f"went on after step {step} though {newest} was there")
    return ("with the finished adapter" if trained else f"after step {step}"), differing


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    rng, exact = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        shared = pathlib.Path(folder)
        lines = [json.dumps({"text": " ".join(rng.choices(WORDS, k=30))}) for _ in range(40)]
        (shared / "data.jsonl").write_text("\n".join(lines) + "\n")
        expected, span, window = straight(Try(shared, "straight"))
        print(f"never killed: {span:.1f} s of training, {window:.3f} s a checkpoint", flush=True)
        for number in range(1, args.kills + 1):
            said = ""
            while not said:  # again where the run had ended before
                run = Try(shared, f"kill-{number}")
                shutil.rmtree(run.folder, ignore_errors=True)
                said = try_once(run, rng, span, window, aimed=number % 2 == 0)
            where, differing = resume(run, expected)
            exact += not differing
            outcome = f"DIFFERS in {', '.join(differing)}" if differing else "exact"
            print(f"kill {number:2}  {said}; went on {where}: {outcome}", flush=True)
            shutil.rmtree(run.folder)
    print(f"{args.kills} kills, {exact} exact resumes")
    return 0 if exact == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
