"""How errors in the rows of a projection count together."""

from pathlib import Path

import pytest
import torch

from moetool.calibration import row_moments
from moetool.calibration.row_moments import ProjectionMetric, RowMoments, row_moment_numbers, save_row_moments

CPU = torch.device("cpu")


@pytest.fixture
def chunks_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_moments, "LINKED_ROWS", 8)


@pytest.mark.usefixtures("chunks_of_eight")
def test_moments_of_a_chunk_come_back_from_a_file(tmp_path: Path) -> None:
    """To what fp16 leaves of correlations; of gradients that differ by orders of magnitude, too."""
    half = torch.randn(28, 20, generator=torch.Generator().manual_seed(1)) * torch.logspace(-12, 3, 20)
    moments, gradients = RowMoments(20, 7, CPU), half.unflatten(0, (4, 7)).repeat_interleave(2, 0).flatten(0, 1)
    for part in gradients.split(14):
        moments.add(part)
    save_row_moments(tmp_path / "rows", {"b": moments, "a": RowMoments(3, 7, CPU)})
    metric = ProjectionMetric.read(tmp_path / "rows", "b", CPU)
    assert sum(own.numel() for own in metric.correlations) == row_moment_numbers(20) == 64 + 64 + 16
    for rows in (torch.arange(8), torch.tensor([15, 9]), torch.arange(16, 20)):
        own = gradients[:, rows]
        size = own.norm(dim=0)
        unit = metric.moment(rows) / size / size[:, None]
        torch.testing.assert_close(unit, (own / size).T @ (own / size), atol=1e-3, rtol=0)


def test_rows_without_gradients_do_not_count(tmp_path: Path) -> None:
    gradients = torch.randn(9, 6, generator=torch.Generator().manual_seed(2)) * torch.tensor([1, 0, 1, 1, 0, 1])
    moments = RowMoments(6, 3, CPU)
    moments.add(gradients)
    save_row_moments(tmp_path / "rows", {"a": moments})
    metric = ProjectionMetric.read(tmp_path / "rows", "a", CPU)
    assert metric.moment(torch.arange(6)).isfinite().all()
    assert torch.linalg.cholesky(metric.among(torch.arange(6))).isfinite().all()
