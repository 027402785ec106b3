"""Experiments by flags and settings: `python run.py --help`. See experiments/main.py."""

from experiments.main import start

if __name__ == "__main__":
    start()
