"""Jobs that are killed, stopped and continued: the result is that of a job that nobody disturbed, byte for byte."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from checkpoints import COMMAND_LINE, ONE_THREAD, contents, copy_of
from safetensors.torch import load_file, save_file
from sampling import sampled

from moetool.checkpoint import sampling
from moetool.job.journal import Journal, _line
from moetool.job.metering import read_costs

SHARDS = ("--shard-size", "40kB")


@pytest.fixture(scope="module")
def arguments(tiny_mixtral_bf16, calibration) -> tuple[object, ...]:
    """A job with every kind of unit, and several weight files."""
    return "compress", tiny_mixtral_bf16, "--method", "d2moe", "--ratio", 0.35, *calibration, *SHARDS


@pytest.fixture(scope="module")
def undisturbed(crash, arguments, tmp_path_factory) -> dict[str, bytes]:
    """What that job writes."""
    output = tmp_path_factory.mktemp("undisturbed") / "model"
    crash.whole(output, arguments)
    return contents(output)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, crash, arguments, undisturbed) -> Path:
    """An output that was killed on its way, to be copied and continued."""
    output = tmp_path_factory.mktemp("stopped") / "model"
    assert crash(output, arguments, at=25)["code"] == -signal.SIGKILL
    return output


def resume(run_cli, arguments, output: Path, *more: object) -> Any:
    command, source, *options = arguments
    return run_cli(command, source, output, *options, "--resume", *more)


@pytest.mark.slow
@pytest.mark.parametrize("first", sampled((3, 14, 25), [14]))
def test_killed_anywhere(tmp_path, crash, arguments, undisturbed, first):
    """Before every 33rd change to a file of the output, and a second time while the first is being made good."""
    quiet = crash(tmp_path / "quiet", arguments)
    assert contents(tmp_path / "quiet") == undisturbed
    assert quiet["changes"] > 70
    for at in range(first, quiet["changes"], 33):
        output = tmp_path / str(at)
        assert crash(output, arguments, at=at)["code"] == -signal.SIGKILL
        again = (*arguments, "--resume")
        crash(output, again, at=5)
        last = crash(output, again)
        assert last["code"] == 0, (at, last["stderr"])
        assert contents(output) == undisturbed, at


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "sevenths"),
    sampled(
        product(("fisher-merge", "svd-compress", "prune-base", "decompose"), (1, 3, 5)),
        [("fisher-merge", 5), ("prune-base", 3)],
    ),
)
def test_killed_stages(crash, tiny_mixtral, calibration, tmp_path, command, sevenths):
    source, options = tiny_mixtral, () if command == "decompose" else calibration
    if command in ("svd-compress", "prune-base"):
        source = tmp_path / "decomposed"
        assert crash(source, ("decompose", tiny_mixtral))["code"] == 0
    if command == "svd-compress":
        options = ("--svd", "vanilla", "--ratio", 0.3)
    arguments = (command, source, *options, *SHARDS)
    changes = crash.whole(tmp_path / "quiet", arguments)
    crash.goes_on(tmp_path / "out", arguments, changes * sevenths // 7, tmp_path / "quiet")


@pytest.mark.parametrize("sevenths", sampled((1, 2, 3, 5), [3]))
def test_killed_while_forms_are_measured_without_gradients(crash, tiny_mixtral, calibration, tmp_path, sevenths):
    method = ("--method", "quantize", "--ratio", 0.5, "--group-size", 16, "--sensitivity", "none")
    arguments = ("compress", tiny_mixtral, *method, *calibration, *SHARDS)
    changes = crash.whole(tmp_path / "quiet", arguments)
    crash.goes_on(tmp_path / "out", arguments, changes * sevenths // 7, tmp_path / "quiet")


@pytest.mark.parametrize(
    ("sent", "code", "at"),
    sampled(
        [(*signal, at) for signal in (("SIGTERM", 75), ("SIGINT", 130)) for at in (20, 50)],
        [("SIGTERM", 75, 20), ("SIGINT", 130, 50)],
    ),
)
def test_stopped_by_a_signal(crash, run_cli, tmp_path, arguments, undisturbed, sent, code, at):
    """SIGTERM finishes the unit in hand and exits 75; Ctrl-C stops at once, with 130. Both can be continued."""
    told = crash(tmp_path / "out", arguments, at=at, sent=sent)
    assert told["code"] == code
    assert "--resume" in told["stderr"]
    assert "Traceback" not in told["stderr"]
    assert told["changes"] >= at if sent == "SIGTERM" else told["changes"] < at + 5
    result = resume(run_cli, arguments, tmp_path / "out")
    assert result.code == 0, result.stderr
    assert contents(tmp_path / "out") == undisturbed


@pytest.mark.slow
def test_killed_from_outside(run_cli, tiny_mixtral_bf16, tiny_text, tmp_path):
    """As the kernel or a scheduler does it: kill -9 once the journal has a few lines, whatever is going on then. As
    long as the process lives, nobody else writes there."""
    options = (
        "--ratio",
        "0.35",
        "--calibration",
        str(tiny_text),
        "--mix",
        "0",
        "--samples",
        "48",
        "--sequence-length",
        "64",
    )
    output, journal = tmp_path / "out", tmp_path / "out" / ".moetool" / "journal.jsonl"
    command = [
        sys.executable,
        "-c",
        COMMAND_LINE,
        "compress",
        str(tiny_mixtral_bf16),
        "--method",
        "d2moe",
        str(output),
        *options,
    ]
    with subprocess.Popen(command, env=ONE_THREAD, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and not (journal.exists() and len(journal.read_bytes().splitlines()) >= 5):
            time.sleep(0.002)
        process.send_signal(signal.SIGSTOP)
        before = contents(output)
        for more in ((), ("--resume",), ("--overwrite",)):
            refused = run_cli("compress", tiny_mixtral_bf16, "--method", "d2moe", output, *options, *more)
            assert refused.code == 2
            assert f"Another run is writing {output} (process {process.pid} on {platform.node()}" in refused.stderr
            assert "-c compress" in refused.stderr
        assert contents(output) == before
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert journal.exists()
    assert run_cli("compress", tiny_mixtral_bf16, "--method", "d2moe", output, *options, "--resume").code == 0
    assert run_cli("compress", tiny_mixtral_bf16, "--method", "d2moe", tmp_path / "quiet", *options).code == 0
    assert contents(output) == contents(tmp_path / "quiet")


def test_continues_where_it_was(run_cli, stopped, arguments, undisturbed, tmp_path):
    output = copy_of(stopped, tmp_path / "out")
    journal = [json.loads(line)["unit"] for line in (output / ".moetool" / "journal.jsonl").read_text().splitlines()]
    assert journal[:2] == ["text", "gradients/embed"]
    assert len(journal) == 6
    result = resume(run_cli, arguments, output, "--json")
    assert result.code == 0
    assert f"Going on with the run in {output}" in result.stderr
    assert result.json["achieved_ratio"] > 0.35
    assert contents(output) == undisturbed
    (job,) = read_costs(output)
    assert job["runs"] == 2
    assert job["seconds"] >= sum(phase["seconds"] for phase in result.json["phases"])
    assert {phase["name"] for phase in job["phases"]} >= {phase["name"] for phase in result.json["phases"]}


@pytest.mark.parametrize("torn", ['{"un', '{"unit": "reverse/0"', "\x00" * 7], ids=["begun", "almost", "zeros"])
def test_a_torn_line_in_the_journal(crash, stopped, arguments, undisturbed, run_cli, tmp_path, torn):
    """The machine went down while a line was being written; it goes down again after some more lines."""
    output = copy_of(stopped, tmp_path / "out")
    journal = output / ".moetool" / "journal.jsonl"
    whole = journal.read_text()
    journal.write_text(whole + torn)
    assert crash(output, (*arguments, "--resume"), at=20)["code"] == -signal.SIGKILL
    assert len(journal.read_text().splitlines()) > len(whole.splitlines()) + 1
    assert resume(run_cli, arguments, output).code == 0
    assert contents(output) == undisturbed


def test_an_unfinished_output_is_no_checkpoint(run_cli, stopped, tmp_path, tiny_text):
    output = copy_of(stopped, tmp_path / "out")
    for command in (("inspect", output), ("verify", output), ("eval", output, "--data", tiny_text)):
        result = run_cli(*command)
        assert result.code == 3
        assert f"{output} holds an unfinished run" in result.stderr


def test_an_unfinished_output_is_not_overwritten_by_mistake(run_cli, stopped, arguments, undisturbed, tmp_path):
    command, source, *options = arguments
    output = copy_of(stopped, tmp_path / "out")
    before = contents(output)
    refused = run_cli(command, source, output, *options)
    assert refused.code == 2
    assert "unfinished run: --resume" in refused.stderr
    assert "--overwrite" in refused.stderr
    assert contents(output) == before
    assert run_cli(command, source, output, *options, "--overwrite").code == 0
    assert contents(output) == undisturbed


@pytest.mark.parametrize(
    "other",
    [("--ratio", 0.3), ("--seed", 1), ("--svd", "vanilla"), ("--samples", 8), ("--compute-dtype", "bfloat16")],
    ids=lambda option: str(option[0]).strip("-"),
)
def test_other_settings_are_refused(run_cli, stopped, arguments, tmp_path, other):
    output = copy_of(stopped, tmp_path / "out")
    before = contents(output)
    result = resume(run_cli, arguments, output, *other)
    assert result.code == 2
    assert "other settings" in result.stderr
    assert contents(output) == before


def test_another_input_is_refused(run_cli, stopped, arguments, tiny_mixtral, tmp_path):
    output = copy_of(stopped, tmp_path / "out")
    result = resume(run_cli, ("compress", tiny_mixtral, "--method", "d2moe", *arguments[2:]), output)
    assert result.code == 2
    assert "another input" in result.stderr


def test_another_stage_is_refused(run_cli, stopped, tiny_mixtral_bf16, tmp_path):
    result = run_cli("decompose", tiny_mixtral_bf16, copy_of(stopped, tmp_path / "out"), "--resume")
    assert result.code == 2


def test_resuming_what_is_finished(run_cli, compress, tiny_mixtral_bf16, calibration):
    """A batch job says --resume until it is told that all is done: that is no error. Other settings still are one."""
    made = compress(tiny_mixtral_bf16, "--ratio", 0.35)
    before = contents(made.path)
    again = ("compress", tiny_mixtral_bf16, "--method", "d2moe", made.path, *calibration, "--resume")
    result = run_cli(*again, "--ratio", 0.35)
    assert result.code == 0
    assert "finished already" in result.stdout
    told = run_cli(*again, "--ratio", 0.35, "--json").json
    assert told["status"] == "finished"
    assert told["achieved_ratio"] == made.told["achieved_ratio"]
    other = run_cli(*again, "--ratio", 0.3)
    assert other.code == 2
    assert "other settings" in other.stderr
    assert contents(made.path) == before


def test_what_is_finished_was_made_of_the_texts_as_they_were(run_cli, tiny_mixtral_bf16, tiny_text, tmp_path):
    """Whoever resumes a finished job with another text in the file of that name would take the result for one of it."""
    folder, output = tmp_path / "texts", tmp_path / "out"
    folder.mkdir()
    text = folder / "first.txt"
    text.write_bytes(tiny_text.read_bytes())
    options = ("--ratio", 0.35, "--calibration", folder, "--samples", 2, "--sequence-length", 16, "--mix", 0)
    command = ("compress", tiny_mixtral_bf16, output, "--method", "d2moe", *options)
    assert run_cli(*command).code == 0
    before = contents(output)
    for changed in (text, folder / "second.txt"):
        changed.write_bytes(tiny_text.read_bytes() + b"One more line.\n")
        for more in ((), ("--dry-run",)):
            refused = run_cli(*command, "--resume", *more)
            assert refused.code == 2
            assert f"{folder} has changed since this run began" in refused.stderr
        text.write_bytes(tiny_text.read_bytes())
    (folder / "second.txt").unlink()
    told = run_cli(*command, "--resume", "--json").json
    assert told["status"] == "finished"
    assert contents(output) == before


def test_nobody_elses_directory_is_resumed(run_cli, tiny_mixtral, decomposed, tmp_path):
    """A weight file of the expected name and size that another program wrote is not taken for ours."""
    output = tmp_path / "out"
    output.mkdir()
    size = (tiny_mixtral / "model.safetensors").stat().st_size
    (output / "model.safetensors").write_bytes(b"\0" * size)
    result = run_cli("export", decomposed, output, "--resume")
    assert result.code == 2
    assert "no unfinished run" in result.stderr
    assert list(contents(output)) == ["model.safetensors"]


def test_resume_starts_what_was_never_begun(run_cli, arguments, undisturbed, tmp_path):
    """A batch job can always say --resume."""
    assert resume(run_cli, arguments, tmp_path / "out").code == 0
    assert contents(tmp_path / "out") == undisturbed


def test_resume_and_overwrite_exclude_each_other(run_cli, arguments, stopped, tmp_path):
    result = resume(run_cli, arguments, copy_of(stopped, tmp_path / "out"), "--overwrite")
    assert result.code == 2
    assert "one of them" in result.stderr


def test_tidying_up_can_be_resumed(run_cli, arguments, undisturbed, stopped, tmp_path):
    """Killed after everything was written, while the work directory was being removed."""
    output = copy_of(stopped, tmp_path / "out")
    assert resume(run_cli, arguments, output).code == 0
    shutil.copytree(stopped / ".moetool", output / ".moetool")
    journal = output / ".moetool" / "journal.jsonl"
    Journal(journal, json.loads(journal.read_text().splitlines()[0])["run"]).done("finished")
    result = resume(run_cli, arguments, output)
    assert result.code == 0
    assert "finished already" in result.stdout
    assert contents(output) == undisturbed


@pytest.fixture
def large(monkeypatch):
    """As if every model were too large to be hashed whole."""
    monkeypatch.setattr(sampling, "_WHOLE_BYTES", 4096)


def edited(source: Path, name: str, factor: float = 2.5) -> None:
    """Multiply one tensor of a model, in a new file of the same size and time."""
    file = source / "model.safetensors"
    content, time = load_file(file), file.stat().st_mtime_ns
    content[name] = content[name] * factor
    file.unlink()
    save_file(content, file, metadata={"format": "pt"})
    os.utime(file, ns=(time, time))


@pytest.mark.parametrize("name", ["model.layers.1.block_sparse_moe.gate.weight", "model.norm.weight"])
def test_a_source_with_one_changed_tensor_is_another_input(run_cli, stopped, arguments, tmp_path, name):
    """Of a job that was stopped, and of one that is finished: neither goes on with another model."""
    source = copy_of(arguments[1], tmp_path / "source")
    changed = ("compress", source, "--method", "d2moe", *arguments[2:])
    edited(source, name)
    for output in (copy_of(stopped, tmp_path / "stopped"), tmp_path / "finished"):
        if output.name == "finished":
            edited(source, name, 1 / 2.5)
            assert run_cli("decompose", source, output).code == 0
            edited(source, name)
            changed = ("decompose", source)
        before = contents(output)
        result = resume(run_cli, changed, output)
        assert result.code == 2
        assert "another input" in result.stderr
        assert contents(output) == before


def test_a_large_source_that_was_written_again(run_cli, tiny_mixtral_bf16, tmp_path, large):
    """Nothing tells whether it is the same; who knows says so, once."""
    source, output = copy_of(tiny_mixtral_bf16, tmp_path / "source"), tmp_path / "out"
    job = ("decompose", source, output, *SHARDS)
    assert run_cli(*job).code == 0
    os.utime(source / "model.safetensors", ns=(1, 1))
    refused = run_cli(*job, "--resume")
    assert refused.code == 2
    assert "model.safetensors was written again" in refused.stderr
    assert "--same-input" in refused.stderr
    alone = run_cli(*job, "--same-input")
    assert alone.code == 2
    assert "add --resume" in alone.stderr
    assert run_cli(*job, "--resume", "--same-input").code == 0


def test_journals_of_an_earlier_moetool(run_cli, stopped, arguments, tmp_path):
    output = copy_of(stopped, tmp_path / "out")
    journal = output / ".moetool" / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    earlier = [{key: value for key, value in line.items() if key not in ("inputs", "check")} for line in lines]
    journal.write_text("".join(_line({**line, "run": "0" * 64}) for line in earlier))
    before = contents(output)
    result = resume(run_cli, arguments, output)
    assert result.code == 2
    assert "started by an earlier moetool" in result.stderr
    assert "--overwrite" in result.stderr
    assert contents(output) == before
