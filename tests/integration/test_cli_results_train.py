"""Whatever `compress` and `upcycle` write can be trained on, and computed with in 16 bits, like the model it is of."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load, logits
from dense_families import build_dense
from sampling import sampled
from torch import Tensor

from moetool.stages import stages
from moetool.tune.choice import choose

# One layer, and enough numbers in a matrix for a rank to be cheaper.
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
TEXT = ("--samples", 8, "--sequence-length", 64)

COMPRESSED = {
    "default": "d2moe --ratio 0.3",
    "factors in few bits": "d2moe --rank 6 | quantize-delta --bits 4 --group-size 8",
    "shared u": "d2moe --ratio 0.3 --share u",
    "shared v": "d2moe --ratio 0.3 --share v",
    "activation-aware": "d2moe --ratio 0.3 --svd activation-aware",
    "pruned base": "d2moe --ratio 0.3 --prune-base 0.1 --pruning static",
    "factored base": "d2moe --ratio 0.3 --prune-base 0.2 --pruning svd",
    "hybrid": "hybrid --ratio 0.4 --group-size 16",
    "hybrid, few bits": "hybrid --ratio 0.5 --group-size 32 --base-bits 3",
    "codes": "ders-quantize --bits 4 --group-size 16 --base-bits 8",
    "few numbers": "ders-sparsify --drop 0.5 --select magnitude",
    "few numbers and a rank": "ders-sparsify --drop 0.7 --rank 4",
    "auto": "auto --ratio 0.4 --group-size 16",
    "no base": "quantize --bits 4 --group-size 16 --rotate",
    "factors of deltas to the mean": "mean-svd --ratio 0.3",
    "factors of experts": "plain-svd --ratio 0.2",
    **{f"fewer by {name}": f"{name} --experts 3" for name in ("reap", "frequency", "naee", "hc-smoe", "m-smoe")},
    "fewer by number": "drop-experts --drop 1",
}
WITHOUT_TEXT = ("ders-sparsify", "mean-svd", "plain-svd", "drop-experts")
UPCYCLED = {
    "vanilla": "vanilla",
    "drop": "drop",
    "fine-grained": "fine-grained",
    "ders-lowrank": "ders-lowrank --rank 2",
    "ders-sparse": "ders-sparse --drop 0.9",
    "pesc": "pesc",
    "simoe": "simoe",
    "branch-train-mix": "branch-train-mix",
    "add-expert": "add-expert",
}
# What is computed in while fp32 weights are trained.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS, RATE = 4, 2e-4


def train(model: Any, windows: Tensor, steps: int, rate: float, dtype: torch.dtype = torch.float32) -> Any:
    """AdamW on batches of 8 windows, with a loss scale for fp16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    for step in range(steps):
        batch = windows[8 * step % len(windows) :][:8]
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="module")
def windows(tiny_tokens: Tensor) -> Tensor:
    return tiny_tokens[: 64 * (len(tiny_tokens) // 64)].view(-1, 64)


@pytest.fixture(scope="module")
def trained_dense(save_model: Any, windows: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model that has learnt a little of the text."""
    model = train(build_dense("llama", **SMALL), windows[16:], 60, 1e-2)
    return save_model(model.eval(), tmp_path_factory.mktemp("trained") / "dense")


@pytest.fixture(scope="module")
def trained_moe(
    run_cli: Any, save_model: Any, trained_dense: Path, windows: Tensor, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same with experts that have learnt different things."""
    start = tmp_path_factory.mktemp("start") / "model"
    made = run_cli("upcycle", trained_dense, start, "--method", "drop", "--experts", 4, "--no-proof")
    assert made.code == 0, made.stderr
    model = train(load(start), windows[16:], 25, 5e-3)
    return save_model(model.eval(), tmp_path_factory.mktemp("trained") / "moe")


@pytest.fixture(scope="module")
def loss_of(windows: Tensor) -> Callable[[Any], float]:
    """`loss_of(model)` on text that it is not trained on while it is tested."""

    def measure(model: Any) -> float:
        with torch.inference_mode():
            return float(model(input_ids=windows[:8], labels=windows[:8], use_cache=False).loss)

    return measure


@pytest.fixture(scope="module")
def lost(windows: Tensor, loss_of: Callable[[Any], float]) -> Callable[[Path, torch.dtype], float]:
    """`lost(path, dtype)`: what a few steps of training, on what `tune` would train, add to the loss."""

    @cache
    def measure(path: Path, dtype: torch.dtype) -> float:
        model = load(path)
        before = loss_of(model)
        choose(model, "auto", freeze_shared=False)
        return loss_of(train(model, windows[8:40], STEPS, RATE, dtype)) - before

    return measure


@pytest.fixture(scope="module")
def result(
    run_cli: Any, tiny_text: Path, trained_dense: Path, trained_moe: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, Path]]:
    """`result("compress", "default")`: a model, and what was made of it."""

    @cache
    def make(command: str, name: str) -> tuple[Path, Path]:
        output = tmp_path_factory.mktemp(command) / "model"
        source = trained_moe if command == "compress" else trained_dense
        chosen, _, then = (COMPRESSED if command == "compress" else UPCYCLED)[name].partition(" | ")
        more: tuple[object, ...] = ("--experts", 4, "--no-proof")
        if command == "compress":
            more = () if chosen.startswith(WITHOUT_TEXT) else ("--calibration", tiny_text, "--mix", 0, *TEXT)
        if name == "branch-train-mix":
            more = ("--source", source, "--source", source, "--no-proof")
        if name == "add-expert":
            source = make("upcycle", "branch-train-mix")[1]
            more = ("--source", trained_dense)
        made = run_cli(command, source, output, "--method", *chosen.split(), *more)
        assert made.code == 0, made.stderr
        if then:
            between, output = output, output.with_name("then")
            made = run_cli(then.split()[0], between, output, *then.split()[1:])
            assert made.code == 0, made.stderr
        return source, output

    return make


KINDS = [("compress", name) for name in COMPRESSED] + [("upcycle", name) for name in UPCYCLED]
# Those that differ in what is trained: factors, codes, few numbers, fewer experts, adapters, masks.
FEW = [
    *(("compress", name) for name in ("shared u", "hybrid", "few numbers and a rank", "no base", "fewer by reap")),
    *(("upcycle", name) for name in ("fine-grained", "ders-lowrank", "pesc", "simoe")),
]
each_kind = pytest.mark.parametrize(("command", "name"), sampled(KINDS, FEW), ids=[" ".join(kind) for kind in KINDS])


def test_every_method_is_here() -> None:
    for command, tried in (("compress", COMPRESSED), ("upcycle", UPCYCLED)):
        methods = {name for name, stage in stages().items() if stage.method_of == command}
        assert {arguments.split()[0] for arguments in tried.values()} >= {
            name.removeprefix("upcycle-") for name in methods
        }


@pytest.mark.parametrize(
    ("command", "name", "precision"),
    sampled(
        ((*kind, precision) for kind in KINDS for precision in PRECISIONS),
        # In fp16, where numbers are smallest, and one of them in the others.
        [
            *((*kind, "fp16") for kind in FEW),
            *((*FEW[0], precision) for precision in ("fp32", "bf16")),
        ],
    ),
)
def test_training_loses_no_more_than_of_the_original(
    lost: Any, result: Any, command: str, name: str, precision: str
) -> None:
    source, output = result(command, name)
    assert lost(output, PRECISIONS[precision]) < max(lost(source, PRECISIONS[precision]), 0) + 0.01


@each_kind
def test_fp16_computes_the_same(result: Any, windows: Tensor, command: str, name: str) -> None:
    output = result(command, name)[1]
    tokens = windows[:2]
    with torch.inference_mode():
        half = load(output, torch.float16)(input_ids=tokens, use_cache=False).logits
    full = logits(output, tokens)
    errors = (half.float() - full).norm(dim=-1) / full.norm(dim=-1)
    assert errors.median() < 0.005  # not of each token: one whose routers are close to a tie goes elsewhere
    assert half.isfinite().all()
