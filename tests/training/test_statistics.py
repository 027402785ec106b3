"""Gathering statistics: the base alone reads, own tokens alone count, and it repeats itself."""

import dataclasses
import json

import numpy as np
import pytest

from molora_jax.models import load_base
from molora_jax.routing.statistics import normalize
from molora_jax.training import statistics
from molora_jax.training.data import make_batch
from molora_jax.training.statistics import gather_statistics, self_written

S = 16


@pytest.fixture(scope="module")
def base():
    return load_base("tiny-random")


def windows(seed=0, rows=5, *, short=None):
    tokens = np.random.default_rng(seed).integers(0, 200, (rows, S))
    mask = np.ones(tokens.shape, bool)
    if short is not None:
        mask[0, short:] = False
    return make_batch(tokens, mask, mask)


def test_own_tokens_count_behind_foreign_ones_read_by_the_base(base):
    own = windows(rows=1)
    prefixes = np.full((1, S), 7)
    found = gather_statistics(base, own, num_features=None, prefixes=prefixes)
    assert S // 4 <= found.count <= S - S // 4
    cut = S - found.count
    row = np.concatenate([prefixes[0, :cut], own.tokens[0, : S - cut]])[None]
    out = base.decoder(row, return_layer_inputs=True)
    x = normalize(np.asarray(out.layer_inputs)[2, 0, cut:])
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    np.testing.assert_allclose(found.moments[2], x.T @ x, rtol=1e-3, atol=1e-2)
    alone = base.decoder(own.tokens, return_layer_inputs=True)
    y = normalize(np.asarray(alone.layer_inputs)[2, 0, : S - cut])
    assert np.abs(x[:, :-1] - y).max() > 0.01  # what stands before it matters


def test_padding_does_not_count_and_rows_are_drawn(base):
    prefixes = np.full((1, S), 7)
    whole = gather_statistics(base, windows(), prefixes=prefixes, num_features=8)
    short = gather_statistics(base, windows(short=2), prefixes=prefixes, num_features=8)
    assert 0 < short.count < whole.count
    few = gather_statistics(base, windows(), prefixes=prefixes, num_features=8, max_rows=2)
    assert 2 * (S // 4) <= few.count <= 2 * (S - S // 4)
    np.testing.assert_array_equal(
        few.moments,
        gather_statistics(base, windows(), prefixes=prefixes, num_features=8, max_rows=2).moments,
    )


def test_a_prompt_counts_as_its_answer_does_and_what_cannot_be_read_is_refused(base):
    own, prefixes = windows(), np.full((1, S), 7)
    asked = make_batch(own.tokens, own.mask, np.arange(S)[None] > 12 * own.mask)
    found, whole = (
        gather_statistics(base, each, prefixes=prefixes, num_features=2) for each in (asked, own)
    )
    np.testing.assert_array_equal(found.moments, whole.moments)
    with pytest.raises(ValueError, match="max_rows is 0"):
        gather_statistics(base, own, max_rows=0)
    long = np.ones((1, 4000), int)
    with pytest.raises(ValueError, match="windows of 4000 tokens: base 'tiny-random' has"):
        gather_statistics(base, make_batch(long, long > 0, long > 0))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty one, in memory and on the disk."""
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path))
    monkeypatch.setattr(statistics, "_WRITTEN", {})
    return tmp_path / "foreign_text"


def test_the_base_writes_the_same_foreign_text_for_everybody(base, cache):
    text = self_written(base, length=6, rows=3)
    assert text.shape == (3, 6)
    again = load_base("tiny-random")  # another process, as it were
    again = dataclasses.replace(again, digest="anew")
    np.testing.assert_array_equal(text, self_written(again, length=6, rows=3))
    assert len(list(cache.iterdir())) == 2
    assert len(np.unique(text, axis=0)) == 3
    assert len(np.unique(text)) > 5


def test_foreign_text_is_written_once_for_all_processes(base, cache, monkeypatch):
    text = self_written(base, length=6, rows=3)
    (file,) = cache.iterdir()
    whole = file.read_text()
    foreign = json.loads(whole) | {"key": "of another base"}
    unknown = json.loads(whole) | {"tokens": np.full((3, 6), base.config.vocab_size).tolist()}
    damaged = [whole[:20], "", whole.replace("[[", "[[0, "), '{"tokens": [["a"]]}', "{}"]
    damaged += [json.dumps(foreign), json.dumps(unknown)]
    for kept in [whole, *damaged]:
        file.write_text(kept)
        monkeypatch.setattr(statistics, "_WRITTEN", {})
        if kept == whole:
            with monkeypatch.context() as patch:
                patch.setattr(statistics, "generate", None)
                np.testing.assert_array_equal(text, self_written(base, length=6, rows=3))
        else:
            np.testing.assert_array_equal(text, self_written(base, length=6, rows=3))
        assert file.read_text() == whole


def test_bad_windows_and_prefixes_are_refused(base):
    with pytest.raises(ValueError, match=r"rows of 5 tokens; windows of 16 need 12"):
        gather_statistics(base, windows(), prefixes=np.full((1, 5), 7), num_features=8)
    bad = windows()
    bad.tokens[0, 0] = base.config.vocab_size
    with pytest.raises(ValueError, match=r"windows: tokens\[0, 0\] is token id"):
        gather_statistics(base, bad, num_features=8)


def test_a_cache_that_cannot_be_written_stops_nothing(base, cache, monkeypatch, caplog):
    text = self_written(base, length=6, rows=3)
    (file,) = cache.iterdir()
    file.unlink()
    file.mkdir()
    monkeypatch.setattr(statistics, "_WRITTEN", {})
    np.testing.assert_array_equal(text, self_written(base, length=6, rows=3))
    assert "nothing is kept in the cache" in caplog.text
    assert list(cache.iterdir()) == [file]


def test_windows_as_long_as_the_context_have_foreign_text_too(base, cache):
    small = dataclasses.replace(base, config=dataclasses.replace(base.config, max_positions=24))
    text = self_written(dataclasses.replace(small, digest="short"), length=18, rows=2)
    assert text.shape == (2, 18)


def test_foreign_text_with_ids_that_the_base_lacks_is_refused(base):
    with pytest.raises(ValueError, match=r"prefixes\[0, 0\] is token id 999"):
        gather_statistics(base, windows(), prefixes=np.full((1, S), 999), num_features=8)
