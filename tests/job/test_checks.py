"""Where a result may be written, before there is one."""

import os
from pathlib import Path

import pytest

from moetool.errors import ResourceError, UsageError
from moetool.job.checks import output_file


def test_a_file_is_new_or_replaced_in_a_folder_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "old.md").write_text("kept until there is a new one")
    for name in ("new.md", "old.md"):
        assert output_file(tmp_path / name) == tmp_path / name
    assert (tmp_path / "old.md").read_text() == "kept until there is a new one"
    assert [file.name for file in tmp_path.iterdir()] == ["old.md"]
    with pytest.raises(UsageError, match="it is a folder"):
        output_file(tmp_path)
    with pytest.raises(UsageError, match="there is no folder"):
        output_file(tmp_path / "absent" / "new.md")


def test_a_file_that_may_not_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.md").touch()
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may change any
    with pytest.raises(ResourceError, match="may not be changed"):
        output_file(tmp_path / "old.md")


def test_a_pipe_is_left_to_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `/dev/stdout` is, in whose folder nothing can be tried."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: pytest.fail("tried"))
    assert output_file(tmp_path / "pipe") == tmp_path / "pipe"
