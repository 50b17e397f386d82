"""Every kind of checkpoint in transformers: offloaded, in 16 bits, saved again, generating in a batch."""

import json
import re
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from kinds import KINDS, save_kind
from safetensors.torch import load_file
from sampling import sampled
from torch import Tensor

import moetool
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import UsageError
from moetool.format.kinds import kinds
from moetool.quiet import quiet
from moetool.representations import representations
from moetool.runtime.loading import model_class
from moetool.runtime.modules.batch_dependence import depends_on_batch
from moetool.runtime.synthesis import apply_synthesis

TOKENS = torch.arange(3, 35).view(2, 16)
GENERATE: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
WIDE = (".centre", ".absmax", ".log_phi", ".multiplier")  # what stays in 32 bits in a model of 16
every_kind = pytest.mark.parametrize("kind", list(KINDS))
several_kinds = pytest.mark.parametrize("kind", sampled(KINDS, list(KINDS)[::3]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The path of a checkpoint of a kind."""
    directory = tmp_path_factory.mktemp("kinds")

    def path(kind: str) -> Path:
        if not (directory / kind).exists():
            save_kind(kind, directory / kind)
        return directory / kind

    return path


def load(path: Path, **options: Any) -> Any:
    with quiet():
        return model_class(Checkpoint.open(path).config).from_pretrained(path, **options)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=TOKENS).logits


@several_kinds
def test_made_dense_it_is_saved_as_what_it_is(kind: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """As an ordinary checkpoint, or with the custom modules that it has."""
    model = moetool.synthesize(load(saved(kind)))
    with quiet():
        model.save_pretrained(tmp_path / "dense")
    torch.testing.assert_close(logits(load(tmp_path / "dense")), logits(model))


def places(model: Any) -> dict[str, str]:
    """A device map that has the decoder layers on disk."""
    found = {}
    for name in [*model.state_dict(), *dict(model.named_buffers())]:
        layer = re.match(r".*?\.(layers?|h)\.\d+(?=\.)", name)
        found[layer[0] if layer else name.rpartition(".")[0]] = "disk" if layer else "cpu"
    return found


@pytest.mark.parametrize(
    ("kind", "by"),
    sampled(
        product(KINDS, ("device map", "accelerate")), zip(KINDS, cycle(("device map", "accelerate")), strict=False)
    ),
)
def test_offloaded_weights_compute_what_loaded_ones_do(
    kind: str, by: str, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for user in ("routed", "networks", "quantized"):  # kernels read weights in memory only, and round otherwise
        monkeypatch.setattr(f"moetool.runtime.modules.{user}.problem", lambda _: "there are none")
    model = load(saved(kind))
    expected = logits(model)
    assert not expected.isnan().any()
    with quiet():
        if by == "device map":
            model = load(saved(kind), device_map=places(model), offload_folder=tmp_path / "off")
        else:
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    for _ in range(2):
        assert logits(model).equal(expected)
    assert any(parameter.is_meta for parameter in model.parameters())


@several_kinds
def test_a_dispatched_model_is_what_it_was(kind: str, saved: Any) -> None:
    model = load(saved(kind))
    expected, tensors = logits(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with quiet():
        accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert logits(model).equal(expected)
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("kind", ["low-rank", "mixture-with-biases", "adapters", "neurons-mlp", "neurons-fixed-biases"])
def test_kernels_let_go_of_offloaded_weights(kind: str, saved: Any) -> None:
    model = load(saved(kind))
    expected = logits(model)
    with quiet():
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    for _ in range(2):
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    held = [module._kernels._made for module in model.modules() if hasattr(module, "_kernels")]
    held += [module._cached.get("neurons") for module in model.modules() if hasattr(module, "_cached")]
    assert held
    assert not any(held)


def test_every_way_to_store_and_every_module_is_among_the_kinds(saved: Any) -> None:
    entries = str([json.loads((saved(kind) / "config.json").read_text()).get("quantization_config") for kind in KINDS])
    assert [kind for kind in representations() if f"'{kind}" not in entries] == []
    assert [kind for kind in kinds() if f"'{kind}'" not in entries] == []


@every_kind
def test_in_16_bits_it_is_what_it_is_and_is_saved_as_it_is(kind: str, saved: Any, tmp_path: Path) -> None:
    """Near the fp32 model, and the same again after saving; what has to stay in fp32 does, bit for bit."""
    whole, stored = load(saved(kind)), load_file(saved(kind) / "model.safetensors")
    exact = logits(whole)
    half = logits(load(saved(kind), dtype=torch.float16))
    assert half.dtype == torch.float16
    assert (half - exact).norm() / exact.norm() < 0.03
    model = load(saved(kind), dtype=torch.bfloat16)
    found = logits(model)
    assert (found - exact).norm() / exact.norm() < 0.2
    with quiet():
        model.save_pretrained(tmp_path)
    again = load_file(tmp_path / "model.safetensors")
    assert set(again) == set(stored)
    for name, tensor in stored.items():
        kept = name.endswith(WIDE) or not tensor.is_floating_point()
        assert again[name].equal(tensor if kept else tensor.bfloat16()), name
    assert logits(load(tmp_path)).equal(found)
    narrowed = whole.bfloat16().state_dict()
    assert all(narrowed[name].equal(tensor) for name, tensor in model.state_dict().items())


@several_kinds
def test_a_batch_generates_with_a_cache_what_each_prompt_does(kind: str, saved: Any) -> None:
    """A prompt of six tokens, padded on the left, beside one of sixteen; with and without a cache."""
    model = load(saved(kind))
    if not model.can_generate() or not hasattr(model, "generate"):
        pytest.skip("an encoder")
    mask = torch.ones_like(TOKENS)
    mask[1, :10] = 0
    batch = model.generate(TOKENS * mask, attention_mask=mask, **GENERATE)
    assert batch.shape == (2, 24)
    if depends_on_batch(model):
        return
    for row, start in ((0, 0), (1, 10)):
        alone = TOKENS[row : row + 1, start:]
        told = model.generate(alone, attention_mask=torch.ones_like(alone), **GENERATE)
        assert told[0].equal(batch[row, start:])
    if "masks" not in kind:  # whose mixture is that of the prompt, which only a cache remembers
        assert model.generate(TOKENS, use_cache=False, **GENERATE)[0].equal(batch[0])


@pytest.mark.parametrize("kind", ["low-rank", "shared-expert-on-base"])
def test_experts_that_are_offloaded_are_not_made_dense(kind: str, saved: Any) -> None:
    with quiet():
        model = accelerate.cpu_offload(load(saved(kind)), execution_device=torch.device("cpu"))
    with pytest.raises(
        UsageError, match=r"offloaded 3 of the model's compressed modules .*Load the model without device_map"
    ):
        moetool.synthesize(model)
    assert apply_synthesis(model, "auto").chosen == "on-the-fly"
