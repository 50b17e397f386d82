"""What neurons do on a text, one layer in memory at a time, against the whole model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moetool.calibration.masking import SHARE, masked_windows
from moetool.calibration.streaming import StreamedModel
from moetool.calibration.sweep import Sweep
from moetool.errors import InvalidInputError
from moetool.moefy.statistics import CHUNK, NeuronStatistics, SampledNetwork
from moetool.quiet import quiet
from moetool.runtime.dense import DenseModel
from moetool.runtime.loading import model_class

FAMILIES = ["gpt2", "llama", "llama-mlp-bias", "phi3", "gpt_neox", "falcon", "gpt_bigcode", "opt", "bert"]
WINDOWS, LENGTH, MOST = 7, 20, 45
LAYERS = 3


@pytest.fixture(scope="module")
def windows(tiny_tokens: Tensor) -> Tensor:
    return tiny_tokens[: WINDOWS * LENGTH].view(WINDOWS, LENGTH)


class Whole:
    """The same numbers from transformers' model and autograd, in fp64."""

    def __init__(self, dense: DenseModel, windows: Tensor, masked: Tensor | None) -> None:
        with quiet():
            model = model_class(dense.checkpoint.config).from_pretrained(dense.checkpoint.path, dtype=torch.float64)
        model.eval()
        self.inputs: list[Tensor] = []
        self.activations: list[Tensor] = []
        for layer in range(dense.layers):
            up = model.get_submodule(dense.architecture.weight_name(layer, "up").removesuffix(".weight"))
            down = model.get_submodule(dense.architecture.weight_name(layer, "down").removesuffix(".weight"))
            up.register_forward_pre_hook(lambda _, given: self.inputs.append(given[0].detach()))
            down.register_forward_pre_hook(self._keep)
        logits = model(input_ids=windows if masked is None else masked).logits
        if masked is None:
            losses = [F.cross_entropy(row[:-1], text[1:]) for row, text in zip(logits, windows, strict=True)]
        else:
            rows = zip(logits, windows, masked != windows, strict=True)
            losses = [F.cross_entropy(row[hidden], text[hidden]) for row, text, hidden in rows]
        torch.stack(losses).sum().backward()

    def _keep(self, _: Any, given: tuple[Tensor, ...]) -> None:
        given[0].retain_grad()
        self.activations.append(given[0])

    def saliency(self, layer: int) -> Tensor:
        kept = self.activations[layer]
        assert kept.grad is not None
        return (kept.detach() * kept.grad).reshape(-1, kept.shape[-1]).sum(0).abs()


@pytest.fixture
def sweep(tmp_path: Path, windows: Tensor, masking_tokenizer: Any) -> Callable[[DenseModel], Sweep]:
    """A sweep in fp64, several batches long."""

    def make(dense: DenseModel) -> Sweep:
        model = StreamedModel(dense.checkpoint, dense.architecture, torch.float64, torch.device("cpu"))
        masked = masked_windows(windows, masking_tokenizer, 0) if dense.architecture.is_encoder else None
        made = Sweep(model, windows, tmp_path, masked=masked)
        made.batch_size = 3
        made.embed()
        return made

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_means_and_samples_are_those_of_the_whole_model(opened: Any, sweep: Any, windows: Tensor, family: str) -> None:
    dense = opened(family)
    run = sweep(dense)
    whole = Whole(dense, windows, run.masked)
    taken = [t for t in range(windows.numel()) if (t + 1) * MOST // windows.numel() > t * MOST // windows.numel()]
    for index in range(LAYERS):
        with run.model.layer(index) as layer:
            statistics = NeuronStatistics(layer, dense.architecture, MOST, windows.numel())
            with statistics.watching():
                run.forward(index, layer)
            inputs = whole.inputs[index].flatten(0, -2)[taken]
            activations = whole.activations[index].detach().flatten(0, -2)
            torch.testing.assert_close(statistics.mean, activations.mean(0), rtol=1e-6, atol=1e-9)
            network = SampledNetwork(layer, dense.architecture, torch.cat(statistics.inputs))
            torch.testing.assert_close(network.inputs, inputs, rtol=1e-6, atol=1e-8)
            found = torch.cat(list(network.activations()))
            torch.testing.assert_close(found, activations[taken], rtol=1e-6, atol=1e-8)
            norms = dense.matrix(index, "down").double().norm(dim=0)
            torch.testing.assert_close(network.output_norms().double(), norms, rtol=1e-6, atol=0)
            assert network.input_rows().equal(
                dense.matrix(index, "gate" if "gate" in dense.architecture.roles else "up").double()
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_saliency_is_that_of_autograd(opened: Any, sweep: Any, windows: Tensor, family: str) -> None:
    dense = opened(family)
    run = sweep(dense)
    whole = Whole(dense, windows, run.masked)
    for index in range(LAYERS):
        with run.model.layer(index) as layer:
            run.forward(index, layer)
    run.head()
    for index in reversed(range(LAYERS)):
        with run.model.layer(index) as layer:
            statistics = NeuronStatistics(layer, dense.architecture, MOST, windows.numel())
            with statistics.watching(gradients=True, loss_scale=run.loss_scale):
                run.backward(index, layer)
            expected = whole.saliency(index)
            torch.testing.assert_close(statistics.saliency, expected, rtol=1e-3, atol=1e-6 * expected.max().item())
            means = whole.activations[index].detach().flatten(0, -2).mean(0)
            torch.testing.assert_close(statistics.mean, means, rtol=1e-6, atol=1e-9)
            assert len(torch.cat(statistics.inputs)) == statistics.size == MOST


def test_what_is_seen_ends_with_the_block(opened: Any, sweep: Any, windows: Tensor) -> None:
    dense = opened("llama")
    run = sweep(dense)
    with run.model.layer(0) as layer:
        statistics = NeuronStatistics(layer, dense.architecture, MOST, windows.numel())
        with statistics.watching():
            run.forward(0, layer)
        before = statistics.mean
        run.forward(0, layer)
        assert list(SampledNetwork(layer, dense.architecture, torch.cat(statistics.inputs)).activations())
        assert statistics.mean.equal(before)
        assert not any(module._forward_pre_hooks for module in layer.modules())


@pytest.mark.parametrize("most", [1, 2, 59, 60, 61, 100, 119, 120, 1000])
@pytest.mark.parametrize("batch", [1, 7, 120])
def test_samples_are_as_many_as_asked_for_and_evenly_spread(opened: Any, sweep: Any, most: int, batch: int) -> None:
    dense, tokens = opened("llama"), 120
    with sweep(dense).model.layer(0) as layer:
        statistics = NeuronStatistics(layer, dense.architecture, most, tokens)
        numbered = torch.arange(tokens).double()[:, None].expand(-1, dense.hidden)
        network = layer.get_submodule(dense.architecture.ffn)
        with statistics.watching(), torch.no_grad():
            for rows in numbered.split(batch):
                network(rows[None])
        taken = torch.cat(statistics.inputs)[:, 0].long()
    assert len(taken) == min(most, tokens)
    gaps = taken.diff()
    assert (gaps > 0).all()
    if len(gaps):
        assert gaps.max() - gaps.min() <= 1


def test_activations_come_in_parts(opened: Any, sweep: Any) -> None:
    dense, tokens = opened("phi3"), 2 * CHUNK + 5
    with sweep(dense).model.layer(0) as layer:
        rows = torch.randn(tokens, dense.hidden, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        network = SampledNetwork(layer, dense.architecture, rows)
        assert [len(part) for part in network.activations()] == [CHUNK, CHUNK, 5]
        some = torch.cat(list(network.activations(3)))
        torch.testing.assert_close(some, torch.cat(list(network.activations()))[::3], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("cut", [0, 7, 60])
def test_processes_sample_what_one_would(opened: Any, sweep: Any, cut: int) -> None:
    """Each the tokens that are its own, in order, at its place in the whole."""
    dense, tokens, most = opened("llama"), 60, 13
    numbered = torch.arange(tokens).double()[:, None].expand(-1, dense.hidden)
    with sweep(dense).model.layer(0) as layer, torch.no_grad():
        network, found = layer.get_submodule(dense.architecture.ffn), []
        for start, stop in ((0, tokens), (0, cut), (cut, tokens)):
            statistics = NeuronStatistics(layer, dense.architecture, most, tokens, start)
            with statistics.watching():
                network(numbered[None, start:stop])
            found.append((statistics.first, torch.cat(statistics.inputs)))
    (_, whole), *parts = found
    assert torch.cat([rows for _, rows in parts]).equal(whole)
    assert [first for first, _ in parts] == [0, len(parts[0][1])]


# -- text with hidden tokens


def test_hidden_tokens(masking_tokenizer: Any) -> None:
    windows = torch.arange(1, 201).repeat(50, 1)
    masked = masked_windows(windows, masking_tokenizer, 0)
    hidden = masked != windows
    assert (masked[hidden] == masking_tokenizer.mask_token_id).all()
    assert hidden.float().mean().item() == pytest.approx(SHARE, abs=0.015)
    assert masked.equal(masked_windows(windows, masking_tokenizer, 0))
    assert not masked.equal(masked_windows(windows, masking_tokenizer, 1))
    assert not masked[0].equal(masked[1])


def test_every_window_hides_something(masking_tokenizer: Any) -> None:
    windows = torch.arange(1, 4).repeat(100, 1)
    assert (masked_windows(windows, masking_tokenizer, 0) != windows).any(1).all()


def test_without_a_mask_token_nothing_can_be_hidden(tiny_tokenizer: Any) -> None:
    with pytest.raises(InvalidInputError, match="no mask token"):
        masked_windows(torch.zeros(1, 4, dtype=torch.long), tiny_tokenizer, 0)
