"""The output directory of a job: what is refused, what is resumed, what survives a crash."""

import json
import os
import shutil
from pathlib import Path

import pytest

from moetool.checkpoint.manifest import Manifest, write_manifest
from moetool.checkpoint.names import WORK_DIRECTORY
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import UsageError
from moetool.job.books import PartBooks
from moetool.job.inputs import Inputs
from moetool.job.workspace import TRAINER, Workspace, check_finished, is_finished


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "output"


def finished(output: Path) -> Path:
    """A directory as a finished job leaves it."""
    Workspace(output, "f").close()
    write_manifest(output, Manifest(source="s", source_fingerprint="", recipe={}, seed=0, run="f"))
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


def test_what_another_job_has_done_is_taken_over_once(tmp_path: Path) -> None:
    """What it will delete stays here, and the other way round; what was used up there needs no file here."""
    other = Workspace(tmp_path / "other", "theirs")
    for unit, name in (("a", "a.bin"), ("b", "deep/b.bin")):
        (other.work / name).parent.mkdir(exist_ok=True)
        (other.work / name).write_text(unit)
        other.done(unit, spent=[other.work / "a.bin"] if unit == "b" else [], told={"said": unit})
    other.abandon()
    mine = Workspace(tmp_path / "mine", "ours")
    mine.begin_with(other.output)
    assert [mine.is_done(unit) for unit in "abc"] == [True, True, False]
    assert mine.told("b") == {"said": "b"}
    assert not (mine.work / "a.bin").exists()
    mine.done("c", spent=[mine.work / "deep" / "b.bin"])
    assert (other.work / "deep" / "b.bin").read_text() == "b"
    mine.begin_with(other.output)
    assert mine.is_done("c")
    mine.abandon()
    resumed = Workspace(tmp_path / "mine", "ours", resume=True)
    assert [resumed.is_done(unit) for unit in "abc"] == [True] * 3


def test_damage_to_what_was_taken_over_is_made_good(tmp_path: Path) -> None:
    """With what led to it and was used up, as if this job had made it all."""
    other = Workspace(tmp_path / "other", "theirs")
    (other.work / "a.bin").write_text("a")
    other.done("a")
    (other.work / "b.bin").write_text("b")
    other.done("b", spent=[other.work / "a.bin"])
    other.abandon()
    mine = Workspace(tmp_path / "mine", "ours")
    mine.begin_with(other.output)
    mine.abandon()
    (mine.work / "b.bin").unlink()
    (mine.work / "b.bin").write_text("?")
    resumed = Workspace(tmp_path / "mine", "ours", resume=True)
    assert [resumed.is_done(unit) for unit in "ab"] == [False, False]


def test_a_part_keeps_its_units_in_the_journal_of_the_whole(output: Path) -> None:
    """Under its own name, with files that are checked as those of the whole are."""
    whole = Workspace(output, "f")
    part = PartBooks(whole, "trial")
    (part.work / "a.bin").write_text("a")
    (part.output / "model.bin").write_text("m")
    part.done("a", told={"said": 1})
    assert [whole.is_done("trial/a"), whole.is_done("a"), part.is_done("b")] == [True, False, False]
    whole.abandon()
    whole = Workspace(output, "f", resume=True)
    part = PartBooks(whole, "trial")
    assert part.is_done("a")
    assert part.told("a") == {"said": 1}
    (part.output / "model.bin").write_text("?")
    whole.abandon()
    whole = Workspace(output, "f", resume=True)
    assert not PartBooks(whole, "trial").is_done("a")
    assert not (part.output / "model.bin").exists()


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
    del first  # and its lock
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
    assert is_finished(output)


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
    del workspace
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


def test_a_half_written_line_is_not_done(output: Path) -> None:
    """Killed in the middle of a write: what was noted before stays, and so does everything noted afterwards."""
    first = Workspace(output, "f")
    first.done("a")
    begun = journal(output).stat().st_size
    first.done("b")
    del first
    whole = journal(output).read_bytes()
    for end in range(begun, len(whole)):
        journal(output).write_bytes(whole[:end])
        is_whole = end == len(whole) - 1  # a line that lacks no more than its end is a whole one
        second = Workspace(output, "f", resume=True)
        assert [second.is_done(unit) for unit in "ab"] == [True, is_whole]
        second.done("c")
        second.done("d")
        del second
        third = Workspace(output, "f", resume=True)
        assert [third.is_done(unit) for unit in "abcd"] == [True, is_whole, True, True]
        assert not third._journal.gaps
        del third


@pytest.mark.parametrize("line", ["", "[]", "3", "null", '{"other": "a"}', '{"unit"'])
def test_lines_that_say_nothing(output: Path, line: str) -> None:
    Workspace(output, "f").done("a")
    with journal(output).open("a") as file:
        file.write(line + "\n")
    workspace = Workspace(output, "f", resume=True)
    assert workspace.is_done("a")
    workspace.done("b")
    del workspace
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


def test_a_failure_that_nothing_can_go_on_from_leaves_nothing(output: Path) -> None:
    workspace = Workspace(output, "f")
    (workspace.work / "a.bin").write_text("a")
    workspace.done("a")
    (workspace.work / TRAINER).mkdir()
    workspace.discard()
    assert not workspace.is_done("a")
    workspace.abandon()
    assert not output.exists()


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


@pytest.mark.parametrize("method", ["unlink", "rmdir"])
def test_a_process_that_died_tidying_up_had_finished(
    output: Path, tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    workspace, source = Workspace(output, "f"), Checkpoint.open(tiny_mixtral)
    workspace.done("a")
    (workspace.work / "scratch.bin").touch()
    write_manifest(output, Manifest(source="s", source_fingerprint="", recipe={}, seed=0, run="f"))

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, method, killed)
    with pytest.raises(KeyboardInterrupt):
        workspace.close()
    monkeypatch.undo()
    del workspace
    assert is_finished(output)
    with pytest.raises(UsageError, match="made with other settings"):
        check_finished(output, "g", source)
    check_finished(output, "f", source)
    assert [path.name for path in output.iterdir()] == ["moetool.json"]


def noted(workspace: Workspace, unit: str, *names: str, spent: tuple[str, ...] = ()) -> None:
    """A unit that writes files, and uses up others."""
    for name in names:
        (workspace.work / name).write_text(f"{unit} made {name}")
    workspace.done(unit, spent=[workspace.work / name for name in spent])


def chain(output: Path) -> None:
    """a → b → c, of which the last has used up what the one before it made; each leaves something for the end."""
    workspace = Workspace(output, "f")
    noted(workspace, "a", "a.bin")
    noted(workspace, "b", "b.bin", "b.kept", spent=("a.bin",))
    noted(workspace, "c", "c.bin", "c.kept", spent=("b.bin",))
    noted(workspace, "alone", "alone.kept")


@pytest.mark.parametrize(
    ("damaged", "left"),
    [("c.bin", {"alone"}), ("c.kept", {"alone"}), ("b.kept", {"c", "alone"}), ("alone.kept", set("c"))],
)
@pytest.mark.parametrize("how", ["delete", "empty", "flip"])
def test_what_was_damaged_is_made_again(output: Path, damaged: str, left: set[str], how: str) -> None:
    """And what has to be there for that, and is used up; nothing else."""
    chain(output)
    file = output / WORK_DIRECTORY / damaged
    data = file.read_bytes()
    file.unlink()
    if how != "delete":
        file.write_bytes(b"" if how == "empty" else data[:-1] + bytes([data[-1] ^ 1]))
    workspace = Workspace(output, "f", resume=True)
    # Nobody notes what a unit needs: `alone` might need what was used up before it.
    assert {unit for unit in ("a", "b", "c", "alone") if workspace.is_done(unit)} == left
    assert not file.exists()
    del workspace
    again = Workspace(output, "f", resume=True)
    assert {unit for unit in ("a", "b", "c", "alone") if again.is_done(unit)} == left


@pytest.mark.parametrize(
    ("lost", "left"), [(0, {"b", "c", "alone"}), (1, {"c", "alone"}), (2, {"alone"}), (3, {"a", "b", "c"})]
)
@pytest.mark.parametrize("how", ["delete", "garble"])
def test_a_lost_line_is_made_again(output: Path, lost: int, left: set[str], how: str) -> None:
    """Which unit it noted nobody knows; what was used up by then has to be there again."""
    chain(output)
    lines = journal(output).read_bytes().splitlines(keepends=True)
    lines[lost : lost + 1] = [lines[lost].replace(b"made", b"mode")] if how == "garble" else []
    journal(output).write_bytes(b"".join(lines))
    workspace = Workspace(output, "f", resume=True)
    assert {unit for unit in ("a", "b", "c", "alone") if workspace.is_done(unit)} == left


def test_files_that_no_unit_made_are_removed(output: Path) -> None:
    workspace = Workspace(output, "f")
    noted(workspace, "a", "a.bin")
    (workspace.work / "b.bin.tmp").touch()
    (workspace.work / "deep").mkdir()
    (workspace.work / "deep" / "b.bin").touch()
    (workspace.work / "trainer").mkdir()
    (workspace.work / "trainer" / "kept").touch()
    del workspace
    Workspace(output, "f", resume=True)
    left = {path.relative_to(output / WORK_DIRECTORY).as_posix() for path in (output / WORK_DIRECTORY).rglob("*")}
    assert {"a.bin", "trainer/kept"} <= left
    assert not {"b.bin.tmp", "deep/b.bin"} & left


def test_a_unit_may_tell_something(output: Path) -> None:
    workspace = Workspace(output, "f")
    workspace.done("head", told={"loss": 0.1 + 0.2})
    del workspace
    assert Workspace(output, "f", resume=True).told("head") == {"loss": 0.1 + 0.2}


def test_two_threads_of_a_process_are_two_runs(output: Path) -> None:
    first = Workspace(output, "f")
    first.done("a")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UsageError, match=f"Another run is writing {output} .process {os.getpid()} on"):
            Workspace(output, "f", **options)
    assert first.is_done("a")
    first.abandon()
    assert Workspace(output, "f", resume=True).is_done("a")


def test_a_lock_is_released_once(output: Path) -> None:
    """What was released holds nothing any more, whatever has the number of its file by then."""
    first = Workspace(output, "f")
    first.abandon()
    others = [Workspace(output.with_name(f"other-{number}"), "f") for number in range(4)]
    del first
    for other in others:
        with pytest.raises(UsageError, match="Another run"):
            Workspace(other.output, "f", resume=True)


class _NotedInputs(Inputs):
    """Inputs that are in a state that a test gives, and have to be in the one that was noted."""

    def __init__(self, written: int) -> None:
        super().__init__()
        self.states = {"input": {"model.safetensors": {"written": written}}}
        self.checked: list[object] = []

    def check(self, noted: object) -> None:
        self.checked.append(noted)
        if noted not in (None, self.states):
            raise UsageError("written again")


def test_inputs_are_noted_and_compared(tmp_path):
    output = tmp_path / "out"
    first = Workspace(output, "f", inputs=_NotedInputs(1))
    first.done("a")
    del first
    with pytest.raises(UsageError, match="written again"):
        Workspace(output, "f", resume=True, inputs=_NotedInputs(2))
    vouched = Inputs(said_same=True)
    vouched.states = _NotedInputs(2).states
    second = Workspace(output, "f", resume=True, inputs=vouched)
    assert second.is_done("a")
    second.done("b")  # from here on the new state is the one to be found
    del second
    assert Workspace(output, "f", resume=True, inputs=_NotedInputs(2)).is_done("b")


def test_what_another_job_measured_is_taken_over_with_ones_own_inputs(tmp_path):
    other = Workspace(tmp_path / "other", "theirs", inputs=_NotedInputs(1))
    other.done("a")
    mine = Workspace(tmp_path / "mine", "ours", inputs=_NotedInputs(2))
    mine.begin_with(tmp_path / "other")
    del mine
    inputs = _NotedInputs(2)
    assert Workspace(tmp_path / "mine", "ours", resume=True, inputs=inputs).is_done("a")
    assert inputs.checked == [inputs.states]
