"""The command line of the toy experiment alone: `python -m tests.experiments.toy_program`."""

import sys

from experiments import main as run
from experiments import registry

ENTRIES = {"toy": registry.Experiment(module="tests.experiments.toy", summary="a toy")}
PROGRAM = (sys.executable, "-m", "tests.experiments.toy_program")


def main(argv: list[str]) -> int:
    """`molora run`'s own, with the toy for its only experiment."""
    return run.main(argv, entries=ENTRIES, started_with=PROGRAM)


if __name__ == "__main__":
    run.start(main)
