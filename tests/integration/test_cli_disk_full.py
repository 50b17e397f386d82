"""No room in the middle of a job: a sentence and 4, and `--resume` goes on when there is some."""

import contextlib
import json
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import contents
from sampling import sampled


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """The kernel refuses to let any file of this process grow beyond it, whichever library writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


JOBS: dict[str, tuple[Any, ...]] = {
    "d2moe": ("compress", "{mixtral}", "--method", "d2moe", "--rank", 4, "{text}"),
    "hybrid": ("compress", "{mixtral}", "--method", "hybrid", "--ratio", 0.4, "--group-size", 16, "{text}"),
    "ders-quantize": ("compress", "{mixtral}", "--method", "ders-quantize", "--bits", 4, "--group-size", 16),
    "vanilla": ("upcycle", "{llama}", "--experts", 2, "--top-k", 1),
    "tune": ("tune", "{mixtral}", "--data", "{examples}", "--steps", 2, "--save-every", 1, "--batch-size", 1),
}
# Bytes at which files are cut: bases, candidates, encoded differences, weights, checkpoints of the training.
LIMITS = {"d2moe": 20_000, "hybrid": 16_000, "ders-quantize": 20_000, "vanilla": 60_000, "tune": 600_000}


@pytest.mark.parametrize("job", sampled(JOBS, ("hybrid", "vanilla", "tune")))
def test_no_room(run_cli: Any, dense: Any, tiny_mixtral: Path, tiny_text: Path, tmp_path: Path, job: str) -> None:
    examples = tmp_path / "examples.jsonl"
    examples.write_text("\n".join(json.dumps({"prompt": "Say it: ", "completion": f"word {n}"}) for n in range(4)))
    places = {"mixtral": tiny_mixtral, "llama": dense("llama"), "examples": examples}
    arguments: list[Any] = []
    for part in JOBS[job]:
        if part == "{text}":
            arguments += ["--calibration", tiny_text, "--mix", 0, "--samples", 4, "--sequence-length", 32]
        else:
            arguments.append(part.format(**places) if isinstance(part, str) else part)
    command, source, *options = arguments
    quiet = run_cli(command, source, tmp_path / "quiet", *options)
    assert quiet.code == 0, quiet.stderr
    output = tmp_path / "out"
    with files_of_at_most(LIMITS[job]):
        result = run_cli(command, source, output, *options)
    assert result.code == 4, result.stderr
    assert "Cannot write" in result.stderr
    assert re.search(r"needs \d+ bytes, \d+ (bytes )?are free", result.stderr), result.stderr
    again = run_cli(command, source, output, *options, "--resume")
    assert again.code == 0, again.stderr
    assert contents(output) == contents(tmp_path / "quiet")


RESULTS: dict[str, tuple[Any, ...]] = {
    "page": ("report", "MODEL", "{}.html", "--data", "missing.txt"),
    "results": ("eval", "MODEL", "--data", "missing.txt", "--output", "{}.json"),
    "table": ("compare", "MODEL", "--methods", "d2moe", "--ratios", 0.4, "--data", "missing.txt", "--output", "{}.md"),
    "picture": ("routing", "MODEL", "--data", "missing.txt", "--plot", "{}.svg"),
}


@pytest.mark.parametrize("folder", ["full", "read-only"])
@pytest.mark.parametrize("kind", RESULTS)
def test_no_room_for_a_result_is_found_before_the_work(
    run_cli: Any, tiny_mixtral: Path, tmp_path: Path, kind: str, folder: str
) -> None:
    if kind == "picture":
        pytest.importorskip("matplotlib")
    place = tmp_path if folder == "full" else Path("/proc/1")  # where root may not write either
    words = [str(tiny_mixtral) if word == "MODEL" else str(word).format(place / "result") for word in RESULTS[kind]]
    with files_of_at_most(10_000) if folder == "full" else contextlib.nullcontext():
        result = run_cli(*words)
    assert result.code == 4, result.stderr
    assert result.stderr.startswith(f"error: Cannot write {place / 'result'}"), result.stderr
    assert not list(tmp_path.iterdir())
