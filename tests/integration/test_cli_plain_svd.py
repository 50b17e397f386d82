"""The baselines among low-rank methods: `compress --method plain-svd` and `mean-svd`."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import config_of, contents, logits, relative_error, weight_bytes
from sampling import sampled
from torch import Tensor

from moetool.architectures import ROLES
from moetool.job.job import Source

METHODS = ("plain-svd", "mean-svd")


@pytest.fixture(scope="module")
def made(run_cli: Any, tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`made("plain-svd", "--rank", 5)`: what `compress` writes, once; no text is given."""
    done: dict[tuple[object, ...], Path] = {}

    def make(*options: object) -> Path:
        if options not in done:
            done[options] = tmp_path_factory.mktemp("svd") / "model"
            result = run_cli("compress", tiny_mixtral, done[options], "--method", *options)
            assert result.code == 0, result.stderr
        return done[options]

    return make


def truncated(matrix: Tensor, rank: int) -> Tensor:
    u, s, v = torch.linalg.svd(matrix.double())
    return (u[:, :rank] * s[:rank]) @ v[:rank]


@pytest.mark.parametrize("method", METHODS)
def test_factors_are_the_truncated_svd(made: Any, tiny_mixtral: Path, method: str) -> None:
    source, result = (Source.open(path).experts for path in (tiny_mixtral, made(method, "--rank", 5)))
    for layer in source.moe_layers:
        assert result.layout(layer).is_baseless == (method == "plain-svd")
        for role in ROLES:
            matrices = [source.dense(layer, expert, role) for expert in range(source.shape.experts)]
            base = torch.stack(matrices).mean(0) if method == "mean-svd" else torch.zeros_like(matrices[0])
            for expert, matrix in enumerate(matrices):
                found = result.dense(layer, expert, role).double()
                torch.testing.assert_close(found, base + truncated(matrix - base, 5), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "ratio"), sampled(product(METHODS, (0.2, 0.4)), zip(METHODS, (0.2, 0.4), strict=False))
)
def test_a_ratio_is_met_with_the_same_share_of_every_matrix(
    made: Any, tiny_mixtral: Path, method: str, ratio: float
) -> None:
    path = made(method, "--ratio", ratio)
    assert -0.005 <= weight_bytes(path) / weight_bytes(tiny_mixtral) - (1 - ratio) <= 0
    layers = config_of(path)["quantization_config"]["layers"].values()
    ranks = {int(spec.split(":")[1]) for layer in layers for role in ROLES for spec in layer[role]}
    assert max(ranks) - min(ranks) <= 1


@pytest.mark.parametrize("method", METHODS)
def test_the_result_runs(run_cli: Any, made: Any, tiny_tokens: Tensor, tmp_path: Path, method: str) -> None:
    tokens, path = tiny_tokens[1000:1128].view(2, 64), made(method, "--ratio", 0.4)
    expected = logits(path, tokens)
    assert run_cli("export", path, tmp_path / "dense").code == 0
    assert relative_error(logits(tmp_path / "dense", tokens), expected) < 1e-4
    assert run_cli("verify", path).code == 0


def test_factors_of_an_expert_by_itself_can_be_quantized(run_cli: Any, made: Any, tmp_path: Path) -> None:
    done = run_cli("quantize-delta", made("plain-svd", "--rank", 8), tmp_path / "out", "--bits", 8, "--group-size", 8)
    assert done.code == 0, done.stderr
    readers = [Source.open(path).experts for path in (made("plain-svd", "--rank", 8), tmp_path / "out")]
    assert readers[1].layout(0).is_baseless
    assert relative_error(readers[1].dense(0, 1, "up"), readers[0].dense(0, 1, "up")) < 0.02


def test_two_processes_write_the_same(crash: Any, tiny_mixtral: Path, tmp_path: Path) -> None:
    job = ("compress", tiny_mixtral, "--method", "plain-svd", "--ratio", 0.4, "--shard-size", "40kB")
    for ranks in (1, 2):
        assert crash(tmp_path / str(ranks), job, ranks=ranks, rank=0)["code"] == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


@pytest.mark.parametrize(
    ("options", "says"), [((), "Give one of --ratio, --size or --rank."), (("--ratio", 0.99), "is not possible here")]
)
def test_what_cannot_be(run_cli: Any, tiny_mixtral: Path, tmp_path: Path, options: Any, says: str) -> None:
    refused = run_cli("compress", tiny_mixtral, tmp_path / "out", "--method", "plain-svd", *options)
    assert refused.code == 2
    assert says in refused.stderr
