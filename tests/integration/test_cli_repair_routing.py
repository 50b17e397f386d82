"""What `moetool repair` trains, and towards whose routing, of models as the commands make them."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moetool.checkpoint.reader import Checkpoint
from moetool.job.job import Source
from moetool.repair.costs import trained_numbers
from moetool.repair.routing import RoutingTarget, in_experts_of, routing_divergence, routing_target
from moetool.repair.training import choose
from moetool.runtime.loading import load_model
from moetool.runtime.modules.routers import Routers

MADE = {
    "quantize": ("--bits", 2, "--group-size", 16),
    "quantize-all": ("--bits", 2, "--group-size", 16, "--include", "attention,embeddings"),
    "d2moe": ("--ratio", 0.4),
    "hybrid": ("--ratio", 0.5),
    "reap": ("--experts", 3),
}


@pytest.fixture(scope="module")
def text(tiny_text: Path) -> tuple[object, ...]:
    return ("--calibration", tiny_text, "--samples", 8, "--sequence-length", 32)


@pytest.fixture
def made(compress: Any, tiny_mixtral: Path, text: tuple[object, ...]) -> Any:
    def of(method: str) -> Path:
        return compress(tiny_mixtral, "--method", method.removesuffix("-all"), *MADE[method], *text).path

    return of


@pytest.mark.parametrize("method", MADE)
def test_headers_tell_how_many_numbers_are_trained(method: str, made: Any) -> None:
    source = Source.open(made(method))
    for trains in ("routers", "small", "all"):
        model = load_model(source.checkpoint, torch.float32, torch.device("cpu"))
        trained = sum(parameter.numel() for parameter in choose(model, trains).values())
        assert trained_numbers(source, trains) == trained


def drift(model: Path, original: Path, tokens: Tensor) -> float:
    """Divergence of a model's routing from its original's."""
    said = []
    for path in (original, model):
        loaded = load_model(Checkpoint.open(path), torch.float32, torch.device("cpu"))
        routers = Routers(loaded)
        with torch.no_grad(), routers.watched():
            loaded(input_ids=tokens, use_cache=False)
        said.append(routers.logits)
    original = torch.stack([in_experts_of(own, None) for own in said[0]], 1).unflatten(0, tuple(tokens.shape))
    return routing_divergence(said[1], original).item()


def test_its_routing_comes_nearer_to_the_originals(
    made: Any, run_cli: Any, tiny_mixtral: Path, text: tuple[object, ...], tiny_tokens: Tensor, tmp_path: Path
) -> None:
    source, tokens = made("quantize"), tiny_tokens[1000:2024].view(16, 64)
    words = ("--to", tiny_mixtral, *text, "--samples", 64, "--held-out", 4, "--steps", 24, "--learning-rate", 0.01)
    found = {}
    for weight in (0, 80):
        output = tmp_path / f"routing-{weight}"
        result = run_cli("repair", source, output, *words, "--routing", weight, "--json")
        assert result.code == 0, result.stderr
        assert result.json["kept_step"] > 0
        found[weight] = drift(output, tiny_mixtral, tokens)
    assert found[80] < found[0] < drift(source, tiny_mixtral, tokens)


def test_records_tell_which_experts_are_left(
    compress: Any, tiny_mixtral: Path, make_mixtral: Any, save_model: Any, tmp_path: Path, text: tuple[object, ...]
) -> None:
    original = Source.open(tiny_mixtral)
    fewer = compress(tiny_mixtral, "--method", "reap", "--experts", 3, *text).path
    routers = [
        [source.checkpoint.read(source.architecture.router_name(layer)) for layer in source.experts.moe_layers]
        for source in (Source.open(fewer), original)
    ]
    found = routing_target(Source.open(fewer), original)
    assert found is not None
    for own, layer, groups in zip(*routers, found.experts.values(), strict=True):
        assert groups is not None
        assert own.equal(layer[[group[0] for group in groups]])
    merged = compress(tiny_mixtral, "--method", "m-smoe", "--experts", 2, *text).path
    found = routing_target(Source.open(merged), original)
    assert found is not None
    assert all(sorted(chain.from_iterable(groups or ())) == [0, 1, 2, 3] for groups in found.experts.values())
    assert routing_target(original, original) == RoutingTarget(dict.fromkeys(original.experts.moe_layers), 4)
    # Whose experts they are is not known of another original, and without the record.
    other = Source.open(save_model(make_mixtral(seed=1), tmp_path / "other"))
    assert routing_target(Source.open(fewer), other) is None
