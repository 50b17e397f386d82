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
