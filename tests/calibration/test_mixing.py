"""Windows of several texts in one calibration set: shares, order, and what each is called."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from moetool.calibration import readable
from moetool.calibration.bundled import kinds
from moetool.calibration.data import parse_data
from moetool.calibration.mixing import MixedSources, TextCounts, most_windows, taking_turns
from moetool.calibration.windows import DrawnWindows, drawn_windows
from moetool.errors import InvalidInputError


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A text of one word, which the bundled one does not have."""
    path = tmp_path / "own.txt"
    path.write_text("zyzzyx " * 4000)
    return path


def mixed(own: Path, tokenizer: PreTrainedTokenizerFast, mix: float, **more: int | bool) -> DrawnWindows:
    options = {"samples": 16, "more": 0, "sequence_length": 32, "seed": 0} | more
    return drawn_windows(str(own), tokenizer, mix=mix, **options)  # type: ignore[arg-type]


def test_windows_take_turns_in_proportion() -> None:
    texts = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    assert texts[taking_turns([4, 2, 1])].tolist() == [0, 1, 0, 2, 0, 1, 0]
    assert taking_turns([3]) == [0, 1, 2]
    assert taking_turns([0, 0]) == []


def test_windows_know_the_source_that_they_are_of(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    low, high = tmp_path / "low.txt", tmp_path / "high.txt"
    low.write_text("a b c d " * 400)
    high.write_text("W X Y Z " * 400)
    data = f"{low}@0.75,{high}@0.25"
    drawn = drawn_windows(data, tiny_tokenizer, samples=8, more=4, sequence_length=16, seed=3)
    assert drawn.kinds == ("low.txt", "high.txt")
    both = zip((drawn.windows, drawn.others), (drawn.of_kind, drawn.others_of_kind), (2, 1), strict=True)
    for windows, of_kind, few in both:
        assert [int("W" in tiny_tokenizer.decode(window)) for window in windows] == of_kind.tolist()
        assert int(of_kind.sum()) == few


def test_files_of_one_name_are_told_apart(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """By numbers: what a card says must not tell where a file lies."""
    sources = [tmp_path / folder / "text.txt" for folder in ("one", "two")]
    for path in sources:
        path.parent.mkdir()
        path.write_text("a b c d " * 400)
    data = ",".join(map(str, sources))
    drawn = drawn_windows(data, tiny_tokenizer, samples=2, more=0, sequence_length=16, seed=0)
    assert drawn.kinds == ("text.txt", "text.txt (2)")


def test_a_folder_that_is_called_as_a_kind(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.txt").write_text("a b c d " * 400)
    drawn = mixed(tmp_path / "code", tiny_tokenizer, 0.5)
    assert drawn.counts.given == {"code (2)": 8}
    assert drawn.counts.bundled["code"] == 1


@pytest.mark.parametrize(("mix", "bundled"), [(0.0, 0), (0.25, 4), (0.5, 8), (0.99, 16)])
def test_a_share_is_bundled(own: Path, tiny_tokenizer: PreTrainedTokenizerFast, mix: float, bundled: int) -> None:
    drawn = mixed(own, tiny_tokenizer, mix, more=8)
    assert drawn.windows.shape == (16, 32)
    assert drawn.others.shape == (8, 32)
    is_own = torch.tensor(["zyzzyx" in tiny_tokenizer.decode(window) for window in drawn.windows])
    assert int(is_own.sum()) == 16 - bundled == drawn.counts.given.get("own.txt", 0)
    assert (torch.tensor([drawn.kinds[kind] == "own.txt" for kind in drawn.of_kind]) == is_own).all()
    assert drawn.remarks == ()


def test_any_beginning_has_both(own: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    drawn = mixed(own, tiny_tokenizer, 0.5, samples=32)
    for few in (8, 16, 24):
        found = Counter(drawn.kinds[kind] for kind in drawn.of_kind[:few])
        assert abs(found["own.txt"] - few / 2) <= few / 4


def test_what_is_given_is_drawn_as_without(own: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """The share takes nothing from the text but its number of windows."""
    own.write_text(" ".join(map(str, range(4000))))
    drawn, alone = mixed(own, tiny_tokenizer, 0.5), mixed(own, tiny_tokenizer, 0, samples=8)
    mine = drawn.windows[drawn.of_kind == drawn.kinds.index("own.txt")]
    assert torch.equal(mine, alone.windows)


def test_nothing_is_added_where_it_is_named(own: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    named = f"{own}@3,bundled:prose"
    with_share, without = (
        drawn_windows(named, tiny_tokenizer, samples=8, more=0, sequence_length=32, seed=0, mix=mix) for mix in (0.5, 0)
    )
    assert torch.equal(with_share.windows, without.windows)
    assert with_share.counts == TextCounts({"own.txt": 6}, {"prose": 2})


def test_a_kind_that_is_named_twice_gives_no_window_twice(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    data = "bundled:mathematics,bundled:mathematics,bundled"
    drawn = drawn_windows(data, tiny_tokenizer, samples=60, more=20, sequence_length=64, seed=0)
    both = [tuple(window) for window in torch.cat([drawn.windows, drawn.others]).tolist()]
    assert len(both) == 80
    assert len(set(both)) == 80


def test_a_tokenizer_that_reads_none_of_it(
    own: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text alone, and that is said; whoever typed the share is refused."""
    monkeypatch.setattr(readable, "readable_text", lambda kinds, tokenizer: readable.ReadableText({}, ("a/b",)))
    drawn = mixed(own, tiny_tokenizer, 0.5, more=4)
    assert torch.equal(drawn.windows, mixed(own, tiny_tokenizer, 0).windows)
    assert drawn.counts.is_of_one_kind
    assert len(drawn.others) == 4
    assert drawn.remarks == ("This tokenizer cuts all of the bundled text into bytes: the given text alone is used.",)
    with pytest.raises(InvalidInputError, match="bytes: give --mix 0"):
        mixed(own, tiny_tokenizer, 0.5, insist=True)
    with pytest.raises(InvalidInputError, match=r"bytes: give another text\.$"):
        drawn_windows("bundled", tiny_tokenizer, samples=2, more=0, sequence_length=32, seed=0)


def test_windows_that_are_longer_than_a_kind(
    own: Path, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kind lacks the others give, what they lack the text itself."""
    read = {"code": "a = 1\n" * 60, "prose": "It was a day of rain.\n" * 40}
    monkeypatch.setattr(readable, "readable_text", lambda kinds, tokenizer: readable.ReadableText(dict(read), ()))
    counted = {kind: len(tiny_tokenizer(text)["input_ids"]) for kind, text in read.items()}
    length = counted["code"] + 1
    there = counted["prose"] // length
    assert there > 0
    drawn = mixed(own, tiny_tokenizer, 0.5, samples=32, sequence_length=length)
    assert len(drawn.windows) == 32
    assert drawn.counts.given == {"own.txt": 32 - there}
    assert drawn.counts.bundled["code"] == 0
    assert drawn.remarks[0].startswith("Kinds of the bundled text of which it can read nothing: dialogue, ")
    assert "code 0 of 2" in drawn.remarks[1]
    assert drawn.remarks[2] == f"The bundled text has {there} windows of this length, not 16."
    long = counted["prose"] + 1
    assert mixed(own, tiny_tokenizer, 0.5, samples=2, sequence_length=long).remarks == (
        "No kind of the bundled text is as long as one window: the given text alone is used.",
    )
    with pytest.raises(InvalidInputError, match="one window: give a smaller --sequence-length, or --mix 0"):
        mixed(own, tiny_tokenizer, 0.5, samples=2, sequence_length=long, insist=True)
    with pytest.raises(InvalidInputError, match=r"one window: give a smaller --sequence-length, or another text"):
        drawn_windows("bundled", tiny_tokenizer, samples=2, more=0, sequence_length=long, seed=0)


@pytest.mark.parametrize(
    ("data", "mix", "says"),
    [
        ("a.txt", 0.5, "64 windows: 32 of a.txt, 32 of the bundled text in 8 kinds"),
        ("a.txt", 0, "64 windows of a.txt"),
        ("a.txt@3,b.txt", 0.25, "64 windows: 36 of a.txt, 12 of b.txt, 16 of the bundled text in 8 kinds"),
        ("bundled", 0.5, "64 windows of the bundled text in 8 kinds"),
        ("bundled:code", 0.5, "64 windows of the bundled text (code)"),
        ("a.txt,bundled:code", 0.5, "64 windows: 32 of a.txt, 32 of the bundled text (code)"),
    ],
)
def test_what_is_due_in_words(data: str, mix: float, says: str) -> None:
    due = MixedSources.of(parse_data(data), 64, mix)
    assert str(due.counts) == says
    assert sum(due.counts.by_kind.values()) == 64
    assert due.counts.is_of_one_kind == (says.count(" of ") == 1 and "kinds" not in says)


def test_fewer_windows_than_kinds() -> None:
    assert str(MixedSources.of(parse_data("a.txt"), 1, 0.5).counts) == "1 window of a.txt"
    few = MixedSources.of(parse_data("a.txt"), 6, 0.5).counts
    assert str(few) == "6 windows: 3 of a.txt, 3 of the bundled text in 3 kinds"
    assert [*few.by_kind] == ["a.txt", *kinds()[:3]]


def test_the_most_windows_that_texts_can_have(own: Path, tmp_path: Path) -> None:
    """Unknown of what is packed or not there; the bundled text counts where it stands beside."""
    size = own.stat().st_size
    assert most_windows(str(own), 32, 0.0) == size // 32
    (tmp_path / "other.jsonl").write_text('{"text": "one"}\n' * 100)
    assert most_windows(f"{tmp_path}@3,{own}", 32, 0.0) == (size + 1600) // 32 + size // 32
    beside = most_windows("bundled", 32, 0.5)
    assert beside is not None
    assert most_windows(str(own), 32, 0.5) == size // 32 + beside
    assert most_windows("self", 32, 0.0) is None
    assert most_windows("owner/on-the-hub", 32, 0.0) is None
    (tmp_path / "other.parquet").touch()
    assert most_windows(str(tmp_path), 32, 0.0) is None
