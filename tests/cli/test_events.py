"""`--log-json`, the heartbeat, and what to type next."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetool.checkpoint.manifest import Manifest, Origin, write_manifest
from moetool.cli.display import Display, Heartbeat, Pulse
from moetool.cli.events import EventLog
from moetool.cli.next_step import PROMPT, after_page, after_stage
from moetool.errors import UsageError
from moetool.job.forecast import PhaseTime
from moetool.job.options import CalibrationOptions, RunOptions
from moetool.job.result import Details, Result, Sizes

RunCli = Callable[..., Any]
_SEEN = "text of its calibration: it may lose more on other text"


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_job_from_its_beginning_to_its_end(tiny_mixtral: Path, run_cli: RunCli, tmp_path: Path) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "out"
    result = run_cli("decompose", tiny_mixtral, out, "--log-json", log)
    assert result.code == 0, result.stderr
    found = read(log)
    names = [event["event"] for event in found]
    assert names[0] == "started"
    assert names[-1] == "finished"
    assert {"phase_began", "unit_done", "phase_ended"} <= set(names)
    first, last = found[0], found[-1]
    assert (first["stage"], first["input"], first["resume"]) == ("decompose", str(tiny_mixtral), False)
    assert first["plan"]["output_bytes"] == last["result"]["bytes_after"]
    assert first["options"]["shard_size"] == 5_000_000_000
    ended = [event for event in found if event["event"] == "phase_ended"]
    assert [event["done"] for event in ended] == [event["total"] for event in ended]
    assert last["exit_code"] == 0
    assert result.stderr.splitlines()[-1] == f"next: moetool quantize-delta {out} {out}-4bit --bits 4"


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "{model}", "--data", "{text}", "--windows", 2, "--sequence-length", 32, "--against", "{model}"),
        ("routing", "{model}", "--data", "{text}", "--windows", 2, "--sequence-length", 32),
        ("verify", "{model}", "--against", "{model}"),
        ("inspect", "{model}", "--analysis", "--layers", 0),
        ("bench", "{model}", "--lengths", 8, "--new-tokens", 1, "--rounds", 1),
        ("report", "{model}", "{here}/report.html"),
    ],
)
def test_what_takes_long_keeps_a_log(
    tiny_mixtral: Path, tiny_text: Path, run_cli: RunCli, tmp_path: Path, command: tuple[object, ...]
) -> None:
    """From beginning to end, with the result that `--json` prints, which is alone on stdout; the last line says what is
    next."""
    log, places = tmp_path / "log.jsonl", {"model": tiny_mixtral, "text": tiny_text, "here": tmp_path}
    words = [str(word).format(**places) for word in command]
    result = run_cli(*words, "--json", "--log-json", log)
    assert result.code == 0, result.stderr
    found = read(log)
    assert (found[0]["event"], found[0]["command"]) == ("started", words[0])
    assert found[0]["input"][0] == str(tiny_mixtral)
    assert "phase_ended" in {event["event"] for event in found}
    assert found[-1]["event"] == "finished"
    assert {"schema_version": 1, **found[-1]["result"]} == json.loads(result.stdout)
    assert "next: " not in result.stderr
    if words[0] != "bench":
        assert run_cli(*words).stderr.splitlines()[-1].startswith("next: ")
    inside = run_cli(*words, "--log-json", tiny_mixtral / "log.jsonl")
    assert inside.code == 2
    assert "which holds a model alone" in inside.stderr


def test_a_job_that_fails_says_with_what(tiny_mixtral: Path, run_cli: RunCli, tmp_path: Path) -> None:
    """In the same file, behind what was there, though another program left half a line."""
    log = tmp_path / "log.jsonl"
    log.write_text('{"event": "of another"}\n{"half')
    result = run_cli("svd-compress", tiny_mixtral, tmp_path / "out", "--svd", "vanilla", "--rank", 3, "--log-json", log)
    assert result.code == 3, result.stderr
    lines = log.read_text().splitlines()
    assert lines[1] == '{"half'
    last = json.loads(lines[-1])
    assert (last["event"], last["exit_code"]) == ("failed", 3)
    assert last["error"] in result.stderr
    (tmp_path / "link").symlink_to(tiny_mixtral)
    for model in (tmp_path / "out", tiny_mixtral, tmp_path / "link"):  # what lies in the input is copied to the output
        inside = run_cli("decompose", tiny_mixtral, tmp_path / "out", "--log-json", model / "log.jsonl")
        assert inside.code == 2
        assert "Write beside it" in inside.stderr
        assert not (model / "log.jsonl").exists()
    with pytest.raises(UsageError, match="Is a directory"):
        EventLog(tmp_path, tmp_path / "out")


def test_every_line_survives_a_kill(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    code = (
        "from pathlib import Path\nimport os\nfrom moetool.cli.events import EventLog\n"
        f"log = EventLog(Path({str(log)!r}), Path('elsewhere'))\n"
        "for unit in range(50): log.write('unit_done', done=unit, more='x' * 10_000)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [event["done"] for event in read(log)] == list(range(50))


def test_a_log_that_ends_does_not_end_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no disk that is always full")
    log = EventLog(Path("/dev/full"), tmp_path)
    log.write("message", message="one")
    log.write("message", message="two")
    assert capsys.readouterr().err.count("--log-json ends here") == 1


def test_a_heartbeat_tells_where_the_job_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(EventLog(tmp_path / "log", tmp_path / "out"))
    display.expect([PhaseTime("Forward", 6000)])
    display.start("Forward", 40, "batches")
    display.skip(10)
    display.advance()
    display.beat(2_000_000_000, 3_000_000_000)
    display.finish()
    said = capsys.readouterr().err
    assert "Forward: 1 of 30 batches, " in said
    assert "memory 2.0 GB (peak 3.0 GB), about " in said
    assert "left in all\n" in said
    [beat] = [event for event in read(tmp_path / "log") if event["event"] == "heartbeat"]
    assert (beat["phase"], beat["done"], beat["total"], beat["unit"]) == ("Forward", 1, 30, "batches")
    assert beat["in_all"]
    assert (beat["memory_bytes"], beat["peak_memory_bytes"]) == (2_000_000_000, 3_000_000_000)


def test_rates_in_words() -> None:
    def said(rate: float, left: float | None) -> str:
        return str(Pulse("Write", 3, 9, "layers", rate, 1000, 1000, left, False)).removeprefix("Write: 3 of 9 layers")

    assert said(4, 60) == ", 4.0 per s, memory 1.0 kB (peak 1.0 kB), about 60 s left"
    assert said(0.25, None) == ", 4.0 s each, memory 1.0 kB (peak 1.0 kB)"
    assert said(0, None) == ", memory 1.0 kB (peak 1.0 kB)"


def test_what_comes_next_of_a_result_without_a_text_of_its_own() -> None:
    result = Result(stage="auto", input="in", output="made", seconds=1.0, peak_memory_bytes=1, details=Details())
    said = after_stage("compress", result, CalibrationOptions())
    assert said.partition("    #")[0].endswith("eval made --data bundled --windows 8 --against in")


def test_a_chain_of_steps_is_compared_with_what_its_first_one_read(tmp_path: Path) -> None:
    source, text = tmp_path / "source", tmp_path / "text.txt"
    source.mkdir()
    earlier = [Origin(stage="decompose", source=str(source), source_fingerprint="")]
    earlier.append(Origin(stage="vanilla", source="dense", source_fingerprint=""))
    made = tmp_path / "made"
    made.mkdir()
    (made / "tokenizer.json").touch()
    for stage, options, data in (
        ("prune-base", RunOptions(), "bundled --windows 8"),
        ("svd-compress", CalibrationOptions(calibration=str(text)), f"{text} --windows 64"),
    ):
        recipe = {"stage": stage}
        noted = Manifest(source="in", source_fingerprint="", recipe=recipe, seed=0, lineage=tuple(earlier))
        write_manifest(made, noted)
        result = Result(stage=stage, input="in", output=str(made), seconds=1.0, peak_memory_bytes=1, details=Details())
        said = after_stage(stage, result, options).partition("    #")[0]
        assert said.endswith(f"eval {made} --data {data} --against {source}")
    source.rmdir()
    assert after_stage(stage, result, options).partition("    #")[0].endswith("--against in")


def test_a_result_of_short_windows_is_evaluated_on_such() -> None:
    """Its text may have too few tokens for a longer one."""
    result = Result(stage="auto", input="in", output="made", seconds=1.0, peak_memory_bytes=1, details=Details())
    said = after_stage("compress", result, CalibrationOptions(calibration="short.txt", sequence_length=64))
    assert said.partition("    #")[0].endswith(
        "eval made --data short.txt --sequence-length 64 --windows 64 --against in"
    )


def test_a_result_without_a_tokenizer_cannot_be_evaluated(tmp_path: Path) -> None:
    made = str(tmp_path)
    result = Result(stage="auto", input="in", output=made, seconds=1.0, peak_memory_bytes=1, details=Details())
    assert after_stage("compress", result, CalibrationOptions()).endswith(f"report {made}")
    (tmp_path / "tokenizer.json").touch()
    assert f"eval {made} --data bundled" in after_stage("compress", result, CalibrationOptions())


def test_an_export_without_a_tokenizer_cannot_be_talked_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetool.checkpoint.gguf_model.GgufModel.has_tokenizer", False)
    result = Result(
        stage="gguf", input=str(tmp_path), output="made", seconds=1.0, peak_memory_bytes=1, details=Details()
    )
    assert after_stage("export", result).endswith("verify made")
    packed = replace(result, stage="compressed-tensors", output=str(tmp_path))
    assert after_stage("export", packed).endswith(f"verify {tmp_path}")


def test_a_heart_beats_while_one_unit_takes_long() -> None:
    came, beats = threading.Event(), list[tuple[int, int]]()

    def beat(memory: int, peak: int) -> None:
        beats.append((memory, peak))
        came.set()

    heart = Heartbeat(beat, interval=0, sampled=0.001)
    assert came.wait(10)
    heart.stop()
    count = len(beats)
    assert all(0 < memory <= peak for memory, peak in beats)
    assert len(beats) == count
    assert heart.peak == max(peak for _, peak in beats)


@pytest.mark.parametrize(
    ("command", "stage", "said", "with_nothing_installed"),
    [
        ("upcycle", "vanilla", "tune 'a model' 'a model-tuned-2' --data 'a text'", None),
        ("moefy", "g-moefication", "repair 'a model' 'a model-repaired' --to in --calibration 'a text'", None),
        ("compress", "hybrid", f"eval 'a model' --data 'a text' --windows 64 --against in    # {_SEEN}", None),
        ("fisher-merge", "fisher-merge", "decompose in 'a model-decomposed' --base 'a model'", None),
        ("export", "compressed-tensors", "vllm serve 'a model'", "verify 'a model'"),
        (
            "export",
            "gguf",
            f"llama-cli -m 'a model/model.gguf' -p '{PROMPT}'",
            f"generate 'a model/model.gguf' '{PROMPT}'",
        ),
    ],
)
def test_what_comes_next(
    command: str,
    stage: str,
    said: str,
    with_nothing_installed: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole command that this machine can run, with the names of files that are there or that are free."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moetool.checkpoint.gguf_model.GgufModel.has_tokenizer", True)
    monkeypatch.setattr("moetool.checkpoint.gguf_model.GgufModel.is_read", True)
    (tmp_path / "a model-tuned").mkdir()
    options = RunOptions.model_validate({}) if stage == "gguf" else CalibrationOptions(calibration="a text")
    result = Result(stage=stage, input="in", output="a model", seconds=1.0, peak_memory_bytes=1, details=Details())
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert after_stage(command, result, options).removeprefix("moetool ") == said
    monkeypatch.setattr("shutil.which", lambda name: "/bin/moetool" if name == "moetool" else None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert after_stage(command, result, options) == f"moetool {with_nothing_installed or said}"
    if command in ("upcycle", "compress"):
        assert after_stage(command, result, options, trains=False) == "moetool report 'a model'"
        monkeypatch.setattr("moetool.runtime.memory.free_bytes", lambda: 100)
        large = replace(result, sizes=Sizes(bytes_before=30, bytes_after=20))
        assert after_stage(command, large, options) == "moetool report 'a model'"


def test_a_repaired_model_is_not_to_be_repaired_again(tmp_path: Path) -> None:
    """Neither where the job was finished already, whose result tells nothing of the repair."""
    (tmp_path / "tokenizer.json").touch()
    result = Result(
        stage="g-moefication", input="in", output=str(tmp_path), seconds=0.0, peak_memory_bytes=1, details=Details()
    )
    for stage, then in (("g-moefication", "repair"), ("repair", "generate")):
        write_manifest(tmp_path, Manifest(source="in", source_fingerprint="", recipe={"stage": stage}, seed=0))
        said = after_stage("moefy", result, CalibrationOptions(calibration="text.txt"))
        assert f"moetool {then} {tmp_path}" in said


def test_weights_of_texts_are_for_calibration_alone() -> None:
    options = CalibrationOptions(calibration="a.jsonl:::said@3,b.txt@2")
    result = Result(stage="hybrid", input="in", output="out", seconds=1.0, peak_memory_bytes=1, details=Details())
    said = after_stage("compress", result, options).partition("    #")[0]
    assert "eval out --data a.jsonl:::said,b.txt --windows" in said


def test_after_a_dry_run_comes_the_run(run_cli: RunCli, tiny_mixtral: Path, tmp_path: Path) -> None:
    words = ("compress", tiny_mixtral, tmp_path / "an output", "--method", "quantize", "--bits", 4)
    planned = run_cli(*words, "--dry-run")
    assert planned.code == 0, planned.stderr
    said = planned.stderr.splitlines()[-1]
    assert shlex.split(said) == ["next:", "moetool", *map(str, words)]
    assert run_cli(*shlex.split(said)[2:]).code == 0


@pytest.mark.parametrize("found", [True, False])
def test_a_page_is_opened_or_fetched(found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def browser() -> None:
        if not found:
            raise webbrowser.Error

    monkeypatch.setattr("webbrowser.get", browser)
    monkeypatch.setattr("socket.gethostname", lambda: "far")
    said = after_page(tmp_path / "a page.html")
    if found:
        assert shlex.split(said) == [sys.executable, "-m", "webbrowser", (tmp_path / "a page.html").as_uri()]
    else:
        assert shlex.split(said, comments=True) == ["scp", f"far:{tmp_path}/a page.html", "."]
