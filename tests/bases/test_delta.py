"""The delta to the base: made in one place, of experts that a sweep reads once."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import RunCli
from torch import Tensor

from moetool.architectures import ROLES, Role, find_architecture
from moetool.bases.delta import Deltas
from moetool.bases.layer_base import LayerBase
from moetool.calibration.streaming import StreamedModel
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.job.calibrated import CalibratedJob

CPU = torch.device("cpu")


def test_a_base_is_made_once_for_all_experts_of_a_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, with zeros where channels of the base are gone."""
    kept = torch.tensor([0, 2])
    base = LayerBase({"up": torch.ones(2, 4, dtype=torch.bfloat16)}, kept, 3, None)
    made: Counter[Role] = Counter()
    full = LayerBase.full
    monkeypatch.setattr(LayerBase, "full", lambda self, role: (made.update([role]), full(self, role))[1])
    deltas = Deltas(lambda expert, role: torch.full((3, 4), 1.5 + expert, dtype=torch.bfloat16), base, CPU)
    for expert in range(3):
        expected = torch.tensor([0.5, 1.5, 0.5])[:, None].expand(3, 4) + expert
        assert deltas.of("up", expert).equal(expected)
    assert made == {"up": 1}


@pytest.mark.parametrize("stored", ["tiny_mixtral", "tiny_mixtral_bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_a_loaded_layer_are_those_on_disk(
    stored: str, dtype: torch.dtype, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read again only where loading has rounded them."""
    checkpoint = Checkpoint.open(request.getfixturevalue(stored))
    architecture = find_architecture(checkpoint.config)
    model = StreamedModel(checkpoint, architecture, dtype, CPU)
    reader = ExpertReader(checkpoint, architecture)
    job = SimpleNamespace(
        source=SimpleNamespace(experts=reader),
        model=model,
        experts=lambda layer: layer.get_submodule(architecture.experts_module),
    )
    rounded = reader.dtype.itemsize > dtype.itemsize
    with model.layer(1) as layer:
        expected = {(expert, role): reader.dense(1, expert, role).float() for expert in range(2) for role in ROLES}
        reads = counted(monkeypatch)
        weights = CalibratedJob.weights(cast(Any, job), 1, layer)
        found = {place: weights(*place).float() for place in expected}
    assert all(found[place].equal(matrix) for place, matrix in expected.items())
    assert reads.total() == (len(expected) if rounded else 0)


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int, Role]]:
    """How often each matrix is read from now on, by layer, expert and role."""
    reads: Counter[tuple[int, int, Role]] = Counter()
    dense = ExpertReader.dense

    def counting(self: ExpertReader, layer: int, expert: int, role: Role) -> Tensor:
        reads[layer, expert, role] += 1
        return dense(self, layer, expert, role)

    monkeypatch.setattr(ExpertReader, "dense", counting)
    return reads


@pytest.mark.parametrize("method", ["d2moe", "hybrid"])
def test_an_expert_is_read_once_per_sweep(
    method: str,
    run_cli: RunCli,
    tiny_mixtral_bf16: Path,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forwards to the loss and back, with every other layer run again on the way; and forwards to be encoded."""
    reads = counted(monkeypatch)
    arguments = ("--method", method, "--ratio", 0.35, "--calibration", tiny_text, "--mix", 0, "--samples", 2)
    result = run_cli(
        "compress",
        tiny_mixtral_bf16,
        "--method",
        "d2moe",
        tmp_path / "out",
        *arguments,
        "--sequence-length",
        16,
        "--no-proof",
    )
    assert result.code == 0, result.stderr
    assert min(reads.values()) >= 2
    assert max(reads.values()) <= 4


@pytest.mark.parametrize("base", ["mean", "ties"])
@pytest.mark.parametrize(
    "command", [("decompose",), ("compress", "--method", "ders-quantize"), ("compress", "--method", "ders-sparsify")]
)
def test_a_base_and_the_deltas_to_it_are_made_of_the_same_read(
    command: tuple[str, ...],
    base: str,
    run_cli: RunCli,
    tiny_mixtral_bf16: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = counted(monkeypatch)
    result = run_cli(command[0], tiny_mixtral_bf16, tmp_path / "out", *command[1:], "--base", base, "--no-proof")
    assert result.code == 0, result.stderr
    assert set(reads.values()) == {1}
