"""What the tests of the command line share: calibration options, and models that were compressed once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CrashDriver
from dense_families import build_dense
from derived_dense import ENCODERS

RunCli = Callable[..., Any]
Options = tuple[object, ...]


@dataclass(frozen=True)
class Compressed:
    """A checkpoint that `moetool compress --json` (or `upcycle`) has written, and what it said. Read-only."""

    path: Path
    told: dict[str, Any]
    log: str


Compress = Callable[..., Compressed]


@pytest.fixture(scope="session")
def calibration(tiny_text: Path) -> Options:
    """Options of a quick calibration on one text: `--calibration`, `--samples`, `--sequence-length`, `--mix`."""
    return "--calibration", tiny_text, "--samples", 16, "--sequence-length", 32, "--mix", 0


@pytest.fixture(scope="session")
def tokens(tiny_tokens: torch.Tensor) -> torch.Tensor:
    """Two windows of 64 tokens, for logits to be compared on."""
    return tiny_tokens[1000:1128].view(2, 64)


@pytest.fixture(scope="session")
def tied(make_mixtral: Any, save_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral in bf16 with one matrix for embedding and head. Read-only."""
    model = make_mixtral(dtype=torch.bfloat16, tie_word_embeddings=True)
    return save_model(model, tmp_path_factory.mktemp("tied") / "model")


def _made_once(run_cli: RunCli, tmp_path_factory: pytest.TempPathFactory, command: str, *always: object) -> Compress:
    """`make(source, *options)`: the result of a command, made once for the same arguments."""
    made: dict[Options, Compressed] = {}

    def make(source: Path, *options: object) -> Compressed:
        if (source, *options) not in made:
            output = tmp_path_factory.mktemp(command) / "model"
            result = run_cli(command, source, output, *always, *options, "--json")
            assert result.code == 0, result.stderr
            made[source, *options] = Compressed(output, result.json, result.stderr)
        return made[source, *options]

    return make


@pytest.fixture(scope="session")
def compress(run_cli: RunCli, calibration: Options, tmp_path_factory: pytest.TempPathFactory) -> Compress:
    """`compress(source, *options)`: the result of `moetool compress`, made once per session for the same arguments."""
    return _made_once(run_cli, tmp_path_factory, "compress", "--method", "d2moe", *calibration)


@pytest.fixture(scope="session")
def dense(
    save_model: Callable[..., Path], masking_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """`dense("llama", seed=0, dtype=torch.float32, **config)`: a saved model of a dense family, with tokenizer files,
    made once per session for the same arguments. Read-only: copy it to change it."""
    made: dict[str, Path] = {}

    def make(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
        key = repr((family, seed, dtype, sorted(overrides.items())))
        if key not in made:
            model = build_dense(family, seed, dtype, **overrides)
            made[key] = save_model(model, tmp_path_factory.mktemp("dense") / f"{family}-{seed}")
            if family in ("bert", *ENCODERS):
                masking_tokenizer.save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def upcycle(run_cli: RunCli, tmp_path_factory: pytest.TempPathFactory) -> Compress:
    """`upcycle(source, *options)`: the result of `moetool upcycle`, made once per session for the same arguments."""
    return _made_once(run_cli, tmp_path_factory, "upcycle")


@pytest.fixture(scope="session")
def moefy(run_cli: RunCli, calibration: Options, tmp_path_factory: pytest.TempPathFactory) -> Compress:
    """`moefy(source, *options)`: the result of `moetool moefy`, made once per session for the same arguments."""
    return _made_once(run_cli, tmp_path_factory, "moefy", *calibration)


@pytest.fixture(scope="session")
def crash() -> Iterator[CrashDriver]:
    """`crash(output, arguments, at=25)`: a command that gets a signal before its 25th change to the output."""
    driver = CrashDriver()
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def base(run_cli: RunCli, calibration: Options, tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `fisher-merge` makes of `tiny_mixtral`."""
    output = tmp_path_factory.mktemp("base") / "base"
    result = run_cli("fisher-merge", tiny_mixtral, output, *calibration)
    assert result.code == 0, result.stderr
    return output


@pytest.fixture(scope="session")
def decomposed(run_cli: RunCli, tiny_mixtral: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `decompose --base BASE` makes of `tiny_mixtral`."""
    output = tmp_path_factory.mktemp("decomposed") / "model"
    result = run_cli("decompose", tiny_mixtral, output, "--base", base)
    assert result.code == 0, result.stderr
    return output


@pytest.fixture(scope="session")
def small(compress: Compress, tiny_mixtral: Path) -> Path:
    """`tiny_mixtral`, compressed by 35 %."""
    return compress(tiny_mixtral, "--ratio", 0.35).path
