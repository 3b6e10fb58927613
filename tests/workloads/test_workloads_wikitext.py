"""Words, their numbers and the rows they are cut into; and that nothing is lost or counted twice on the way."""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lone_worker import train_alone
from torch import nn

from rex_ray.core.errors import ConfigError
from workloads.wikitext import MODELS, NO_WORD, TextRows, load_parts, perplexity, sum_of_losses, train_loop
from workloads.wikitext_files import END, UNKNOWN, Vocabulary, find_text, read_words, unpack

SHARED = Path(__file__).parents[3] / "shared" / "data"
TINY = {"width": 16, "num_layers": 1, "dropout": 0.0}


def write_text(folder: Path, part: str, num_lines: int, name: str = "wiki.{}.tokens") -> str:
    """Lines that count round and round: after each word only one can follow."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(" one two three four five six seven \n" for _ in range(num_lines))
    (folder / name.format(part)).write_text(text)
    return text


def test_lines_end_with_a_word_of_their_own_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "text"
    # The second line holds a separator that str.splitlines would cut at; the third is empty.
    path.write_text(" a <unk> , \n b\u2028 c \n \n d \n", encoding="utf-8")
    assert read_words(path) == ["a", "<unk>", ",", END, "b", "c", END, END, "d", END]


@pytest.mark.parametrize("name", ["wiki.{}.tokens", "{}.txt", "wikitext2_{}.txt"])
@pytest.mark.parametrize("below", ["", "wikitext-2"])
def test_files_are_found_under_the_names_they_are_passed_around_by(tmp_path: Path, name: str, below: str) -> None:
    write_text(tmp_path / below, "valid", 1, name)
    assert find_text(tmp_path, "valid") == tmp_path / below / name.format("valid")
    with pytest.raises(ConfigError, match=r"no wiki\.train\.tokens .*every node"):
        find_text(tmp_path, "train")


@pytest.mark.parametrize(("content", "message"), [(b"\xff\xfe\x00", "no UTF-8 text"), (b" \n \n", "holds no words")])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"train.txt.*{message}"):
        read_words(path)


@given(st.lists(st.sampled_from("abcdef"), min_size=1), st.lists(st.sampled_from("abcdefgh"), min_size=1))
def test_numbers_are_in_range_follow_frequency_and_lead_back_to_known_words(known: list[str], asked: list[str]) -> None:
    vocabulary = Vocabulary.of(known)
    counts = [known.count(word) for word in vocabulary.words]
    assert counts == sorted(counts, reverse=True)
    assert {UNKNOWN, END} < {*vocabulary.words}
    back = [vocabulary.words[k] for k in vocabulary.encode(asked)]
    assert back == [word if word in known else UNKNOWN for word in asked]
    assert Vocabulary.of(known[::-1]) == vocabulary


@given(num_words=st.integers(2, 60), length=st.integers(1, 20))
def test_every_word_but_the_first_is_asked_for_once_after_the_word_before_it(num_words: int, length: int) -> None:
    rows = TextRows(np.arange(num_words), length)
    pairs = [
        (int(word), int(target))
        for inputs, targets in rows
        for word, target in zip(inputs, targets, strict=True)
        if target != NO_WORD
    ]
    assert pairs == [(k, k + 1) for k in range(num_words - 1)]
    assert all(inputs.shape == targets.shape == (length,) for inputs, targets in rows)


def test_a_text_without_a_word_to_predict_is_refused() -> None:
    with pytest.raises(ConfigError, match="text of 1 words"):
        TextRows(np.array([3]), 4)
    with pytest.raises(ConfigError, match="got length 0"):
        TextRows(np.arange(5), 0)


def test_words_of_the_other_part_that_training_never_saw_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "valid.txt").write_text("a b a c\n")
    (tmp_path / "test.txt").write_text("a d\n")
    _, eval_set, num_words = load_parts(tmp_path, "valid", "test", 4)
    vocabulary = Vocabulary.of(["a", "b", "a", "c", END])
    assert num_words == len(vocabulary) == 5
    inputs, targets = eval_set[0]
    assert [vocabulary.words[k] for k in inputs[:2]] == ["a", UNKNOWN]
    assert [vocabulary.words[k] for k in targets[:2]] == [UNKNOWN, END]


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_scores_every_word_and_sees_none_of_what_follows(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name](11, TINY).eval()
    words = torch.randint(0, 11, (3, 6))
    changed = words.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = model(words), model(changed)
    assert before.shape == (3, 6, 11)
    assert torch.allclose(before[:, :4], after[:, :4], atol=1e-5)
    assert not torch.allclose(before[:, 4:], after[:, 4:], atol=1e-3)
    assert model.decoder.weight is model.embedding.weight


class Uniform(nn.Module):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*words.shape, 7)


@given(num_words=st.integers(2, 40), local_batch_size=st.integers(1, 5))
def test_a_model_that_knows_nothing_is_as_perplexed_as_there_are_words(num_words: int, local_batch_size: int) -> None:
    rows = TextRows(np.arange(num_words) % 7, 6)
    model = Uniform()
    nats, count = sum_of_losses(model, torch.utils.data.DataLoader(rows, batch_size=local_batch_size))
    assert count == num_words - 1
    assert perplexity(nats / count) == pytest.approx(7.0, rel=1e-6)
    assert model.training


def test_a_loss_beyond_all_bounds_ends_no_training() -> None:
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_only_the_published_archive_is_unpacked(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as files:
        for part in ("train", "valid", "test"):
            files.writestr(f"wikitext-2/wiki.{part}.tokens", f" {part} text \n")
    archive = packed.getvalue()
    with pytest.raises(ConfigError, match="not 0123; fetch WikiText-2 elsewhere"):
        unpack(archive, tmp_path, "0123")
    assert list(tmp_path.iterdir()) == []
    unpack(archive, tmp_path, hashlib.sha256(archive).hexdigest())
    assert read_words(find_text(tmp_path, "test")) == ["test", "text", END]


@pytest.mark.parametrize("name", list(MODELS))
def test_the_loop_learns_to_count_on_one_worker_without_ray(tmp_path: Path, name: str) -> None:
    """41 rows, the last one short; eight words that follow one another, so a perplexity of 1 is attainable."""
    for part, num_lines in (("train", 40), ("valid", 9)):
        write_text(tmp_path, part, num_lines)
    config = {"data_dir": str(tmp_path), "train_part": "train", "eval_part": "valid", "length": 8, "model": name}
    config |= {**TINY, "num_epochs": 6, "learning_rate": 0.03, "loader_processes": 0, "seed": 0}
    metrics = train_alone(train_loop, config, global_batch_size=4, weight_by="tokens")
    perplexities = [each["perplexity"] for each in metrics]
    assert len(perplexities) == 6
    assert perplexities[-1] < 1.3 < perplexities[0]


@pytest.mark.skipif(not (SHARED / "wikitext2_test.txt").is_file(), reason="needs the real text in ../shared/data")
@pytest.mark.parametrize(("part", "num_words"), [("valid", 217_646), ("test", 245_569)])
def test_the_real_text_has_its_published_number_of_words(part: str, num_words: int) -> None:
    assert len(read_words(find_text(SHARED, part))) == num_words
