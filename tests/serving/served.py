"""Layers of compressed experts as vLLM builds them, in the stub of it that is installed."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_stub
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig
from vllm_stub import FusedMoEConfig, MoERunner, RoutedExperts, load_by_modules, load_by_paths

from moetool.architectures import Role
from moetool.checkpoint.reader import Checkpoint
from moetool.format.families import architecture_of
from moetool.serving.vllm import register

SHARDS: tuple[Role, ...] = ("gate", "down", "up")  # w1, w2 and w3


class Served:
    """The experts of a checkpoint's layer as vLLM builds them, not yet loaded."""

    def __init__(self, path: Path, layer: int = 0, **moe: Any) -> None:
        register()
        config = Checkpoint.open(path).config
        architecture = architecture_of(config)
        kind = sys.modules["vllm.model_executor.layers.quantization"].get_quantization_config("moetool")
        self.quantization = kind.from_config(config["quantization_config"])
        shape = architecture.shape
        sizes = {
            "num_experts": shape.experts,
            "num_local_experts": shape.experts,
            "hidden_dim": shape.hidden,
            "intermediate_size_per_partition": shape.intermediate,
        }
        self.prefix, self.weights = architecture.experts_prefix(layer), dict(load_file(path / "model.safetensors"))
        self.names = [architecture.weights[role].split(".")[-2] for role in SHARDS]
        self.routed = RoutedExperts(
            self.prefix[:-1], torch.float32, FusedMoEConfig(**{**sizes, **moe}), self.quantization
        )
        self.runner = MoERunner(self.routed)

    def load(self, way: str = "modules") -> None:
        if way == "modules":
            loaded = load_by_modules(self.runner, self.prefix, self.weights.items())
            assert loaded == {name.removeprefix(self.prefix) for name in self.weights if name.startswith(self.prefix)}
        else:
            mapper = self.quantization.get_cache_scale_mapper()
            load_by_paths(self.runner, self.prefix, self.weights.items(), mapper, self.names)
        self.routed.quant_method.process_weights_after_loading(self.routed)


def serving(
    patch: pytest.MonkeyPatch,
    path: Path,
    layer: int = 0,
    *,
    enforce_eager: bool = True,
    load_format: str = "auto",
    **moe: Any,
) -> Served:
    """A layer's experts, with the stub in vLLM's place; `moe` as `FusedMoEConfig` has it, where it is not all."""
    config = AutoConfig.from_pretrained(path)
    vllm_stub.install(patch, config, enforce_eager=enforce_eager, load_format=load_format)
    return Served(path, layer, **moe)


def given(tokens: int, experts: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights and experts of some tokens, as vLLM's routers give them."""
    draw = torch.Generator().manual_seed(tokens)
    hidden, scores = torch.randn(tokens, 32, generator=draw), torch.randn(tokens, experts, generator=draw)
    weights, chosen = scores.softmax(1).topk(2)
    return hidden, weights, chosen.int()
