"""Several processes train together: one result, one voice, and none that waits for another that has failed."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from checkpoints import contents, load_whole, tensors_of
from sampling import sampled

SHORT = "--sequence-length", 32, "--no-packing", "--learning-rate", 1e-3

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_text: Path) -> Path:
    """Examples of different lengths, which make five rows: a batch of four, and one that is not full."""
    words, path = tiny_text.read_text().split(), tmp_path_factory.mktemp("data") / "five.jsonl"
    texts = (" ".join(words[40 * row : 40 * row + 6 + 3 * row]) for row in range(5))
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts if '"' not in text and "\\" not in text))
    return path


@pytest.mark.parametrize(
    ("method", "options"),
    sampled(
        [
            ("vanilla", ("--teacher",)),
            ("ders-lowrank", ()),
            ("simoe", ()),
            ("vanilla", ("--lora-rank", 2)),
            ("vanilla", ("--train", "lora")),
        ],
        [("vanilla", ("--teacher",))],
    ),
)
def test_epochs_that_end_within_a_batch(
    run_cli: Any,
    crash: Any,
    dense: Any,
    upcycle: Any,
    data: Path,
    tmp_path: Path,
    method: str,
    options: tuple[Any, ...],
) -> None:
    """No row counts twice, and what is logged is of all processes."""
    source = upcycle(dense("llama"), "--experts", 4, "--method", method).path
    if "--teacher" in options:
        options = "--teacher", dense("llama")
    always = ("--data", data, "--eval-data", data, *SHORT, "--epochs", 2, "--log-every", 1, *options)
    one = run_cli("tune", source, tmp_path / "one", *always, "--batch-size", 4, "--json")
    assert one.code == 0, one.stderr
    two = crash(tmp_path / "two", ("tune", source, *always, "--batch-size", 2), ranks=2)
    assert two["codes"] == [0, 0], two["said"]
    steps = [line for line in one.stderr.splitlines() if line.startswith("step ")]
    assert [int(line.split(":")[0].removeprefix("step ")) for line in steps] == [0, 1, 2, 3, 4, 4]
    assert [line for line in two["stderr"].splitlines() if line.startswith("step ")] == steps
    load_whole(tmp_path / "two")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--stepps", 4), 2, "No such option: --stepps"),
        (("--steps", 0), 2, "--steps"),
        (("--data", "missing.jsonl"), 3, "missing.jsonl"),
    ],
)
def test_what_cannot_work_is_said_once(
    crash: Any, dense: Any, data: Path, tmp_path: Path, options: tuple[object, ...], code: int, words: str
) -> None:
    told = crash(tmp_path / "out", ("tune", dense("llama"), "--data", data, *SHORT, "--steps", 1, *options), ranks=2)
    assert told["codes"] == [code, code], told["said"]
    assert told["said"][0].count(words) == 1
    assert not told["said"][1]


def test_who_is_not_refused_ends_with_who_is(crash: Any, dense: Any, data: Path, tmp_path: Path) -> None:
    """The first alone looks at what is in the way."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    told = crash(tmp_path / "out", ("tune", dense("llama"), "--data", data, "--steps", 1), ranks=2)
    assert told["codes"] == [2, 2], told["said"]
    assert told["said"][0].count("is not empty") == 1
    assert not told["said"][1]


@pytest.fixture
def check_sharded(run_cli: Any, crash: Any, data: Path, tmp_path: Path) -> Any:
    """`check_sharded(source, held_out)`: two processes that hold a half of the model each train it as one process does,
    and evaluate it so after every step."""

    def check(source: Path, held_out: Path) -> None:
        job = (
            "tune",
            source,
            "--data",
            data,
            "--eval-data",
            held_out,
            *SHORT,
            "--steps",
            4,
            "--eval-every",
            1,
            "--json",
        )
        one = run_cli(*job[:2], tmp_path / "one", *job[2:], "--batch-size", 2, "--json")
        assert one.code == 0, one.stderr
        two = crash(tmp_path / "two", (*job, "--batch-size", 1, "--json"), ranks=2, environment=FSDP)
        assert two["codes"] == [0, 0], two["stderr"]
        losses = [[point["eval_loss"] for point in told["curve"]] for told in (one.json, json.loads(two["stdout"]))]
        assert losses[1] == pytest.approx(losses[0], abs=1e-4)
        before, first, second = (tensors_of(path) for path in (source, tmp_path / "one", tmp_path / "two"))
        changed = [name for name, tensor in first.items() if not tensor.equal(before[name])]
        assert len(changed) > 10
        for name in changed:
            assert (second[name] - first[name]).norm() <= 0.02 * (first[name] - before[name]).norm(), name

    return check


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [("--keep", 0.5), ("--keep", 0.5, "--experts", 8), ("--keep", 1.0)])
def test_moefied_models_are_sharded(
    check_sharded: Any, dense: Any, moefy: Any, tmp_path: Path, options: tuple[object, ...]
) -> None:
    """Also where few tokens are evaluated between steps, for which kernels would lay matrices out anew."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(f'{{"text": "{words}"}}\n' for words in ("lo mi", "ka", "re su")))
    check_sharded(moefy(dense("llama"), *options).path, few)


@pytest.mark.exhaustive
def test_codes_that_embeddings_and_head_share_are_sharded(
    check_sharded: Any, compress: Any, dense: Any, upcycle: Any, data: Path
) -> None:
    tied = upcycle(dense("llama-wide-heads"), "--experts", 4).path
    included = "--include", "attention,embeddings", "--group-size", 16
    check_sharded(compress(tied, "--method", "quantize", "--bits", 4, *included).path, data)


def test_one_is_asked_to_stop(crash: Any, dense: Any, data: Path, tmp_path: Path) -> None:
    """All stop at the same step, and go on to the same bytes. The first alone writes digests."""
    job = ("tune", dense("llama"), "--data", data, *SHORT, "--steps", 6, "--save-every", 2, "--batch-size", 1)
    stopped = crash(tmp_path / "out", job, at="digests.json", sent="SIGTERM", ranks=2)
    assert stopped["codes"] == [75, 75], stopped["said"]
    assert stopped["said"][0].count("--resume") == 1
    assert "--resume" not in stopped["said"][1]
    alone = crash(tmp_path / "out", (*job, "--resume"))
    assert alone["code"] == 2, "its steps would be of fewer rows"
    assert "begun by 2 processes" in alone["stderr"]
    assert crash(tmp_path / "out", (*job, "--resume"), ranks=2)["codes"] == [0, 0]
    assert crash(tmp_path / "whole", job, ranks=2)["codes"] == [0, 0]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_one_is_killed(crash: Any, dense: Any, data: Path, tmp_path: Path) -> None:
    """The other ends by itself, resumably."""
    job = ("tune", dense("llama"), "--data", data, *SHORT, "--steps", 6, "--save-every", 2, "--batch-size", 1)
    told = crash(tmp_path / "out", job, at=9, ranks=2, rank=0)
    assert told["codes"] == [-signal.SIGKILL, 75], told["said"]
