"""The page of errors has texts in the words that they are refused with."""

from pathlib import Path

import pytest

from moetool.calibration.data import check_data
from moetool.errors import InvalidInputError

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("not-there.txt", None, "No such file or folder"),
        ("latin.txt", "Zürich".encode("latin-1"), "is not UTF-8"),
        ("text.jsonl.gz", b"packed", "Cannot tell what"),
    ],
)
def test_texts_that_are_refused(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInputError, match=said):
        check_data(str(tmp_path / name))
    texts = PAGE.read_text(encoding="utf-8").partition("## Texts")[2].partition("## Outputs")[0]
    messages = [row.split("|")[1] for row in texts.splitlines() if row.startswith("|")]
    assert any(said in message for message in messages)
