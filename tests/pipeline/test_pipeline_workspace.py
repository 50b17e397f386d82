"""The output directory of a job: what is refused, what is resumed, what survives a crash."""

import json
import shutil
from pathlib import Path

import pytest

from moetool.errors import UsageError
from moetool.pipeline.workspace import WORK_DIRECTORY, Workspace


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "output"


def finished(output: Path) -> Path:
    """A directory as a finished job leaves it."""
    Workspace(output, "f").close()
    (output / "moetool.json").write_text("{}")
    return output


def stranger(output: Path) -> Path:
    """A directory that is none of ours."""
    output.mkdir(parents=True)
    (output / "thesis.tex").write_text("precious")
    return output


def journal(output: Path) -> Path:
    return output / WORK_DIRECTORY / "journal.jsonl"


def test_a_new_directory(output: Path) -> None:
    workspace = Workspace(output, "f")
    assert workspace.work.is_dir()
    assert not workspace.is_resumed
    assert not workspace.is_done("a")
    workspace.close()
    assert list(output.iterdir()) == []


def test_an_empty_directory_will_do(output: Path) -> None:
    output.mkdir(parents=True)
    assert Workspace(output, "f").work.is_dir()


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_run_may_say_resume(output: Path, resume: bool) -> None:
    """So that a batch script can always say it."""
    assert not Workspace(output, "f", resume=resume).is_resumed


def test_resuming_knows_what_is_done(output: Path) -> None:
    first = Workspace(output, "f")
    for unit in ("embed", "forward/0", "naïve \n unit"):
        assert not first.is_done(unit)
        first.done(unit)
        assert first.is_done(unit)
    second = Workspace(output, "f", resume=True)
    assert second.is_resumed
    assert all(second.is_done(unit) for unit in ("embed", "forward/0", "naïve \n unit"))
    assert not second.is_done("forward/1")


def test_a_file_is_not_a_directory(output: Path) -> None:
    output.parent.mkdir()
    output.touch()
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UsageError, match="exists and is not a directory"):
            Workspace(output, "f", **options)
    assert output.read_bytes() == b""


def test_a_non_empty_directory_is_refused(output: Path) -> None:
    stranger(output)
    with pytest.raises(UsageError, match="is not empty"):
        Workspace(output, "f")
    assert [path.name for path in output.iterdir()] == ["thesis.tex"]


def test_an_unfinished_run_is_refused_and_resuming_is_suggested(output: Path) -> None:
    Workspace(output, "f").done("a")
    with pytest.raises(UsageError, match="holds an unfinished run: --resume goes on with it"):
        Workspace(output, "f")
    assert Workspace(output, "f", resume=True).is_done("a")


def test_a_finished_run_is_refused(output: Path) -> None:
    finished(output)
    with pytest.raises(UsageError, match="--overwrite deletes what is there") as caught:
        Workspace(output, "f")
    assert "--resume" not in str(caught.value)
    with pytest.raises(UsageError, match="is finished: there is nothing to resume"):
        Workspace(output, "f", resume=True)


def test_somebody_elses_directory_is_not_resumed(output: Path) -> None:
    stranger(output)
    with pytest.raises(UsageError, match="nothing to resume"):
        Workspace(output, "f", resume=True)
    assert [path.name for path in output.iterdir()] == ["thesis.tex"]


def test_somebody_elses_directory_is_not_overwritten(output: Path) -> None:
    stranger(output)
    with pytest.raises(UsageError, match="was not written by moetool"):
        Workspace(output, "f", overwrite=True)
    assert (output / "thesis.tex").read_text() == "precious"


def test_overwrite_throws_away_a_finished_run(output: Path) -> None:
    finished(output)
    workspace = Workspace(output, "other", overwrite=True)
    assert [path.name for path in output.iterdir()] == [WORK_DIRECTORY]
    assert not workspace.is_resumed


def test_overwrite_throws_away_an_unfinished_run(output: Path) -> None:
    Workspace(output, "f").done("a")
    workspace = Workspace(output, "other", overwrite=True)
    assert not workspace.is_done("a")
    assert Workspace(output, "other", resume=True)


def test_resume_and_overwrite_contradict_each_other(output: Path) -> None:
    with pytest.raises(UsageError, match="give one of them"):
        Workspace(output, "f", resume=True, overwrite=True)
    assert not output.exists()


def test_other_settings_are_not_resumed(output: Path) -> None:
    Workspace(output, "f").done("a")
    with pytest.raises(UsageError, match="started with other settings or another input"):
        Workspace(output, "g", resume=True)
    assert Workspace(output, "f", resume=True).is_done("a")


LINE = len('{"unit": "b"}\n')


@pytest.mark.parametrize("cut", range(1, LINE))
def test_a_half_written_line_is_not_done(output: Path, cut: int) -> None:
    """Killed in the middle of a write: what was noted before stays, and so does everything noted afterwards."""
    first = Workspace(output, "f")
    first.done("a")
    first.done("b")
    whole = journal(output).read_bytes()
    assert len(whole) == 2 * LINE
    journal(output).write_bytes(whole[:-cut])
    second = Workspace(output, "f", resume=True)
    assert second.is_done("a")
    assert second.is_done("b") == (cut == 1)  # a line that lacks no more than its end is a whole one
    second.done("c")
    second.done("d")
    third = Workspace(output, "f", resume=True)
    assert [third.is_done(unit) for unit in "abcd"] == [True, cut == 1, True, True]


@pytest.mark.parametrize("line", ["", "[]", "3", "null", '{"other": "a"}', '{"unit"'])
def test_lines_that_say_nothing(output: Path, line: str) -> None:
    Workspace(output, "f").done("a")
    with journal(output).open("a") as file:
        file.write(line + "\n")
    workspace = Workspace(output, "f", resume=True)
    assert workspace.is_done("a")
    workspace.done("b")
    assert Workspace(output, "f", resume=True).is_done("b")


def test_the_journal_is_one_line_per_unit(output: Path) -> None:
    workspace = Workspace(output, "f")
    workspace.done("a")
    workspace.done("b")
    assert [json.loads(line)["unit"] for line in journal(output).read_text().splitlines()] == ["a", "b"]


def test_a_failure_before_anything_was_done_leaves_nothing(output: Path) -> None:
    Workspace(output, "f").abandon()
    assert not output.exists()
    output.mkdir(parents=True)
    Workspace(output, "f").abandon()
    assert list(output.iterdir()) == []


def test_a_failure_after_something_was_done_leaves_it(output: Path) -> None:
    workspace = Workspace(output, "f")
    workspace.done("a")
    workspace.abandon()
    assert Workspace(output, "f", resume=True).is_done("a")


def test_a_failure_never_deletes_results(output: Path) -> None:
    workspace = Workspace(output, "f")
    (output / "model.safetensors").touch()
    workspace.abandon()
    assert (output / "model.safetensors").exists()


def test_close_removes_only_the_work(output: Path) -> None:
    workspace = Workspace(output, "f")
    workspace.done("a")
    (workspace.work / "scratch.bin").touch()
    (output / "model.safetensors").touch()
    workspace.close()
    assert [path.name for path in output.iterdir()] == ["model.safetensors"]


def test_a_moved_output_can_be_resumed(output: Path, tmp_path: Path) -> None:
    Workspace(output, "f").done("a")
    shutil.move(output, tmp_path / "elsewhere")
    assert Workspace(tmp_path / "elsewhere", "f", resume=True).is_done("a")


def test_a_process_that_died_tidying_up_had_finished(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(output, "f")
    workspace.done("a")
    (workspace.work / "scratch.bin").touch()
    (output / "moetool.json").write_text("{}")

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        workspace.close()
    monkeypatch.undo()
    with pytest.raises(UsageError, match="is finished: there is nothing to resume"):
        Workspace(output, "f", resume=True)
    assert [path.name for path in output.iterdir()] == ["moetool.json"]
