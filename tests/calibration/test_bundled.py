"""The text that comes with moetool: packed from its sources, licensed, clean, of many kinds."""

import importlib.util
import re
import sys
import unicodedata
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from moetool.calibration.bundled import PACKED, kinds, pieces, texts
from moetool.errors import UsageError

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "scripts" / "text"
LICENSES = {"public domain", "CC0", "Unlicense", "0BSD", "WTFPL", "MIT-0", "written for moetool"}
SMALL = {"mathematics", "structured"}  # kinds of 80 kB and more; the others are of 150 kB and more
LANGUAGES = ["arabic", "chinese", "french", "german", "hindi", "italian", "japanese"]
LANGUAGES += ["portuguese", "russian", "spanish"]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"text_{name}", SOURCES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def size(kind: str, prefix: str = "") -> int:
    return sum(len(piece.text.encode()) for piece in pieces() if piece.kind == kind and piece.name.startswith(prefix))


def test_the_packed_file_is_made_of_the_sources():
    assert script("pack").read_sources() == [list(piece) for piece in pieces()], "run `make text`"


def test_packing_gives_the_same_bytes_twice():
    pack = script("pack").pack
    assert pack([["a", "b", "c\n"]]) == pack([["a", "b", "c\n"]])


def test_it_is_small_enough_to_ship():
    assert PACKED.stat().st_size < 1_200_000


def test_every_source_has_a_row_with_a_license_that_asks_for_nothing():
    rows = re.findall(r"^\| (\S+\.txt) \| (.+) \| (.+) \| (.+) \|$", (SOURCES / "SOURCES.md").read_text(), re.MULTILINE)
    assert [name for name, *_ in rows] == [f"{piece.kind}/{piece.name}.txt" for piece in pieces()]
    assert {license for _, _, license, _ in rows} <= LICENSES


def test_every_kind_and_language_has_its_size():
    assert set(kinds()) == {
        "code",
        "dialogue",
        "documentation",
        "encyclopedic",
        "languages",
        "mathematics",
        "prose",
        "structured",
    }
    assert not {kind: size(kind) for kind in kinds() if size(kind) < (80_000 if kind in SMALL else 150_000)}
    assert not {name: size("languages", name) for name in LANGUAGES if size("languages", name) < 25_000}


def test_code_is_of_many_languages():
    found = {piece.name.split("-")[0] for piece in pieces() if piece.kind == "code"}
    assert found >= {"python", "c", "javascript", "java", "go", "rust", "shell", "sql"}


@pytest.mark.parametrize("kind", kinds())
def test_text_is_clean(kind):
    for piece in pieces():
        if piece.kind == kind:
            odd = Counter(c for c in piece.text if unicodedata.category(c) in {"Cc", "Co", "Cn", "Cs"}) - Counter(
                dict.fromkeys("\n\t", sys.maxsize)
            )
            assert not odd, piece.name
            assert unicodedata.is_normalized("NFC", piece.text), piece.name
            assert "\N{REPLACEMENT CHARACTER}" not in piece.text, piece.name
            assert piece.text.endswith("\n"), piece.name
            assert piece.text.strip() + "\n" == piece.text.lstrip(), piece.name
            assert max(map(len, piece.text.splitlines())) < 5_000, piece.name


def test_nothing_is_there_twice():
    whole = Counter(piece.text for piece in pieces())
    assert whole.most_common(1)[0][1] == 1


def test_texts_are_those_of_one_kind_in_order():
    assert texts("code") == [piece.text for piece in pieces() if piece.kind == "code"]
    assert list(kinds()) == sorted(kinds())


def test_an_unknown_kind_is_named_with_the_nearest():
    with pytest.raises(UsageError, match=r"has no kind 'cod': .*\. Did you mean code\?"):
        texts("cod")


def test_an_overlap_is_found_and_only_that(tmp_path, capsys, monkeypatch):
    overlap = script("overlap")
    here = " ".join(overlap.words_of(texts("prose")[0])[100:113])
    (tmp_path / "same.txt").write_text(f"Said he: {here.upper()}!")
    (tmp_path / "other.txt").write_text(f"{here.rsplit(' ', 1)[0]} zebra")
    monkeypatch.setattr(sys, "argv", ["overlap.py", str(tmp_path / "other.txt")])
    assert overlap.main() == 0
    monkeypatch.setattr(sys, "argv", ["overlap.py", str(tmp_path / "same.txt")])
    assert overlap.main() == 1
    assert "same.txt: 15 words, 1 common runs" in capsys.readouterr().out


def test_the_page_has_the_sizes_of_today():
    page = (ROOT / "docs" / "bundled-text.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    today = [(kind, str(len(texts(kind))), str(round(size(kind) / 1000))) for kind in kinds()]
    assert rows == today, "docs/bundled-text.md: take the rows that `make text` prints"
