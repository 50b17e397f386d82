"""Text to windows: what is read, what is tokenised, what is drawn, and what is refused."""

import gzip
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from moetool.calibration import data
from moetool.calibration import windows as cutting
from moetool.calibration.data import DataSpec, check_data, iter_text, parse_data, records
from moetool.calibration.mixing import shared_out
from moetool.calibration.windows import (
    check_vocabulary,
    evaluation_texts,
    evaluation_windows,
    load_tokenizer,
    sample_windows,
    token_stream,
)
from moetool.errors import InvalidInputError, UsageError

WORDS = 1000


@pytest.fixture(scope="module")
def numbers() -> PreTrainedTokenizerBase:
    """One token per number: the text `17 18 19` has the tokens 17, 18 and 19."""
    vocabulary = {str(i): i for i in range(WORDS)} | {"?": WORDS, "<s>": WORDS + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?", bos_token="<s>", model_max_length=4)


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerBase:
    """A byte-level BPE as GPT-2 and its heirs have, that adds a special token where it is allowed to."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([prose(300)], trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", model_max_length=16)


def prose(lines: int) -> str:
    """Text with every kind of line break that a cut might hit: blank lines, indents, trailing blanks."""
    kinds = [
        "The café has {n} cups.\n",
        "  indented {n}\n",
        "\n",
        "trailing {n} \n\n",
        "blank {n} \n",
        "plain {n}\n",
        "x{n} y",
    ]
    return "".join(kinds[n * 3 % 7].format(n=n * n) for n in range(lines))


def count_up(start: int, stop: int) -> str:
    return " ".join(map(str, range(start, stop)))


def write(path: Path, content: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return str(path)


def write_jsonl(path: Path, *records: Any) -> str:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def text_of(name: str) -> str:
    return "".join(iter_text(DataSpec.parse(name)))


# Parsing


def test_parse() -> None:
    assert DataSpec.parse("wikitext") == DataSpec("wikitext")
    assert DataSpec.parse("a/b:c:d:e@0.25") == DataSpec("a/b", "c", "d", "e", 0.25)
    assert DataSpec.parse("a/b::test") == DataSpec("a/b", None, "test")
    assert DataSpec.parse("a:::body") == DataSpec("a", None, None, "body")
    assert DataSpec.parse("name@home") == DataSpec("name@home")
    assert parse_data("a@3, b:c") == (DataSpec("a", weight=3.0), DataSpec("b", "c"))


@pytest.mark.parametrize("text", ["", " ", ":x", "a:b:c:d:e", "a,,b", "a@0", "a@-1", "a@nan", "a@inf"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(UsageError):
        parse_data(text)


def test_paths_with_marks_in_them(tmp_path: Path) -> None:
    odd = write(tmp_path / "a:b@0.5,c.txt", "7")
    assert parse_data(odd) == (DataSpec(odd),)
    colon = write(tmp_path / "a:b@2.txt", "7")
    assert DataSpec.parse(f"{colon}@0.5") == DataSpec(colon, weight=0.5)
    for known in (colon, "bundled", "bundled:code"):
        with pytest.raises(UsageError, match=f"The weight of '{known}' is 'half'; give a positive number"):
            DataSpec.parse(f"{known}@half")
    assert DataSpec.parse(f"{colon}:::body") == DataSpec(colon, column="body")
    with pytest.raises(UsageError, match="no config or split"):
        DataSpec.parse(f"{colon}::train")
    assert text_of(odd) == "7"


# Reading


def test_text_file_is_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = prose(200)
    monkeypatch.setattr(data, "READ_CHARS", 37)
    assert text_of(write(tmp_path / "x.txt", text)) == text


def test_what_windows_puts_before_and_between_lines_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeff1 2\r\n3".encode())
    assert "".join(iter_text(DataSpec(str(tmp_path / "a.txt")))) == "1 2\n3"


def test_records_are_joined_by_an_empty_line(tmp_path: Path) -> None:
    name = write_jsonl(
        tmp_path / "a [1]*.jsonl",
        {"id": 1, "text": "é\n"},
        {"id": 2, "text": None},
        {"id": 3, "text": ""},
        {"id": 4, "text": "z"},
    )
    assert text_of(name) == "é\n\n\n\n\nz"


def test_parquet(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    datasets.Dataset.from_dict({"content": ["a", "b"], "body": ["c", "d"]}).to_parquet(file)
    assert text_of(str(file)) == "a\n\nb"
    assert text_of(f"{file}:::body") == "c\n\nd"
    empty = datasets.Dataset.from_dict({"content": ["a"], "body": ["c"]}).select([])
    empty.to_parquet(tmp_path / "w.parquet")
    assert text_of(str(tmp_path)).strip() == "a\n\nb", "a folder of shards, one of which has no rows"


@pytest.mark.parametrize(
    ("values", "told"), [([1, 2], "int64, not"), ([0.5], "double, not"), ([b"a"], "binary, not"), ([True], "bool, not")]
)
def test_a_parquet_file_without_text_is_told_from_its_footer(tmp_path: Path, values: list[Any], told: str) -> None:
    """As `--dry-run` and a job's beginning look at it."""
    file = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": values, "body": ["a"] * len(values)}), file)
    with pytest.raises(InvalidInputError, match=f"parquet, 'text' holds {told} text"):
        check_data(str(file))
    check_data(f"{file}:::body")
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), file)
    with pytest.raises(InvalidInputError, match="has no text"):
        check_data(str(file))


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"content": "c", "text": "t"}, "t"),
        ({"title": "x", "content": "c"}, "c"),
        ({"completion": " c", "prompt": "p"}, "p c"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, "q\na"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image"}]}]}, "q"),
    ],
)
def test_columns_by_default(tmp_path: Path, record: dict[str, Any], text: str) -> None:
    assert text_of(write_jsonl(tmp_path / "x.jsonl", record)) == text


def test_records_of_different_kinds(tmp_path: Path) -> None:
    messages = {"messages": [{"role": "user", "content": "m"}]}
    assert text_of(write_jsonl(tmp_path / "x.jsonl", {"text": "t"}, messages)) == "t\n\nm"


def test_records_are_what_the_file_says(tmp_path: Path) -> None:
    """No column is made of what only looks like times, and none is asked of every record."""
    mixed = write_jsonl(tmp_path / "x.jsonl", {"text": "2024-01-01"}, {"id": 2}, {"text": "2024-01-02T03:04:05"})
    assert text_of(mixed) == text_of(f"{mixed}:::text") == "2024-01-01\n\n2024-01-02T03:04:05"
    assert text_of(write(tmp_path / "array.jsonl", '\ufeff[{"text": "\\u00e9"},\n {"text": "b"}]')) == "é\n\nb"


def test_folder_in_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "d" / "b.txt", "second")
    write_jsonl(tmp_path / "d" / "c" / "x.jsonl", {"text": "third"})
    write(tmp_path / "d" / "a.txt", "first")
    write(tmp_path / "d" / "README.md", "no")
    write(tmp_path / "d" / ".cache" / "x.txt", "no")
    assert text_of(str(tmp_path / "d")) == "first\n\nsecond\n\nthird"


def test_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def load(**arguments: Any) -> Iterator[dict[str, str]]:
        asked.append(arguments)
        return iter([{"text": "a", "body": "x"}, {"text": "b", "body": "y"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert text_of("owner/name") == "a\n\nb"
    assert text_of("owner/name:small:test:body") == "x\n\ny"
    assert asked == [
        {"path": "owner/name", "name": None, "split": "train", "streaming": True},
        {"path": "owner/name", "name": "small", "split": "test", "streaming": True},
    ]


def test_hub_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(**arguments: Any) -> None:
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub (LocalEntryNotFoundError)\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(InvalidInputError, match=r"'owner/name': Couldn't reach .*\(LocalEntryNotFoundError\)\. Check"):
        text_of("owner/name")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.txt", "No such file or folder: missing.txt"),
        ("./owner/name", "No such file or folder"),
        ("/a/b", "No such file or folder"),
        ("{tmp}/x.csv", r"should end in \.txt, \.jsonl, \.parquet\. If it is plain text, give a copy named x\.txt\."),
        ("{tmp}/x.jsonl.gz", r"should end in \.txt, \.jsonl, \.parquet\. Unpack it\."),
        ("{tmp}/none", r"none has no \.txt, \.jsonl, \.parquet files"),
        ("{tmp}/latin.txt", r"latin.txt is not UTF-8. It holds byte 0xe9 where none can be. Convert it"),
        ("{tmp}/wide.txt", "wide.txt is not UTF-8. It begins as UTF-16 does: iconv -f utf-16"),
        ("{tmp}/packed.txt", "packed.txt is not UTF-8. It is packed: unpack it."),
        ("{tmp}/broken.jsonl", "broken.jsonl, line 3 cannot be read as JSON: Expecting ',' delimiter"),
        ("{tmp}/half.jsonl", "half.jsonl, line 1 cannot be read as JSON: .*surrogates not allowed"),
        ("{tmp}/null.jsonl", r'null.jsonl, line 1 holds null, no object such as {"text": "…"}'),
        ("{tmp}/array.jsonl", "array.jsonl, record 2 holds 3, no object"),
        ("{tmp}/lines.jsonl", r"lines.jsonl, line 1 holds \[1, 2\], no object"),
        ("{tmp}/list.jsonl", r"list.jsonl, record 1: its text has to be text, found \[\"a\", \"b\"\]. .*:::text takes"),
        ("{tmp}/latin.jsonl", "latin.jsonl is not UTF-8"),
        ("{tmp}/short.parquet", r"Cannot read the data .*short.parquet.*: .*\. Is it whole\?"),
        (
            "{tmp}/odd.jsonl",
            "has none of text, .*; it has 'id', 'body'. Rename fields to prompt and completion, or name one",
        ),
        ("{tmp}/odd.jsonl:::text", "no column 'text'; it has 'id', 'body'"),
        ("{tmp}/odd.jsonl:::id", "odd.jsonl, record 1, 'id' holds 5, not text"),
        ("{tmp}/odd.jsonl:::body", """body' holds {"x": 1}, not text"""),
    ],
)
def test_unreadable(tmp_path: Path, name: str, message: str) -> None:
    write(tmp_path / "x.csv", "a,b")
    write(tmp_path / "x.jsonl.gz", "packed")
    write(tmp_path / "none" / "README.md", "")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "wide.txt").write_bytes("é".encode("utf-16"))
    (tmp_path / "packed.txt").write_bytes(gzip.compress(b"text"))
    (tmp_path / "latin.jsonl").write_bytes('{"text": "é"}'.encode("latin-1"))
    write(tmp_path / "broken.jsonl", '{"text": "a"}\n\n{"text": 3x}\n')
    write(tmp_path / "half.jsonl", r'{"text": "\ud800"}')
    write(tmp_path / "null.jsonl", "null\n")
    write(tmp_path / "array.jsonl", '[{"text": "a"},\n3]')
    write(tmp_path / "lines.jsonl", "[1, 2]\n[1, 2]\n")
    write_jsonl(tmp_path / "list.jsonl", {"text": ["a", "b"]})
    assert text_of(f"{tmp_path}/list.jsonl:::text") == "a\nb"
    write(tmp_path / "short.parquet", "PAR1")
    write_jsonl(tmp_path / "odd.jsonl", {"id": 5, "body": {"x": 1}})
    with pytest.raises(InvalidInputError, match=message):
        text_of(name.format(tmp=tmp_path))


def test_a_damaged_parquet_file_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` writes a line of its own before it raises."""
    table = pyarrow.table({"text": [f"{number} " * 20 for number in range(500)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[:4000] + b"\xff" * 4000 + whole[8000:])
    monkeypatch.setattr(logging.getLogger("datasets"), "propagate", True)
    with pytest.raises(InvalidInputError, match="Is it whole"):
        text_of(f"{tmp_path}/a.parquet")
    assert not caplog.records


# Tokenising


def whole(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def stream(tokenizer: PreTrainedTokenizerBase, pieces: list[str], chunk_chars: int) -> list[int]:
    return [token for chunk in token_stream(tokenizer, pieces, chunk_chars) for token in chunk]


def test_text_below_the_limit_is_tokenised_whole(
    bpe: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    text = prose(300)
    pieces = [text[i : i + 13] for i in range(0, len(text), 13)]
    chunks = list(token_stream(bpe, pieces, len(text)))
    assert chunks == [whole(bpe, text)]
    assert bpe.decode(chunks[0]) == text
    assert bpe("The", verbose=False)["input_ids"][0] == bpe.bos_token_id  # which it adds if it may
    assert bpe.bos_token_id not in chunks[0]
    assert not caplog.records  # it is longer than the model's 16 tokens, and nobody asked


@pytest.mark.parametrize("chunk_chars", [200, 333, 1000])
def test_cuts_after_line_breaks_change_no_token(bpe: PreTrainedTokenizerBase, chunk_chars: int) -> None:
    text = prose(300)
    chunks = list(token_stream(bpe, [text], chunk_chars))
    assert len(chunks) >= len(text) // chunk_chars
    assert all(len(bpe.decode(chunk)) <= chunk_chars for chunk in chunks)
    assert [token for chunk in chunks for token in chunk] == whole(bpe, text)


def test_cuts_where_there_is_no_line_break(bpe: PreTrainedTokenizerBase) -> None:
    words = "word " * 100
    assert stream(bpe, [words], 33) == whole(bpe, words)
    solid = "x" * 100
    assert bpe.decode(stream(bpe, [solid[:50], solid[50:]], 33)) == solid
    blank = "\n" * 100
    assert bpe.decode(stream(bpe, [blank], 33)) == blank


def test_no_text_no_tokens(bpe: PreTrainedTokenizerBase) -> None:
    assert list(token_stream(bpe, [])) == []
    assert list(token_stream(bpe, ["", ""])) == []


# Evaluation


def test_evaluation_windows_are_consecutive(tmp_path: Path, numbers: PreTrainedTokenizerBase) -> None:
    name = write(tmp_path / "x.txt", count_up(0, 107))
    windows = evaluation_windows(name, numbers, sequence_length=10)
    assert windows.dtype == torch.int64
    assert torch.equal(windows, torch.arange(100).view(10, 10))
    assert torch.equal(evaluation_windows(name, numbers, sequence_length=10, limit=3), windows[:3])
    assert torch.equal(evaluation_windows(name, numbers, sequence_length=10, limit=99), windows)


def test_evaluation_of_several_sources(tmp_path: Path, numbers: PreTrainedTokenizerBase) -> None:
    one, two = write(tmp_path / "1.txt", count_up(0, 25)), write(tmp_path / "2.txt", count_up(100, 130))
    expected = torch.cat([torch.arange(20), torch.arange(100, 130)]).view(5, 10)
    assert torch.equal(evaluation_windows(f"{one},{two}", numbers, sequence_length=10), expected)
    limited = evaluation_windows(f"{one},{two}", numbers, sequence_length=10, limit=1)
    assert torch.equal(limited, expected[[0, 2]])  # of each text
    found = evaluation_texts(f"{one},{two}", numbers, sequence_length=10)
    assert [text.name for text in found.texts] == [one, two]
    assert [len(text.windows) for text in found.texts] == [2, 3]
    with pytest.raises(UsageError, match="named twice"):
        evaluation_texts(f"{one},{one}", numbers, sequence_length=10)
    with pytest.raises(UsageError, match="@weights"):
        evaluation_windows(f"{one}@2,{two}", numbers, sequence_length=10)


def test_evaluation_reads_no_more_than_its_limit(
    tmp_path: Path, numbers: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write(tmp_path / "x.txt", count_up(0, 200) + "\n" + "\n".join(["5"] * 10_000))
    monkeypatch.setattr(data, "READ_CHARS", 100)
    monkeypatch.setattr(cutting, "WHOLE_TEXT_CHARS", 1000)
    seen: list[str] = []
    real = iter_text

    def recording(spec: DataSpec) -> Iterator[str]:
        for piece in real(spec):
            seen.append(piece)
            yield piece

    monkeypatch.setattr(cutting, "iter_text", recording)
    windows = evaluation_windows(name, numbers, sequence_length=50, limit=2)
    assert torch.equal(windows, torch.arange(100).view(2, 50))
    assert sum(map(len, seen)) < 2000


# Sampling


def test_samples_do_not_overlap(tmp_path: Path, numbers: PreTrainedTokenizerBase) -> None:
    name = write(tmp_path / "x.txt", count_up(0, 1000))
    phases = set()
    for seed in range(20):
        windows = sample_windows(name, numbers, samples=30, sequence_length=20, seed=seed)
        assert windows.shape == (30, 20)
        assert windows.dtype == torch.int64
        assert torch.equal(windows, windows[:, :1] + torch.arange(20))
        assert len(windows.unique()) == 600
        assert len((windows[:, 0] % 20).unique()) == 1
        phases.add(int(windows[0, 0] % 20))
    assert len(phases) > 8


def test_sampling_follows_the_seed_and_nothing_else(tmp_path: Path, numbers: PreTrainedTokenizerBase) -> None:
    name = write(tmp_path / "x.txt", count_up(0, 1000))

    def draw(seed: int) -> torch.Tensor:
        return sample_windows(name, numbers, samples=10, sequence_length=20, seed=seed)

    first = draw(3)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(draw(3), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(draw(4), first)


@pytest.mark.parametrize("tokens", [100, 105, 109])
def test_too_few_windows_gives_all(tmp_path: Path, numbers: PreTrainedTokenizerBase, tokens: int) -> None:
    name = write(tmp_path / "x.txt", count_up(0, tokens))
    for samples in (10, 50):
        for seed in range(10):
            windows = sample_windows(name, numbers, samples=samples, sequence_length=10, seed=seed)
            assert windows.shape == (10, 10)
            assert len(windows.unique()) == 100


def test_every_part_of_the_text_can_be_drawn(tmp_path: Path, numbers: PreTrainedTokenizerBase) -> None:
    name = write(tmp_path / "x.txt", count_up(0, 95))
    seen = torch.cat([sample_windows(name, numbers, samples=3, sequence_length=10, seed=seed) for seed in range(60)])
    assert torch.equal(seen.unique(), torch.arange(95))


def test_a_long_stream_is_read_only_as_far_as_needed(
    tmp_path: Path, numbers: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "RESERVOIR_TOKENS", 100)
    monkeypatch.setattr(cutting, "SAMPLING_CHARS", 50)
    consumed: list[int] = []

    def endless(spec: DataSpec) -> Iterator[str]:
        for i in range(10_000):
            consumed.append(i)
            yield f"{i % WORDS}\n"

    monkeypatch.setattr(cutting, "iter_text", endless)
    windows = sample_windows("owner/name", numbers, samples=2, sequence_length=10, seed=0)
    assert windows.shape == (2, 10)
    assert 320 <= len(consumed) < 400  # 16 × 2 windows of 10
    assert windows.max() < 320
    consumed.clear()
    sample_windows("owner/name", numbers, samples=1, sequence_length=2, seed=0)
    assert 100 <= len(consumed) < 200  # the least that is read


def test_weighted_sources(tmp_path: Path, numbers: PreTrainedTokenizerBase) -> None:
    low, high = write(tmp_path / "1.txt", count_up(0, 500)), write(tmp_path / "2.txt", count_up(500, 1000))
    windows = sample_windows(f"{low}@0.3,{high}@0.7", numbers, samples=10, sequence_length=10, seed=0)
    assert windows.shape == (10, 10)
    assert (windows[:, 0] < 500).sum() == 3
    # A source that is due nothing is not read.
    few = sample_windows(f"{low}@1,missing.txt@0.01", numbers, samples=2, sequence_length=10, seed=0)
    assert (few < 500).all()


@pytest.mark.parametrize(
    ("samples", "weights", "shares"),
    [
        (10, [1.0, 1.0, 1.0], [4, 3, 3]),
        (10, [0.3, 0.7], [3, 7]),
        (1, [0.4, 0.6], [0, 1]),
        (7, [0.5, 0.3, 0.2], [4, 2, 1]),
        (3, [1e-9, 1e9], [0, 3]),
    ],
)
def test_largest_remainder(samples: int, weights: list[float], shares: list[int]) -> None:
    assert shared_out(samples, weights) == shares


# Refusals


@pytest.mark.parametrize(
    ("name", "content"), [("x.txt", ""), ("x.jsonl", ""), ("x.txt", " \n" * 9), ("x.jsonl", '{"text": "\\n"}\n' * 9)]
)
def test_empty_text(tmp_path: Path, numbers: PreTrainedTokenizerBase, name: str, content: str) -> None:
    source = write(tmp_path / name, content)
    with pytest.raises(InvalidInputError, match=rf"{name} has no text\."):
        evaluation_windows(source, numbers, sequence_length=4)
    with pytest.raises(InvalidInputError, match=rf"{name} has no text\."):
        check_data(source)


def test_files_of_a_folder_that_are_not_read_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a.txt", "a")
    assert text_of(str(tmp_path)) == "a"
    assert not caplog.records
    write(tmp_path / ".hidden.md", "x")
    write(tmp_path / "below" / "b.md", "b")
    write(tmp_path / "LICENSE", "c")
    write(tmp_path / "d.jsonl", '{"text": "d"}\n')
    assert text_of(str(tmp_path)) == "a\n\nd"
    assert len(list(records(DataSpec(str(tmp_path))))) == 1
    told, other = caplog.messages
    assert told.endswith("2 of 4 files are skipped (.md, no ending); those in .txt, .jsonl, .parquet are read.")
    assert other.endswith("3 of 4 files are skipped (.md, .txt, no ending); those in .jsonl, .parquet are read.")


def test_short_text_says_how_short(tmp_path: Path, numbers: PreTrainedTokenizerBase) -> None:
    name = write(tmp_path / "x.txt", count_up(0, 57))
    message = r"has 57 tokens; one window needs 58\. .* --sequence-length 57 or less"
    with pytest.raises(InvalidInputError, match=message):
        evaluation_windows(name, numbers, sequence_length=58)
    with pytest.raises(InvalidInputError, match=message):
        sample_windows(name, numbers, samples=1, sequence_length=58, seed=0)
    assert evaluation_windows(name, numbers, sequence_length=57).shape == (1, 57)


def test_numbers_out_of_range(tmp_path: Path, numbers: PreTrainedTokenizerBase) -> None:
    name = write(tmp_path / "x.txt", count_up(0, 57))
    with pytest.raises(UsageError, match="0 samples"):
        sample_windows(name, numbers, samples=0, sequence_length=8, seed=0)
    with pytest.raises(UsageError, match="sequence length of 1"):
        sample_windows(name, numbers, samples=1, sequence_length=1, seed=0)
    with pytest.raises(UsageError, match="sequence length of 1"):
        evaluation_windows(name, numbers, sequence_length=1)
    with pytest.raises(UsageError, match="limit of 0"):
        evaluation_windows(name, numbers, sequence_length=8, limit=0)


def test_names_that_no_file_system_takes_and_folders_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("x" * 5000, "~nobody-of-that-name/x.txt"):
        with pytest.raises(InvalidInputError, match="Cannot read the data"):
            DataSpec.parse(name)
    write(tmp_path / "x.txt", "some text")
    write(tmp_path / ".x.txt", "hidden")
    assert "".join(iter_text(DataSpec(str(tmp_path)))) == "some text"

    def denied(path: object) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(InvalidInputError, match=r"Cannot read the folder .*: Permission denied\."):
        list(iter_text(DataSpec(str(tmp_path))))


def test_check_vocabulary() -> None:
    check_vocabulary(torch.tensor([[0, 31]]), 32)
    check_vocabulary(torch.empty(0, 4, dtype=torch.int64), 32)
    with pytest.raises(InvalidInputError, match="token 32, but the model's vocabulary ends at 31"):
        check_vocabulary(torch.tensor([[0, 32]]), 32)


def test_load_tokenizer(tmp_path: Path, bpe: PreTrainedTokenizerBase) -> None:
    bpe.save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(tmp_path / "model")
    assert whole(loaded, prose(50)) == whole(bpe, prose(50))
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty" / "config.json", '{"model_type": "llama"}')
    with pytest.raises(InvalidInputError, match="No tokenizer in"):
        load_tokenizer(tmp_path / "empty")
    write(tmp_path / "empty" / "tokenizer.json", "{}")
    with pytest.raises(InvalidInputError, match="Cannot load the tokenizer of"):
        load_tokenizer(tmp_path / "empty")
    with pytest.raises(InvalidInputError, match="No such directory"):
        load_tokenizer("./nowhere")
    older = tmp_path / "older"
    older.mkdir()
    write(older / "config.json", '{"model_type": "mixtral"}')
    write(older / "tokenizer_config.json", '{"tokenizer_class": "GPT2Tokenizer"}')
    write(older / "vocab.json", "{}")
    write(older / "merges.txt", "")
    with pytest.raises(InvalidInputError) as refused:
        load_tokenizer(older)
    told = str(refused.value)
    assert "one of: (1) a `tokenizers` library serialization file" in told  # the reason's later lines, too
    assert told.endswith(f"A tokenizer.json in {older} would do: copy that of the original model there.")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    """A text is looked at before it is read: a pipe would give its beginning only once, or nothing for ever."""
    pipe = tmp_path / "text.txt"
    os.mkfifo(pipe)
    with pytest.raises(InvalidInputError, match="no file but a pipe"):
        check_data(str(pipe))
