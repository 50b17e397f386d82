"""Several processes run a calibration text together, each windows of its own, and share out experts."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import check_packed_alike, contents, divergence, logits, tensors_of
from sampling import sampled
from torch import Tensor

from moetool.job.job import Source
from moetool.job.journal import Journal


@pytest.fixture(scope="module")
def jobs(tiny_mixtral, decomposed, tiny_text) -> dict[str, tuple[object, ...]]:
    """On four batches, of which gradients are taken on three."""
    shards = "--shard-size", "20kB"
    text = "--calibration", tiny_text, "--mix", 0, "--samples", 64, "--sequence-length", 64
    compress = "compress", tiny_mixtral, "--method", "d2moe", *shards, *text, "--gradient-samples", 48
    return {
        "d2moe": (*compress, "--ratio", 0.35),
        "included": (*compress, "--ratio", 0.35, "--include", "attention,embeddings"),
        "refined": (*compress, "--ratio", 0.35, "--refine", 3),
        "hybrid": (*compress, "--method", "hybrid", "--ratio", 0.55, "--group-size", 16),
        "quantize": (*compress, "--method", "quantize", "--ratio", 0.5, "--group-size", 16),
        "at once": (*compress, "--rank", 6, "--share", "v", "--merge", "regmean", "--prune-base", 0.2),
        "export": ("export", tiny_mixtral, *shards, *text, "--format", "compressed-tensors", "--group-size", 16),
        "svd-compress": ("svd-compress", decomposed, *shards, "--rank", 6, "--svd", "vanilla"),
    }


@pytest.fixture(scope="module")
def made(crash, jobs, tmp_path_factory) -> Callable[..., Path]:
    """`made(name, 2, seed)`: what two processes write."""
    outputs: dict[tuple[str, int, int], Path] = {}

    def make(name: str, ranks: int, seed: int = 0) -> Path:
        key = name, ranks, seed
        if key not in outputs:
            outputs[key] = tmp_path_factory.mktemp("made") / "model"
            told = crash(outputs[key], (*jobs[name], "--seed", seed), ranks=ranks, rank=ranks - 1)
            assert told["codes"] == [0] * ranks, told["stderr"]
            assert ranks == 1 or not told["stderr"], "the second talked"
        return outputs[key]

    return make


def deviations(one: Path, other: Path) -> Tensor:
    """Of every weight of an expert, relative to the largest in its matrix; layouts are the same."""
    assert contents(one).keys() == contents(other).keys()
    assert (one / "config.json").read_bytes() == (other / "config.json").read_bytes()
    ours, theirs = (Source.open(path).experts for path in (one, other))
    found = []
    for layer in ours.moe_layers:
        for role in ours.shape.roles:
            for expert in range(ours.shape.experts):
                matrix, expected = (reader.dense(layer, expert, role).double() for reader in (ours, theirs))
                found.append(((matrix - expected).abs() / expected.abs().max()).flatten())
    return torch.cat(found)


@pytest.mark.parametrize("name", sampled(["d2moe", "at once", "svd-compress"], ["d2moe", "at once"]))
def test_as_one_would(made, name):
    assert deviations(made(name, 2), made(name, 1)).max() < 1e-5


def check_coded_alike(pairs: list[tuple[Path, Path]], tokens: Tensor) -> None:
    """Sums in another order may turn a code that lies between two, and some of those after it."""
    found = torch.cat([deviations(*pair) for pair in pairs])
    apart = [divergence(logits(one, tokens), logits(other, tokens)) for one, other in pairs]
    # A code that turns moves all rows that are coded after its own, and so the predictions by up to 3e-5.
    assert (found < 1e-5).double().mean() > 0.95
    assert max(apart) < 1e-4


@pytest.fixture(scope="module")
def tokens(tiny_tokens) -> Tensor:
    return tiny_tokens[1000:1256].view(4, 64)


@pytest.mark.parametrize("name", sampled(["hybrid", "quantize"], ["quantize"]))
@pytest.mark.exhaustive
def test_coded_as_one_would(made, tokens, name):
    check_coded_alike([(made(name, 2, seed), made(name, 1, seed)) for seed in range(3)], tokens)


def test_what_is_included_is_coded_as_one_would(made, tokens):
    pair = made("included", 2), made("included", 1)
    assert deviations(*pair).max() < 1e-5
    ours, theirs = map(tensors_of, pair)
    names = [name for name in ours if name.endswith(".moetool.codes") and ".experts." not in name]
    steps = torch.cat([(ours[name].int() - theirs[name].int()).abs().flatten() for name in names])
    assert len(names) == 14
    assert (steps == 0).double().mean() > 0.95
    assert steps.max() <= 4
    assert divergence(*(logits(path, tokens) for path in pair)) < 1e-4


@pytest.mark.parametrize("seed", sampled([0, 1, 2], [0]))
def test_packed_as_one_would(made, seed):
    check_packed_alike(made("export", 1, seed), made("export", 2, seed))


@pytest.mark.exhaustive
def test_refined_as_one_would(made):
    """Steps of gradients make more of what sums in another order leave in the last digits."""
    assert deviations(made("refined", 2), made("refined", 1)).max() < 1e-3


@pytest.mark.parametrize(
    ("name", "killed", "at", "again"), sampled([("d2moe", 1, 9, 2), ("hybrid", 0, 60, 3)], [("d2moe", 1, 9, 2)])
)
def test_one_is_killed(crash, made, jobs, tokens, tmp_path, name, killed, at, again):
    """The other ends by itself, resumably; any number of processes goes on."""
    output, job, began = tmp_path / "out", jobs[name], time.monotonic()
    codes = crash(output, job, at=at, ranks=2, rank=killed)["codes"]
    assert codes[killed] == -signal.SIGKILL
    assert codes[1 - killed] == 75
    assert time.monotonic() - began < 20
    assert any(unit.startswith("reverse/") for unit in Journal(output / ".moetool" / "journal.jsonl", "").units)
    assert crash(output, (*job, "--resume"), ranks=again)["codes"] == [0] * again
    if again == 2:
        assert contents(output) == contents(made(name, 2))
    else:
        check_coded_alike([(output, made(name, 1))], tokens)
