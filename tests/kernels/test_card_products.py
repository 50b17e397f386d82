"""What the kernels of cards compute, against dense matrices: on a card, or with TRITON_INTERPRET=1 on a CPU.

`test_card.py` runs this file with TRITON_INTERPRET=1 from the start: Triton chooses when it is imported.
"""

import importlib
import os
from typing import Any

import pytest
import torch
from kinds import MIXTRAL, layout
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from moetool.kernels import card, products
from moetool.kernels.table import Table
from moetool.numerics.packing import pack
from moetool.numerics.quantization import BITS, is_whole
from moetool.numerics.trellis import WIDTHS
from moetool.representations import parse_representation
from moetool.runtime.modules.experts import SharedBaseExperts

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
pytestmark = [] if IS_INTERPRETED else pytest.mark.cuda

# Bytes that serve whole rows, and those that do not.
SHAPES = [(16, 160), (9, 32), (14, 64)]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
FORMS = [
    *("dense", "quantised:1:32", "quantised:2:row", "quantised:3:16", "quantised:4:32", "quantised-weight:8:16"),
    *("nf4", "int8", "low-rank:5", "quantised-low-rank:8:3:row", "quantised-low-rank:5:4:row", "sparse:0.7:1"),
    *("sparse-magnitude:0.2", "low-rank-sparse:3:sparse-magnitude:0.1"),
]
# A byte below another or none; several blocks of rows and columns, the last ones in part; columns that are not aligned.
TRELLISES = [("row", (8, 48)), ("32", (40, 160)), ("128", (8, 256)), ("4", (24, 36))]
TRANSPOSED = [("row", (8, 48)), ("16", (72, 48)), ("4", (24, 36))]


@pytest.fixture(autouse=True)
def any_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes arrays of one number for numbers, which newer versions of NumPy refuse."""
    if not IS_INTERPRETED:
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def encoded(spec: str, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Any:
    """A random matrix in a form."""
    form = parse_representation(spec)
    weight = form.build(shape, dtype, torch.device("cpu"))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    weight.load_state_dict(weight.state_dict() | form.encode(values, dtype))
    return weight.requires_grad_(False).to(DEVICE)


def coded(spec: str, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Any:
    """Any codes, so that all and all windows are met, and any scales; of whole numbers the last code is spare."""
    weight: Any = parse_representation(spec).build(shape, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**weight.bits - is_whole(weight.bits), (shape[0] * shape[1],), generator=generator)
    weight.codes.copy_(pack(codes.byte(), weight.bits))
    weight.scales.detach().normal_(generator=generator)
    return weight.requires_grad_(False).to(DEVICE)


def random(*size: int, seed: int = 9) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def expected(weights: list[Any], chosen: Tensor, inputs: Tensor, *, transposed: bool = False) -> Tensor:
    matrices = [weight.dense().float().T if transposed else weight.dense().float() for weight in weights]
    nothing = torch.zeros_like(matrices[0])
    rows = [
        (matrices[own] if 0 <= own < len(weights) else nothing) @ each
        for own, each in zip(chosen.tolist(), inputs, strict=True)
    ]
    return torch.stack(rows)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("spec", FORMS)
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_tokens_meet_the_matrices_that_they_chose(spec: str, dtype: torch.dtype) -> None:
    shape = SHAPES[(FORMS.index(spec) + list(ROUNDING).index(dtype)) % len(SHAPES)]
    weights = [encoded(spec, shape, dtype, seed) for seed in range(3)]
    table = Table([weight.products() for weight in weights], shape, weights)
    for experts in ([2, 0, -1], [1, 2, 2, 3, 2, 2, 0, 2]):
        chosen, inputs = torch.tensor(experts, device=DEVICE), random(len(experts), shape[1])
        assert error(card.routed(table, chosen, inputs), expected(weights, chosen, inputs)) < 2e-6


@pytest.mark.parametrize(
    ("bits", "form", "group", "shape", "transposed"),
    [
        *((bits, "trellis", *each, False) for bits in WIDTHS for each in TRELLISES),
        *((bits, "trellis", *each, True) for bits in WIDTHS for each in TRANSPOSED),
        *((bits, "quantised", "32", (40, 160), False) for bits in BITS),
        *((bits, "quantised", "16", (72, 48), True) for bits in BITS),
        *((bits, "quantised", "16", (36, 48), False) for bits in (5, 6)),
    ],
)
def test_tokens_meet_matrices_in_few_bits(
    bits: int, form: str, group: str, shape: tuple[int, int], transposed: bool
) -> None:
    dtype = list(ROUNDING)[bits % 3]
    weights = [coded(f"{form}:{bits}:{group}", shape, dtype, seed) for seed in range(3)]
    table = Table(
        [((weight.operand(transposed=transposed),),) for weight in weights],
        shape[::-1] if transposed else shape,
        weights,
    )
    for experts in ([2, 0, -1], [1, 2, 2, 0, 2], [1, 2, 2, 3, 2, 2, 0, 2, 2]):
        chosen, inputs = torch.tensor(experts, device=DEVICE), random(len(experts), table.shape[1])
        wanted = expected(weights, chosen, inputs, transposed=transposed)
        assert error(card.routed(table, chosen, inputs), wanted) < 2e-6


@pytest.mark.parametrize(
    ("bits", "form", "group", "shape"),
    [
        *((bits, "trellis", *each) for bits in WIDTHS for each in TRELLISES),
        *((bits, "quantised", "32", (40, 160)) for bits in BITS),
        *((bits, "quantised", "16", (36, 48)) for bits in (5, 6)),
    ],
)
def test_few_bits_are_unpacked_as_plain_torch_does(bits: int, form: str, group: str, shape: tuple[int, int]) -> None:
    """To the last bit: a number is one product."""
    dtype = list(ROUNDING)[bits % 3]
    weight = coded(f"{form}:{bits}:{group}", shape, dtype, bits)
    assert card.unpacked(weight.operand(), torch.float32).equal(weight.dense())
    base = coded(f"{form}-weight:{bits % 4 + 1}:{group}", shape, dtype, 7)
    assert card.summed([weight.operand(), base.operand()], torch.float32).equal(weight.dense() + base.dense())


@pytest.mark.parametrize("spec", ["quantised-rows:6.0.6.4:32", "quantised-rows:0.8.8:row", "trellis-rows:3.5.5.3:32"])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_rows_in_different_bits_are_put_in_their_places(spec: str, dtype: torch.dtype) -> None:
    shape = (72, 160)
    weights = [encoded(spec, shape, dtype, seed) for seed in range(3)]
    table = Table([weight.products() for weight in weights], shape, weights)
    for experts in ([2, 0, -1], [1, 2, 2, 3, 2, 2, 0, 2]):
        chosen, inputs = torch.tensor(experts, device=DEVICE), random(len(experts), shape[1])
        assert error(card.routed(table, chosen, inputs), expected(weights, chosen, inputs)) < 2e-6


def test_experts_may_be_of_every_form_at_once() -> None:
    """And of several group sizes, numbers and ranks; some of them nothing at all."""
    shape, specs = (16, 64), [*FORMS, "trellis:3:16", "trellis:2:row", "quantised:2:16", "low-rank:0", "low-rank:2"]
    specs += ["quantised-rows:0.8.8:16", "trellis-rows:8.0.8:row"]
    weights = [encoded(spec, shape, list(ROUNDING)[i % 3], i) for i, spec in enumerate(specs)]
    table = Table([weight.products() for weight in weights], shape, weights)
    chosen, inputs = torch.arange(len(specs), device=DEVICE).flip(0), random(len(specs), shape[1])
    assert error(card.routed(table, chosen, inputs), expected(weights, chosen, inputs)) < 2e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_matrices_are_unpacked_and_rounded_once(shape: tuple[int, int]) -> None:
    for dtype, rounding in ROUNDING.items():
        given = random(3, shape[1])
        for specs in (
            ["quantised:3:16"],
            ["nf4", "dense"],
            ["sparse:0.7:1"],
            ["sparse:0.5:2", "int8", "quantised:2:8"],
        ):
            if shape[1] % 8:
                continue
            weights = [encoded(spec, shape, dtype, seed) for seed, spec in enumerate(specs)]
            operands = [chain[0] for weight in weights for chain in weight.products()]
            exact = sum(weight.dense().float() for weight in weights)
            assert isinstance(exact, Tensor)
            assert error(card.summed(operands, dtype), exact) < rounding
            assert error(card.unpacked_linear(operands, given.to(dtype)), given @ exact.T) < 4 * rounding


@pytest.mark.parametrize(
    ("specs", "base"),
    [
        (("quantised:3:16", "dense", "low-rank:5"), "quantised-weight:4:16"),
        (("low-rank-sparse:2:sparse:0.8:3",), "nf4"),
        (("trellis:1:16", "trellis:3:16", "trellis-weight:2:8"), "trellis-weight:4:16"),
    ],
)
def test_a_layer_computes_what_it_does_in_plain_torch(specs: Any, base: str, monkeypatch: Any) -> None:
    """Tokens one by one, a few, and many."""
    config = MixtralConfig(hidden_size=MIXTRAL.hidden, intermediate_size=MIXTRAL.intermediate, num_local_experts=4)
    config._experts_implementation = "eager"
    module = SharedBaseExperts(MixtralExperts(config), layout(MIXTRAL, *specs, base=base))
    generator = torch.Generator().manual_seed(0)
    for name, tensor in module.state_dict().items():
        if tensor.dtype == torch.uint8:
            tensor.random_(0, 256, generator=generator)
        elif not name.endswith("positions"):
            tensor.normal_(std=0.2, generator=generator)
    module = module.to(DEVICE)
    monkeypatch.setattr(products, "_kernels", lambda inputs: card)
    with torch.no_grad():
        kernels = module.on_kernels()
        for tokens in (1, 3, 40):
            hidden = random(tokens, MIXTRAL.hidden, seed=tokens)
            weights, chosen = random(tokens, 4, seed=50 + tokens).softmax(-1).topk(2)
            found = kernels.forward(hidden, chosen, weights)
            assert error(found, module.eager(hidden, chosen, weights)) < 1e-5
