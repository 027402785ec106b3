"""Content types: votes and spans by hand, mixed rows, and the whole at tiny scale."""

import json
import types

import numpy as np
import pytest

from experiments import content_types, content_types_report, results
from experiments import main as command_line
from molora_jax.training.data import make_batch


def test_documents_and_spans_are_decided_by_most_of_their_tokens():
    chosen = np.array([[0, 0, 1, 1, 1], [1, 1, 0, 1, 1], [0, 0, 1, 0, 1]])
    labels = np.array([[0, 0, 0, -1, -1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    routing = types.SimpleNamespace(
        adapter_ids=chosen[None, :, :, None], gates=np.ones((1, 3, 5, 1)), logits=None
    )
    evaluation = types.SimpleNamespace(routing=routing)
    routes = content_types_report.Routes(evaluation, labels, 2, 2)
    assert routes.votes.tolist() == [0, 1]  # padding has no vote: with it the first would be 1
    assert routes.types.tolist() == [0, 1]
    assert routes.spans.tolist() == [[0, 0], [1, 1]]


def test_mixed_rows_change_type_at_every_span_and_skip_the_first_token_of_each():
    config = content_types.Config(eval_len=32, mixed_rows=5, mixed_spans=3)
    full = np.ones((2, 32), bool)
    documents = [make_batch(np.full((2, 32), 7 + at), full, full) for at in range(3)]
    rows = content_types.mixed_rows(documents, config, 0)
    spans = rows.labels[:, :30].reshape(5, 3, 10)
    assert (spans == spans[..., :1]).all()
    assert (spans[:, 1:, 0] != spans[:, :-1, 0]).all()
    assert (rows.tokens[:, :30] == 7 + rows.labels[:, :30]).all()
    assert not rows.mask[:, 30:].any() and (rows.labels[:, 30:] == -1).all()
    assert np.flatnonzero(rows.weights[0, :29] == 0).tolist() == [9, 19]


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="loss_docs = 3: expected at most eval_docs, 2"):
        content_types.Config(eval_docs=2, loss_docs=3)


@pytest.mark.parametrize("experiment", content_types.TYPES)
def test_at_tiny_scale(experiment, tmp_path, monkeypatch):
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    tiny = command_line.bindings(
        content_types, files=[command_line.CONFIGS / "tiny.gin"], shared=True
    )
    config = content_types.Config(**tiny)
    status, path = results.execute(
        experiment, content_types, config, content_types.digests(config), scale="tiny",
        workdir=tmp_path,
    )  # fmt: skip
    result = json.loads((path / "result.json").read_text())
    assert status == "complete", result["error"]
    numbers = {name.removeprefix(f"{experiment}/"): x for name, x in result["metrics"].items()}
    names = content_types.TYPES[experiment]
    for own in names:
        to = [numbers[f"tokens/{own}/to_{name}"] for name in names]
        assert sum(to) == pytest.approx(1.0)
        oracle = numbers[f"val_loss/oracle/{own}"]
        assert oracle == pytest.approx(numbers[f"val_loss/{own}_only/{own}"], abs=1e-6)
    report = (path / "report.md").read_text()
    assert "own-data label used: closed-form start" in report
    assert "inf tokens" not in report
    for name in ("shares.png", "layers.png", "entropy.png", "loss.png", "sample.html"):
        assert (path / name).exists()
