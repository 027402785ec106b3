"""Runs: their ids, how one is measured or found again, and how it ends.

`<workdir>/<experiment>/<run id>/` holds config.gin, config.json, metrics.jsonl, report.md, pictures
and result.json, and error.txt where it failed; `previous/` in it holds the same of the measurement
that the last --rerun replaced.
`molora results RUNS...` compares such folders (experiments.comparison).
"""

import contextlib
import dataclasses
import json
import pathlib
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging

from experiments import artifacts, gin_files, registry, settings
from experiments.provenance import environment, source_digest
from experiments.run_folder import Claim, Run, read_result
from molora_jax.display import show_report
from molora_jax.parallel import broadcast, check_same, current_mesh, is_primary
from molora_jax.training import NonFiniteLossError
from molora_jax.training.checkpoint import on_primary

__all__ = ["Claim", "Run", "config_gin", "execute", "hand_out", "is_finished", "run_id"]

ERROR_FILE = "error.txt"
# What data, adapters, a base or a place that do not fit end in: a line says it. Of any other
# exception the trace is shown, since it is a mistake in the code.
OF_THE_USER = (ValueError, OSError, KeyError, FloatingPointError, NonFiniteLossError)


def execute(
    name: str,
    module: types.ModuleType,
    config: Any,
    digests: Mapping[str, str],
    *,
    scale: str,
    workdir: pathlib.Path,
    configs: pathlib.Path = gin_files.CONFIGS,
    rerun: bool = False,
    retrain: bool = False,
) -> tuple[str, pathlib.Path]:
    """One run of one experiment, found or measured: (status, folder).

    A finished run is printed and not repeated, unless `rerun` or `retrain`. One that was killed,
    stopped or failed is measured again: what it trained is in the cache, and training goes on from
    its checkpoint there. One whose report, or what it made, is gone is measured again too. An
    exception in `main` ends as status failed, an interrupt (SIGINT, SIGTERM) or a closed
    output as stopped.

    Args:
      digests: what `module.digests(config)` says of the data and the base.
      configs: where the experiment's own values lie, over which the report's command sets others.

    Raises:
      ValueError: what the experiment makes has no place where the config wants it; `check_place`.
    """
    path = workdir / name / run_id(name, config, digests)
    again = rerun or retrain
    own = gin_files.own_values(name, module, scale, configs=configs, lenient=True)
    command = settings.command(name, config, own, module=module, scale=scale)
    if workdir != pathlib.Path(registry.WORKDIR):
        command += f" --workdir={shlex.quote(str(workdir))}"

    def told() -> dict[str, Any]:
        mesh = current_mesh()
        return {
            **{f"config.{key}": value for key, value in artifacts.plain(config).items()},
            **{f"digest of {key}": value for key, value in digests.items()},
            "scale": scale,
            "rerun": rerun,
            "retrain": retrain,
            "source code": source_digest(),
            "mesh": mesh and dict(mesh.shape),
        }

    check_same("run", told)

    def shown(found: dict | None) -> str:
        """The first of several processes looks, and all do as it says."""
        looks = is_primary() and not again
        return broadcast(_shown(module, config, path, found, command) if looks else "")

    on_primary(lambda: _check_place(module, config, path))
    found = read_result(path)
    if status := shown(found):
        return status, path
    path.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        held = is_primary() and _hold(path, stack)
        if not broadcast(held):
            logging.error("%s: another process is at this very run; wait for it or stop it", path)
            return "failed", path
        before, found = found, read_result(path)
        # Another process may have finished it just now.
        if status := shown(found if found != before else None):
            return status, path
        return _measure(
            name, module, config, digests, path, found, command, scale=scale, retrain=retrain
        ), path


def _check_place(module: types.ModuleType, config: Any, path: pathlib.Path) -> None:
    if hasattr(module, "check_place"):
        module.check_place(config, path)


def _hold(path: pathlib.Path, stack: contextlib.ExitStack) -> bool:
    """Holds a run's folder, unless another process is at it. Who only looks holds it, too, for an
    instant."""
    for _ in range(5):
        try:
            stack.enter_context(artifacts.lock(path / ".lock", wait=False))
        except BlockingIOError:
            time.sleep(0.05)
        else:
            return True
    return False


def _shown(module, config, path: pathlib.Path, found: dict | None, command: str) -> str:
    """The status of a finished run, which is printed; "" where it has to be measured."""
    if not found or found["status"] != "complete":
        return ""
    try:
        _show_found(module, config, path, found, command)
    except FileNotFoundError as error:
        logging.warning("%s: %s is gone; measuring again", path, error.filename)
        return ""
    except (OSError, ValueError) as error:
        logging.error("%s: %s", path, error)
        return "failed"
    return "complete"


def _measure(name, module, config, digests, path, found, command, *, scale, retrain) -> str:
    """Runs `main` in a folder that this process holds, and says how it ended."""
    unfinished = found is not None and found["status"] != "complete"
    if unfinished:
        how = {"running": "was killed", "stopped": "was stopped", "failed": "failed"}
        logging.info(
            "%s: an earlier try %s%s; measuring again",
            path,
            how[found["status"]],
            f" ({found['error']})" if found["status"] == "failed" else "",
        )
    elif found:
        _keep_previous(path)
    run = Run(
        path=path,
        experiment=name,
        scale=scale,
        seed=config.seed,
        command=command,
        retrain=retrain,
        resume=unfinished and not retrain,
    )
    saved = {
        "experiment": name,
        "config": dataclasses.asdict(config),
        "places": [f.name for f in dataclasses.fields(config) if f.metadata.get("place")],
        "digests": dict(digests),
    }
    artifacts.write_atomically(path / "config.json", json.dumps(saved, indent=1) + "\n")
    artifacts.write_atomically(path / "config.gin", config_gin(name, config))
    run.write_result("running")
    (path / ERROR_FILE).unlink(missing_ok=True)  # an earlier try's
    logging.info("%s: started in %s", name, path)
    begun = time.perf_counter()
    # SIGTERM raises KeyboardInterrupt like SIGINT does; only the main thread may say so.
    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    if in_main_thread:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        module.main(config, run)
        if not run.finished:
            raise RuntimeError(f"{module.__name__}.main returned without run.finish(...)")
    except (KeyboardInterrupt, BrokenPipeError) as stop:
        by = "a signal" if isinstance(stop, KeyboardInterrupt) else "whoever read its output"
        run.write_result("stopped", error=f"stopped by {by}; the same command tries again")
        logging.error("%s: stopped; the same command tries again", path)
        return "stopped"
    except Exception as error:
        run.write_result("failed", error=f"{type(error).__name__}: {error}")
        trace = "".join(traceback.format_exception(error)).encode("utf-8", "backslashreplace")
        artifacts.write_atomically(path / ERROR_FILE, trace.decode())
        if isinstance(error, OF_THE_USER):
            # A KeyError's message is the key alone.
            kind = "KeyError: " if isinstance(error, KeyError) else ""
            said = registry.one_line(f"{kind}{error}").rstrip(".")
            where = f"the traceback is in {path / ERROR_FILE}" if is_primary() else trace.decode()
            print(f"{name} failed: {said}; {where}", file=sys.stderr)
        elif jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError):
            print(
                f"{name} failed: another process of the run ended or cannot be reached; its own "
                "output says why. The same command, in all of them, goes on from the last "
                f"checkpoint ({registry.one_line(str(error))[:200]})",
                file=sys.stderr,
            )
        else:
            logging.exception("%s: failed", path)
        return "failed"
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)
    show_report((path / "report.md").read_text(encoding="utf-8"))
    print(f"{name}: {time.perf_counter() - begun:.0f} s, written to {path}")
    return "complete"


def run_id(name: str, config: Any, digests: Mapping[str, str]) -> str:
    """Hash of the resolved config and of what it reads; where things lie is left out."""
    return artifacts.digest_of({"experiment": name, "config": config, "digests": digests})


def config_gin(name: str, config: Any) -> str:
    """The resolved config as a gin file that makes it again."""
    package, _, module = type(config).__module__.rpartition(".")
    lines = [
        f"# The whole config of one run: molora run --experiment={name} --gin_file=THIS",
        "from __gin__ import dynamic_registration",
        f"from {package} import {module}" if package else f"import {module}",
        "",
    ]
    for field in dataclasses.fields(config):
        lines.append(f"{module}.Config.{field.name} = {getattr(config, field.name)!r}")
    return "\n".join(lines) + "\n"


def _keep_previous(path: pathlib.Path) -> None:
    """Copies a finished run's files into `previous/`, so that they outlive what replaces them."""
    previous = path / "previous"
    shutil.rmtree(previous, ignore_errors=True)
    previous.mkdir()
    for file in path.iterdir():
        if file.is_file() and file.name != ".lock":
            shutil.copy2(file, previous)


def is_finished(module: types.ModuleType, config: Any, path: pathlib.Path) -> bool:
    """Whether the run at `path` needs no measuring; what it made is then handed out."""
    found = read_result(path)
    if not found or found["status"] != "complete":
        return False
    try:
        hand_out(module, config, path)
    except (OSError, ValueError):  # measuring it again says why
        return False
    return True


def hand_out(module: types.ModuleType, config: Any, path: pathlib.Path) -> str:
    """A finished run's report; the experiment puts what it made where the config wants it.

    Raises:
      ValueError: it would replace what is not this run's.
      FileNotFoundError: the report, or what was made, is gone: the run must be measured again.
    """
    report = (path / "report.md").read_text(encoding="utf-8")
    _check_place(module, config, path)
    if hasattr(module, "found"):
        module.found(config, path)
    return report


def _show_found(module, config, path: pathlib.Path, result: dict, command: str) -> None:
    report = hand_out(module, config, path)
    show_report(report)
    # Its files may have lain elsewhere then.
    if command not in map(str.strip, report.splitlines()):
        print(f"As asked now:\n\n    {command}\n")
    made_by = result["environment"]
    if made_by["source"] != source_digest():
        print(f"Other source code made this run ({made_by['source']}, now {source_digest()}).")
    then, now = ((each["jax"], each["device"]) for each in (made_by, environment()))
    if then != now:
        print(
            f"Another environment made this run (JAX {then[0]} on {then[1]}, "
            f"now JAX {now[0]} on {now[1]})."
        )
    print(f"Found in {path}; --rerun measures again, --retrain also trains again.")


if __name__ == "__main__":
    from experiments import comparison
    from molora_jax.ending import leave

    leave(lambda: comparison.main(sys.argv[1:]), comparison.PROG)
