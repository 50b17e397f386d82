"""Which dtype a job computes in."""

import pytest
import torch

from moetool.job import job
from moetool.job.job import pick_compute_dtype

CPU, CARD = torch.device("cpu"), torch.device("cuda")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("device", "stored", "forward", "gradients"),
    [
        (CPU, FP16, FP32, FP32),
        (CPU, BF16, FP32, FP32),
        (CARD, FP32, FP32, FP32),
        (CARD, BF16, BF16, BF16),
        (CARD, FP16, FP16, BF16),
    ],
)
def test_gradients_are_not_taken_in_fp16_unasked(
    device: torch.device,
    stored: torch.dtype,
    forward: torch.dtype,
    gradients: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job, "has_bfloat16", lambda _: True)
    assert pick_compute_dtype("auto", device, stored) == forward
    assert pick_compute_dtype("auto", device, stored, gradients=True) == gradients
    for name in ("float32", "bfloat16", "float16"):
        assert pick_compute_dtype(name, device, stored, gradients=True) == getattr(torch, name)


def test_a_card_without_bf16_takes_them_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "has_bfloat16", lambda _: False)
    assert pick_compute_dtype("auto", CARD, FP16, gradients=True) == FP32
    assert pick_compute_dtype("auto", CARD, FP16) == FP16
