"""Decompositions on a card, against those on a CPU."""

import pytest
import torch
from draws import normal64

from moetool.calibration.output_metric import OutputMetric
from moetool.numerics.factorize import factorize, truncate, whitened_error
from moetool.numerics.quantization import BITS, dequantize, quantize
from moetool.numerics.root import square_root
from moetool.representations import Measured
from moetool.representations.mixed_rows import TrellisRows
from moetool.representations.quantized import Quantized
from moetool.representations.trellis import Trellis

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("shape", [(96, 160), (160, 96)])
def test_whitened_factors_are_as_good(shape: tuple[int, int]) -> None:
    delta = normal64(*shape).float()
    tokens = normal64(400, shape[1]) * torch.logspace(-3, 0, shape[1], dtype=torch.float64)
    gram, errors = tokens.T @ tokens, {}
    for device in ("cpu", "cuda"):
        own, whitening = delta.to(device), gram.to(device)
        factors = truncate(own, factorize(own, gram=whitening, rank=20), 20, torch.float32)
        errors[device] = whitened_error(delta, *(factor.cpu() for factor in factors), gram=gram)
    assert errors["cuda"] == pytest.approx(errors["cpu"], rel=1e-4)


def test_roots_are_roots() -> None:
    regular = normal64(64, 200) @ normal64(64, 200).T
    singular = normal64(64, 20) @ normal64(64, 20).T
    for matrix in (regular, singular):
        root = square_root(matrix.cuda())
        assert (root @ root.T).cpu().allclose(matrix, atol=1e-9 * float(matrix.diagonal().max()))


@pytest.mark.parametrize("bits", BITS)
def test_codes_are_as_good(bits: int) -> None:
    matrix, errors = normal64(32, 128).float(), {}
    for device in ("cpu", "cuda"):
        codes, scales = quantize(matrix.to(device), bits, 32, torch.float32)
        errors[device] = float((dequantize(codes, scales, bits, torch.float32).cpu() - matrix).norm())
    assert errors["cuda"] == pytest.approx(errors["cpu"], rel=1e-3)


@pytest.mark.parametrize("form", [Quantized(2, 32), Trellis(2, 32), TrellisRows((0, 0, 8, 8), 32)])
def test_rows_in_turn_are_as_good(form: Quantized | TrellisRows) -> None:
    matrix, tokens, gradients = normal64(64, 128).float(), normal64(400, 128).float(), normal64(300, 64).float()
    moment, lost = gradients.T @ gradients + 40, {}
    for device in ("cpu", "cuda"):
        gram = (tokens.T @ tokens).to(device)
        measured = Measured(gram, outputs=OutputMetric(moment.to(device)))
        stored = form.encode(matrix.to(device), torch.float32, measured)
        left = matrix - form.decode(stored, (64, 128), torch.float32).float().cpu()
        lost[device] = float(((moment @ left) * (left @ gram.cpu())).sum())
    assert lost["cuda"] == pytest.approx(lost["cpu"], rel=0.05)
