"""What a model with fewer experts is made of, and how a model does whose router must not choose some of them."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from moetool.job.job import Source
from moetool.quiet import quiet


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def made_of(path: Path) -> dict[int, list[list[int]]]:
    """By layer, what its manifest says that each expert is made of."""
    layers = json.loads((path / "moetool.json").read_text())["layers"]
    return {int(layer): said["made_of"] for layer, said in layers.items()}


def kept(path: Path) -> dict[int, list[int]]:
    """The same where nothing was merged."""
    return {layer: [expert for [expert] in experts] for layer, experts in made_of(path).items()}


def loaded(path: Path) -> Any:
    with quiet():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def routers(path: Path, model: Any) -> dict[int, list[torch.Tensor]]:
    """The tensors of a loaded model's routers, by layer: the weight `[experts, hidden]`, then what corrects scores."""
    source = Source.open(path)
    block = source.architecture.experts_module.rpartition(".")[0]
    found = {}
    for layer in source.experts.moe_layers:
        inside = model.get_submodule(source.architecture.layer.format(layer=layer)).get_submodule(block)
        router = inside.gate if hasattr(inside, "gate") else inside.router
        count = source.experts.shape.experts
        (weight,) = (tensor for tensor in router.parameters() if tensor.dim() > 1 and len(tensor) == count)
        named = [*inside.named_parameters(), *inside.named_buffers()]
        beside = [(name, tensor) for name, tensor in named if not name.startswith("experts.")]
        found[layer] = [weight, *(tensor for name, tensor in beside if name.endswith("_bias"))]
    return found


@contextmanager
def never_chosen(path: Path, model: Any, allowed: Mapping[int, list[int]]) -> Iterator[None]:
    """The logits of all experts but those `allowed` are −∞, in every layer."""
    linear, dropped, biases = F.linear, {}, []
    for layer, (weight, *corrections) in routers(path, model).items():
        others = [expert for expert in range(len(weight)) if expert not in allowed[layer]]
        dropped[weight.data_ptr()] = others
        for bias in corrections:
            biases.append((bias, bias.detach().clone()))
            bias.data[..., others] = -torch.inf  # sigmoid(−∞) plus a bias could win

    def masked(inputs: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = linear(inputs, weight, *args, **kwargs)
        if weight.data_ptr() in dropped:
            output = output.clone()
            output[..., dropped[weight.data_ptr()]] = -torch.inf
        return output

    torch.nn.functional.linear = masked
    try:
        yield
    finally:
        torch.nn.functional.linear = linear
        for bias, before in biases:
            bias.data.copy_(before)
