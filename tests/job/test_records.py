"""What lies beside the weights is looked at before a job begins."""

import shutil
from pathlib import Path

import pytest

from moetool.checkpoint.names import TOKENIZER
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError
from moetool.job.job import Source
from moetool.job.records import check_records


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b'{"model": {', "not valid JSON"), (b"version https://git-lfs", "not valid JSON"), (b"{}", "no 'model'")],
)
def test_a_broken_tokenizer_is_found_without_a_text(
    tiny_mixtral: Path, tmp_path: Path, content: bytes, problem: str
) -> None:
    shutil.copytree(tiny_mixtral, tmp_path / "model")
    source = Source.of(Checkpoint.open(tmp_path / "model"))
    (tmp_path / "model" / TOKENIZER).unlink(missing_ok=True)
    check_records(source)
    (tmp_path / "model" / TOKENIZER).write_bytes(content)
    with pytest.raises(InvalidInputError, match=problem):
        check_records(source)
