"""Table 8 at tiny, and what is counted as a picture, a puzzle's grid, a loss of its own tokens."""

import itertools
import json

import numpy as np
import pytest

from experiments import interleaved, results
from experiments import main as command_line
from experiments.interleaved_data import (
    GRID,
    MODALITIES,
    PICTURE,
    Layout,
    Picture,
    Writer,
    caption,
    grid_caption,
    to_bits,
    to_codes,
)
from experiments.interleaved_generation import distances, grids_in, pictures_in, shuffled
from experiments.interleaved_losses import Losses
from experiments.interleaved_sources import load_data
from experiments.interleaved_timing import decode_arms, random_problem
from experiments.interleaved_training import own_windows, windows_of
from molora_jax.training import Evaluation
from molora_jax.training.data import make_batch
from tests.helpers import assert_close

LAYOUT = Layout(300)


def letters(text):
    return [ord(each) % 300 for each in text]


WRITER = Writer(LAYOUT, letters, 256)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interleaved")
    tiny = command_line.bindings(
        interleaved, files=[command_line.CONFIGS / "tiny.gin"], shared=True
    )
    config = interleaved.Config(**tiny)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOLORA_CACHE", str(folder / "cache"))
        status, path = results.execute(
            "table8", interleaved, config, interleaved.digests(config), scale="tiny", workdir=folder
        )
    result = json.loads((path / "result.json").read_text())
    assert status == "complete", result["error"]
    return path, result


def test_every_arm_is_measured_and_the_vocabulary_is_the_oracle(ran):
    _, result = ran
    metrics = result["metrics"]
    for arm in ("base", "text_only", "picture_only", "grid_only", "vocabulary"):
        for name in (*MODALITIES, "all_pictures", "all_puzzles", "all_mixed"):
            assert metrics[f"loss.{arm}.{name}"] > 0
    for name in MODALITIES:
        routed = metrics[f"loss.vocabulary.{name}"]
        assert routed == pytest.approx(metrics[f"loss.oracle.{name}"], abs=1e-6)
        assert routed != metrics[f"loss.base.{name}"]
    assert metrics["loss.best_per_token.all_mixed"] < metrics["loss.best_per_sequence.all_mixed"]
    assert metrics["plain_text.added_by_rows"] > 0
    ids = {claim["id"] for claim in result["claims"]}
    assert {"table8.per_token_speedup", "table8.per_sequence", "table8.per_token"} <= ids
    assert all(claim["holds"] is None for claim in result["claims"])


def test_the_run_folder_holds_the_pictures_and_says_what_was_trained(ran):
    path, _ = ran
    for name in ("sheet", "strip", "puzzles", "losses", "loss"):
        assert (path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    report = (path / "report.md").read_text()
    assert "generated stand-ins" in report and "compiled 2 programs" in report
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    phases = {line["phase"] for line in lines}
    assert phases == {"rows", "times", *(f"adapter/{name}" for name in MODALITIES)}


def test_codes_and_bits_are_the_same_picture():
    bits = np.random.default_rng(0).integers(0, 2, (14, 14))
    codes = to_codes(bits)
    assert codes[0] == 8 * bits[0, 0] + 4 * bits[0, 1] + 2 * bits[1, 0] + bits[1, 1]
    np.testing.assert_array_equal(to_bits(codes), bits)
    for wrong in (codes[:-1], [*codes, 0], [16, *codes[1:]]):
        with pytest.raises(ValueError, match="are no picture"):
            to_bits(wrong)


def test_a_caption_says_how_its_picture_looks():
    bits = np.zeros((14, 14), int)
    bits[3:8, 2:12] = 1
    assert caption(Picture(to_codes(bits), "Greek")) == "Greek, wide and dark:"
    assert caption(Picture(np.zeros(49, np.uint8), "Greek")) == "Greek, narrow and light:"
    assert grid_caption("Input", [[4, 0], [0, 2], [2, 2]]) == "Input, 3 by 2, black red yellow:"


def test_only_49_codes_in_marked_rows_are_a_picture():
    codes = np.arange(49) % 16
    whole = LAYOUT.picture_ids(codes)
    begin, end = whole[0], whole[-1]
    assert len(whole) == 57 and end == begin + len(PICTURE) - 1
    assert whole[8] == begin + PICTURE.index("<|pic_row_2|>")
    assert LAYOUT.codes(whole[1:-1]) == codes.tolist()
    short, long = [*whole[:-2], end], [*whole[:-1], whole[5], end]
    word_inside = [*whole[:9], 7, *whole[10:]]
    mark_missing = [*whole[:8], *whole[9:]]
    wrong_mark = [*whole[:8], whole[16], *whole[9:]]
    never_ended = whole[:9]
    wrong = [short, long, word_inside, mark_missing, wrong_mark, never_ended]
    found = pictures_in([5, *whole, 6, *itertools.chain(*wrong), *whole], LAYOUT)
    assert (len(found.pictures), found.malformed, found.cut, found.begun) == (2, 6, 0, 8)
    np.testing.assert_array_equal(found.pictures[0], to_bits(codes))
    cut = pictures_in([*whole, 9, *whole[:30]], LAYOUT)
    assert (len(cut.pictures), cut.malformed, cut.cut) == (1, 0, 1)
    assert pictures_in([*whole[:-1], *whole[1:5]], LAYOUT).malformed == 1  # too long to be cut
    assert pictures_in([end, 5], LAYOUT).begun == 0


def test_only_rows_of_one_length_are_a_grid():
    grid = [[0, 9, 3], [1, 1, 1]]
    ids = LAYOUT.grid_ids(grid)
    assert ids[-1] == LAYOUT.vocab_size - 1 and len(GRID) == 13
    ragged = [ids[0], *ids[2:]]
    empty = [ids[0], ids[-1]]
    word_inside = [*ids[:2], 7, *ids[3:]]
    assert grids_in([4, *ids, 5, *ragged, *empty, *word_inside, *ids[:3]], LAYOUT) == [
        grid, None, None, None,
    ]  # fmt: skip


def test_documents_keep_to_their_length_and_hold_what_they_say():
    data = load_data(source="generated")
    kinds = {
        (0, 1): WRITER.picture_documents(data.train_pictures, 0),
        (0, 2): WRITER.grid_documents(data.train_tasks, 0),
        (0, 1, 2): WRITER.mixed_documents(data.train_pictures, data.train_tasks, 0),
    }
    for modalities, documents in kinds.items():
        documents = list(documents)
        assert len(documents) > 20 and max(map(len, documents)) <= 256
        assert all(set(LAYOUT.modality(each)) == set(modalities) for each in documents)
    again = load_data(source="generated", seed=1)
    assert again.digest != data.digest == load_data(source="generated").digest


def test_own_windows_count_what_follows_the_tokens_of_one_modality():
    data = load_data(source="generated")
    windows = windows_of(WRITER.picture_documents(data.train_pictures, 0), rows=3, seq_len=256)
    parts = [own_windows(windows, LAYOUT, column) for column in range(2)]
    total = sum(part.weights.sum() for part in parts)
    assert total == windows.weights.sum() == windows.mask.sum() - 3
    inside = LAYOUT.modality(windows.tokens) == 1
    np.testing.assert_array_equal(parts[1].labels == 0, inside & windows.mask)
    assert not parts[1].weights[~inside].any()
    assert own_windows(windows, LAYOUT, 2).num_rows == 0


def test_the_real_split_shares_neither_characters_nor_drawers(molora_data):
    data = load_data(source="molora_data")
    assert (len(data.train_pictures), len(data.heldout_pictures)) == (3152, 180)
    held = {each.codes.tobytes() for each in data.heldout_pictures}
    assert not held & {each.codes.tobytes() for each in data.train_pictures}
    assert (len(data.train_tasks), len(data.heldout_tasks)) == (400, 400)


def test_distances_count_cells_and_noise_keeps_the_ink():
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 2, (3, 14, 14))
    flat = pictures.reshape(3, -1)
    expected = (flat[:, None] != flat[None]).sum(axis=2)
    np.testing.assert_array_equal(distances(flat, flat), expected)
    noise = shuffled(pictures, 0)
    np.testing.assert_array_equal(noise.sum(axis=(1, 2)), pictures.sum(axis=(1, 2)))
    assert (noise != pictures).any(axis=(1, 2)).all()


def test_best_in_hindsight_is_of_each_sequence_and_of_each_token():
    mask = np.ones((3, 4), bool)
    windows = make_batch(np.zeros((3, 4), int), mask, mask, labels=np.zeros((3, 4), int))

    def of(*rows):
        return Evaluation(np.array(rows, np.float32), windows.weights)

    arms = {
        "base": of([9, 9, 9, 0], [9, 9, 9, 0], [9, 9, 9, 0]),
        "text only": of([1, 2, 3, 0], [1, 2, 3, 0], [6, 1, 8, 0]),
        "picture only": of([1, 2, 3, 0], [1, 2, 3, 0], [1, 1, 1, 0]),
        "grid only": of([3, 1, 3, 0], [0, 9, 0, 0], [2, 2, 2, 0]),
    }
    losses = Losses(windows=windows, num_rows=(1, 1, 1), arms=arms, plain={})
    assert losses.of_kind("grid only", "pictures") == pytest.approx(7 / 3)
    assert losses.best_per_sequence("pictures") == pytest.approx(2)
    assert losses.best_per_token("pictures") == pytest.approx(5 / 3)
    assert losses.best_per_sequence("puzzles") == pytest.approx(2)
    assert losses.best_per_token("puzzles") == pytest.approx(2 / 3)


def test_full_passes_keep_what_one_routed_pass_computes_for_each_token():
    problem = random_problem(width=64, layers=2, rank=2, rows=4, seq_len=9, dtype="float32", seed=0)
    assert problem.layout.modality(problem.tokens).tolist() == [0, 1, 0, 1]
    arms = decode_arms(problem, room=2)
    out = {name: arms[name]() for name in arms}
    assert_close(out["full_passes"], out["per_token"], terms=64)
    assert_close(out["per_row_bgmv"], out["per_token"], terms=64)
    far = np.abs(np.asarray(out["base"] - out["per_token"])).max(axis=1)
    assert (far > 0.01).all(), "every row has an adapter"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"quality": False}, "leaves no adapters to time"),
        ({"width": 100}, "expected a multiple of 64"),
        ({"seq_len": 64}, "seq_len = 64: expected at least 128"),
        ({"seq_len": 128}, r"buckets = \(16, 272\): the longest must be seq_len"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"picture_steps": 0}, "picture_steps = 0"),
        ({"data": "omniglot"}, "expected one of"),
    ],
)
def test_a_config_that_cannot_be_is_refused(values, said):
    with pytest.raises(ValueError, match=said):
        interleaved.Config(**values)
