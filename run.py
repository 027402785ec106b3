"""Experiments by flags and settings: `python run.py --help`. See experiments/main.py."""

from absl import app

from experiments.main import main, parse_flags

if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
