"""The main job at tiny scale, and the numbers of its report from hand-made evaluations."""

import json

import numpy as np
import pytest

from experiments import compose, compose_report, overhead, results
from experiments import main as command_line
from molora_jax.adapters import Composition
from molora_jax.models import load_base
from molora_jax.training import Evaluation
from molora_jax.training.data import make_batch


def execute(module, workdir, **options):
    name = module.__name__.rpartition(".")[2]
    tiny = command_line.bindings(module, files=[command_line.CONFIGS / "tiny.gin"], shared=True)
    config = module.Config(**tiny)
    status, path = results.execute(
        name, module, config, module.digests(config), scale="tiny", workdir=workdir, **options
    )
    result = json.loads((path / "result.json").read_text())
    assert status == "complete", result["error"]
    return path, result


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compose")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOLORA_CACHE", str(folder / "cache"))
        first = execute(compose, folder / "runs")
        # Steps would be logged again if anything were trained again.
        patch.setattr("molora_jax.training.train_adapter", None)
        patch.setattr("molora_jax.training.train_router", None)
        again = execute(compose, folder / "runs", rerun=True)
    return first, again


def test_every_arm_is_measured_on_every_domain(composed):
    (path, result), _ = composed
    metrics = result["metrics"]
    arms = ["base", "code_only", "math_only", "scripture_only", "chess_only"]
    arms += ["uniform", "oracle", "MoLoRA_k1", "MoLoRA_k2"]
    groups = ["code", "math", "scripture", "chess", "mean", "joined"]
    assert all(metrics[f"loss.{arm}.{group}"] > 0 for arm in arms for group in groups)
    # The oracle gives a domain's own text to its own adapter, which two steps have changed.
    for domain in groups[:4]:
        own = metrics[f"loss.{domain}_only.{domain}"]
        assert metrics[f"loss.oracle.{domain}"] == pytest.approx(own, abs=1e-6)
        assert own != metrics[f"loss.base.{domain}"]
    report = (path / "report.md").read_text()
    assert "own-data label used: closed-form start" in report


def test_a_rerun_with_cached_adapters_measures_the_same(composed):
    (_, first), (_, again) = composed
    assert first["metrics"] == again["metrics"]


def test_the_run_folder_holds_pictures_a_page_and_a_composition(composed):
    (path, _), _ = composed
    for name in ("shares", "layers", "loss", "answer"):
        assert (path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (path / "answer.html").read_text()
    assert "scripture" in page and "chess" in page
    composition = Composition.load(path / "composition", load_base("tiny-random"))
    assert composition.column_names == ("code", "math", "scripture", "chess")
    assert list(composition.column_to_slot) == [0, 1, 2, 3]


def test_overhead_reports_paired_ratios(tmp_path):
    path, result = execute(overhead, tmp_path)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    ratios = sorted(row["routed"] / row["base"] for row in rows)
    assert result["metrics"]["routed_over_base"] == pytest.approx(ratios[len(ratios) // 2])


def measured(**losses) -> compose_report.Measured:
    """Two domains of one row and two joined rows; `losses` gives (4,) row losses of an arm."""
    mask = np.ones((4, 6), bool)
    labels = np.array([[0] * 6, [1] * 6, [0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    windows = make_batch(np.zeros((4, 6), int), mask, mask, labels=labels)
    parts = [windows.rows(slice(0, 1)), windows.rows(slice(1, 2)), windows.rows(slice(2, 4))]
    arms = {
        label.replace("_", " "): Evaluation(
            np.broadcast_to(np.asarray(rows, np.float32)[:, None], (4, 6)), windows.weights
        )
        for label, rows in losses.items()
    }
    return compose_report.Measured(
        names=["a", "b"], heldout=parts, arms=arms, top_k=2, router_reads=""
    )


def test_losses_are_means_of_their_own_rows():
    numbers = measured(base=[1.0, 2.0, 3.0, 5.0])
    assert numbers.loss("base", 0) == 1.0
    assert numbers.mean_loss("base") == 1.5
    assert numbers.joined_loss("base") == 4.0


def test_the_best_adapter_of_each_sequence_is_chosen_row_by_row():
    numbers = measured(
        base=[9.0, 9.0, 9.0, 9.0], a_only=[1.0, 1.0, 2.0, 6.0], b_only=[1.0, 1.0, 7.0, 4.0]
    )
    assert numbers.best_per_sequence() == 3.0  # 2 with a, 4 with b; either alone is 4 or 5.5


def test_windows_come_from_many_documents_and_only_as_many_as_needed():
    class Characters:
        calls = 0

        def encode(self, text):
            self.calls += 1
            return [ord(each) for each in text]

    tokenizer = Characters()
    documents = [f"{letter}" * 500 + "\n" + letter * 500 for letter in "abcdefgh"]
    windows = compose.packed(documents, tokenizer, rows=5, seq_len=16)
    assert windows.tokens.shape == (5, 16) and windows.mask.all()
    assert tokenizer.calls == 3  # two windows of each document
    assert {chr(token) for token in windows.tokens.ravel()} == {"a", "b", "c"}
    with pytest.raises(ValueError, match="give no window of 50000 tokens"):
        compose.packed(documents, tokenizer, rows=5, seq_len=50_000)
