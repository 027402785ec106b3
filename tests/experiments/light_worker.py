"""A run without JAX, as a sweep's worker: what it does at each try is in a list.

python light_worker.py FOLDER '["hang", "done"]' begins FOLDER's run as experiments.results does,
then hangs at the first try and is done at the second; the last entry holds for all that follow.
"""

import fcntl
import json
import os
import pathlib
import signal
import sys
import time

RESULT = {"experiment": "light", "scale": "tiny", "seed": 0, "metrics": {}}


def main(folder: pathlib.Path, tries: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another process is at this very run")
        return 1
    with (folder / "tries").open("a") as file:
        file.write(f"{os.getpid()}\n")
    number = len((folder / "tries").read_text().splitlines()) - 1
    what = tries[min(number, len(tries) - 1)]
    write(folder, status="running")
    saved = {"experiment": "light", "config": {"name": folder.name}, "digests": {}}
    (folder / "config.json").write_text(json.dumps(saved))
    if what == "misuse":
        print("run.py: nothing can be read")
        return 2
    if what == "grow":
        grown = []
        for _ in range(50):  # to 1 GB, should nobody mind
            grown.append(b"x" * 20_000_000)
            time.sleep(0.02)
        time.sleep(5)
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif what == "hang":
        signal.signal(signal.SIGTERM, lambda *_: stopped(folder))
        signal.signal(signal.SIGUSR2, lambda *_: (folder / "heard").touch())
    if what in ("hang", "deaf"):
        (folder / "hanging").write_text(str(os.getpid()))
        time.sleep(60)
    if what == "silent":
        return 0
    if what.endswith("Error"):
        write(folder, status="failed", error=f"{what}: as it was told")
        return 1
    write(folder, status="complete", metrics={"loss": float(number)})
    return 0


def stopped(folder: pathlib.Path) -> None:
    write(folder, status="stopped")
    sys.exit(1)


def write(folder: pathlib.Path, **more: object) -> None:
    (folder / "half").write_text(json.dumps({**RESULT, **more}))
    os.replace(folder / "half", folder / "result.json")


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])))
