"""What `moetool compare` says to type next."""

from pathlib import Path

import pytest

from moetool.cli.commands.compare import WORDS, best, markdown, tables
from moetool.cli.generate import build_options
from moetool.compare.candidates import candidates
from moetool.compare.options import CompareOptions
from moetool.compare.results import Compared, ComparedModel


def compared(*rows: tuple[str, str | None, float | None, float | None]) -> Compared:
    every = [
        ComparedModel(name=name, method=method, asked=asked, kl=kl, path=f"there/{name}")
        for name, method, asked, kl in rows
    ]
    return Compared(
        model="far/original", data="held-out.txt", bytes=1, perplexity=1, nll=0, windows=1, tokens=1, sequence_length=2,
        begin=None, rows=every,
    )  # fmt: skip


def test_the_best_row_of_the_largest_ratio_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options it was compared with, those that are the same by default left out."""
    monkeypatch.chdir(tmp_path)
    options = CompareOptions.model_validate(
        {
            "methods": "d2moe,inc=hybrid", "ratios": "0.4,0.85", "calibration": "a.txt", "samples": 64, "data": "b.txt",
            "option": ["inc:trellis=true", "inc:include=attention,embeddings"],
        }
    )  # fmt: skip
    wanted = candidates(options, build_options)
    rows = [("d2moe", "d2moe", 0.4, 0.001), ("inc", "hybrid", 0.4, 0.002), ("inc", "hybrid", 0.85, 0.01)]
    words = best(compared(*rows, ("d2moe", "d2moe", 0.85, 0.3)), wanted)
    assert words[:5] == ["compress", "far/original", "original-inc-85", "--method", "hybrid"]
    given = dict(zip([word for word in words[5:] if word != "--trellis"][::2],
                     [word for word in words[5:] if word != "--trellis"][1::2], strict=True))  # fmt: skip
    assert "--trellis" in words
    assert given == {
        "--ratio": "0.85", "--calibration": "a.txt", "--samples": "64", "--include": "attention,embeddings"
    }  # fmt: skip
    assert best(compared(("there", None, None, 0.1)), []) == ["report", "there/there"]


def test_nothing_that_was_made_is_no_table() -> None:
    assert tables(compared()) == []
    assert WORDS not in markdown(compared())
    assert len(tables(compared(("d2moe", "d2moe", 0.4, 0.001)))) == 1
    assert WORDS in markdown(compared(("d2moe", "d2moe", 0.4, 0.001)))
