"""Windows: packing loses nothing, the order is a function of the step, joins carry their labels."""

import numpy as np
import pytest

from molora_jax.training import data


def numbered(start: int, windows: int, seq_len: int = 8) -> data.Batch:
    """Windows whose every token is unique, so that a token says where it came from."""
    tokens = start + np.arange(windows * seq_len).reshape(windows, seq_len)
    return data.make_batch(tokens, np.ones_like(tokens, bool), np.ones_like(tokens, bool))


def test_pack_keeps_every_token_in_order_and_pads_the_rest():
    documents = [[5, 6, 7], [8], [], [9, 10, 11, 12]]
    windows = data.pack(documents, seq_len=5, separator=2)
    assert windows.tokens[windows.mask].tolist() == [5, 6, 7, 2, 8, 2, 2, 9, 10, 11, 12, 2]
    assert windows.tokens.shape == (3, 5)
    # A weight stands where the next token of the window is real.
    np.testing.assert_array_equal(windows.weights[0], [1, 1, 1, 1, 0])
    np.testing.assert_array_equal(windows.weights[2], [1, 0, 0, 0, 0])
    assert (windows.labels == -1).all()


def test_pack_drops_a_rest_that_predicts_nothing():
    windows = data.pack([[1, 2, 3, 4, 5]], seq_len=4, separator=None)
    assert windows.tokens.tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("documents", [[], [[]], [[7]]])
def test_pack_refuses_text_that_predicts_nothing(documents):
    with pytest.raises(ValueError, match="fewer than 2"):
        data.pack(documents, seq_len=4, separator=None)


def test_order_visits_every_window_once_an_epoch_and_depends_on_the_step_alone():
    windows = numbered(0, windows=7)
    order = data.BatchOrder(windows, batch_size=3, seed=1)
    rows = np.concatenate([order(step).tokens[:, 0] // 8 for step in range(7)])
    for epoch in rows.reshape(3, 7):
        assert sorted(epoch.tolist()) == list(range(7))
    assert rows[:7].tolist() != rows[7:14].tolist(), "each epoch has its own order"
    late = data.BatchOrder(windows, batch_size=3, seed=1)(5)
    np.testing.assert_array_equal(late.tokens, order(5).tokens)
    other = data.BatchOrder(windows, batch_size=7, seed=2)(0)
    assert other.tokens[:, 0].tolist() != rows[:7].tolist()


@pytest.mark.parametrize("split", ["half", "random"])
def test_joined_rows_change_domain_once_with_labels_by_token(split):
    domains = [numbered(1000 * d, windows=4).labelled(d) for d in range(3)]
    joined = data.joined_windows(domains, 12, seed=0, split=split)
    np.testing.assert_array_equal(joined.labels, joined.tokens // 1000)
    pairs = []
    for labels, weights in zip(joined.labels, joined.weights, strict=True):
        changes = np.flatnonzero(np.diff(labels))
        assert len(changes) == 1
        assert 2 <= changes[0] + 1 <= 6
        if split == "half":
            assert changes[0] + 1 == 4
        assert weights[changes[0]] == 0, "the first token after a change is no target"
        assert weights.sum() == 6
        pairs.append((labels[0], labels[-1]))
    assert len(set(pairs)) == 6
    assert all(pairs.count(pair) == 2 for pair in pairs)
    again = data.joined_windows(domains, 12, seed=0, split=split)
    np.testing.assert_array_equal(joined.tokens, again.tokens)
    other = data.joined_windows(domains, 12, seed=1, split=split)
    assert (joined.tokens != other.tokens).any()


def test_joined_rows_hold_no_padding_and_need_windows_without_it():
    padded = data.pack([list(range(1, 8))], seq_len=8, separator=None).labelled(0)
    with pytest.raises(ValueError, match=r"domain 0 has no window without padding.*joined_share=0"):
        data.joined_windows([padded, numbered(1000, 2).labelled(1)], 2, seed=0)
    with pytest.raises(ValueError, match="two domains"):
        data.joined_windows([numbered(0, 2)], 2, seed=0)


def test_labels_and_concatenation_leave_padding_unlabelled():
    padded = data.pack([[4, 5, 6]], seq_len=4, separator=None).labelled(3)
    assert padded.labels.tolist() == [[3, 3, 3, -1]]
    both = data.concatenate([padded, numbered(0, 2, seq_len=4)])
    assert both.num_rows == 3
    with pytest.raises(ValueError, match=r"lengths \[4, 8\]"):
        data.concatenate([padded, numbered(0, 1)])


def test_documents_are_held_out_whole_and_at_least_one_on_each_side():
    train, held_out = data.split_documents(list("abcdefghij"), held_out_share=0.3, seed=0)
    assert sorted(train + held_out) == list("abcdefghij")
    assert len(held_out) == 3
    train, held_out = data.split_documents(["a", "b"], held_out_share=0.01)
    assert len(train) == len(held_out) == 1
    with pytest.raises(ValueError, match="two or more"):
        data.split_documents(["a"], held_out_share=0.5)
