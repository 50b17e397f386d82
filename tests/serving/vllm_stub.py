"""As much of vLLM as the plug-in touches, with its names and signatures, for machines that cannot have it.

After `vllm/model_executor/layers/fused_moe/routed_experts.py` (002d607), `fused_moe_method_base.py` (02a0c2c),
`runner/moe_runner.py` (01cb308), `layers/quantization/{__init__,base_config}.py` (026bb17) and
`models/utils.py` of the main branch after 0.28, and `model_loader/{__init__,base_loader}.py` of 0.32. Left out: all
that runs on a card, parallelism but for the numbers of experts, and EPLB.
"""

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class QuantizeMethodBase(ABC):
    @abstractmethod
    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None: ...

    @abstractmethod
    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor: ...

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        return


@dataclass
class WeightsMapper:
    orig_to_new_regex: dict[re.Pattern[str], str | None] = field(default_factory=dict)

    def __or__(self, other: "WeightsMapper") -> "WeightsMapper":
        return WeightsMapper({**self.orig_to_new_regex, **other.orig_to_new_regex})

    def apply(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            for pattern, new in self.orig_to_new_regex.items():
                if pattern.search(name):
                    assert new is not None
                    name = pattern.sub(new, name)
            yield name, tensor


class QuantizationConfig(ABC):
    def __init__(self) -> None:
        super().__init__()
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @abstractmethod
    def get_name(self) -> str: ...

    @abstractmethod
    def get_supported_act_dtypes(self) -> list[torch.dtype]: ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls) -> int: ...

    @staticmethod
    @abstractmethod
    def get_config_filenames() -> list[str]: ...

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> "QuantizationConfig": ...

    @abstractmethod
    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None: ...

    @staticmethod
    def get_cache_scale_mapper() -> WeightsMapper:
        return WeightsMapper({re.compile(r"\.kv_scale$"): ".attn.k_scale"})


class FusedMoEMethodBase(QuantizeMethodBase):
    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.moe = moe
        self.moe_quant_config: Any = None
        self.moe_kernel: Any = None

    @abstractmethod
    def get_fused_moe_quant_config(self, layer: nn.Module) -> Any: ...

    @property
    def is_monolithic(self) -> bool:
        return self.moe_kernel is not None


class LinearBase(nn.Module):
    pass


class UnquantizedLinearMethod(QuantizeMethodBase):
    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        raise NotImplementedError

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        return

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def get_fused_moe_quant_config(self, layer: nn.Module) -> Any:
        return None


@dataclass
class FusedMoEConfig:
    num_experts: int
    num_local_experts: int
    hidden_dim: int
    intermediate_size_per_partition: int
    expert_map: Tensor | None = None  # in vLLM, of the layer's ExpertMapManager


class RoutedExperts(nn.Module):
    def __init__(
        self,
        layer_name: str,
        params_dtype: torch.dtype,
        moe_config: FusedMoEConfig,
        quant_config: QuantizationConfig | None,
        apply_router_weight_on_input: bool = False,
    ) -> None:
        super().__init__()
        self.layer_name, self.moe_config = layer_name, moe_config
        self.apply_router_weight_on_input = apply_router_weight_on_input
        method = quant_config.get_quant_method(self, layer_name) if quant_config is not None else None
        self.quant_method: Any = method or UnquantizedFusedMoEMethod(moe_config)
        assert isinstance(self.quant_method, FusedMoEMethodBase)
        self.quant_method.create_weights(
            layer=self,
            num_experts=moe_config.num_local_experts,
            hidden_size=moe_config.hidden_dim,
            unpadded_hidden_size=moe_config.hidden_dim,
            intermediate_size_per_partition=moe_config.intermediate_size_per_partition,
            params_dtype=params_dtype,
            weight_loader=self.weight_loader,
            global_num_experts=moe_config.num_experts,
        )

    @property
    def expert_map(self) -> Tensor | None:
        return self.moe_config.expert_map

    def weight_loader(self, *arguments: Any, **options: Any) -> bool | None:
        raise AssertionError("the plug-in has loaders of its own")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
        raise AssertionError("it would pass over names it does not know, and say nothing")

    def forward_modular(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        assert not self.quant_method.is_monolithic
        return self.quant_method.apply(
            layer=self,
            x=x,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            shared_experts=None,
            shared_experts_input=None,
        )


class MoERunner(nn.Module):
    """What a model's `experts` is."""

    def __init__(self, routed_experts: RoutedExperts) -> None:
        super().__init__()
        self.routed_experts = routed_experts

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
        return self.routed_experts.load_weights(weights)


QUANTIZATION_METHODS: list[str] = ["awq", "fp8", "compressed-tensors"]
CUSTOMIZED: dict[str, type[QuantizationConfig]] = {}


def register_quantization_config(quantization: str) -> Any:
    def wrapper(config: type[QuantizationConfig]) -> type[QuantizationConfig]:
        if quantization in QUANTIZATION_METHODS:
            raise ValueError(f"The quantization method `{quantization}` is already exists.")
        assert issubclass(config, QuantizationConfig)
        CUSTOMIZED[quantization] = config
        QUANTIZATION_METHODS.append(quantization)
        return config

    return wrapper


def get_quantization_config(quantization: str) -> type[QuantizationConfig]:
    return CUSTOMIZED[quantization]


class BaseModelLoader(ABC):
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: Any) -> None: ...

    @abstractmethod
    def load_weights(self, model: nn.Module, model_config: Any) -> None: ...


LOADERS: dict[str, type[BaseModelLoader]] = {}


def register_model_loader(load_format: str) -> Any:
    def wrapper(loader: type[BaseModelLoader]) -> type[BaseModelLoader]:
        assert issubclass(loader, BaseModelLoader)
        LOADERS[load_format] = loader
        return loader

    return wrapper


def install(
    patch: pytest.MonkeyPatch, hf_config: Any, *, enforce_eager: bool = True, load_format: str = "auto"
) -> None:
    """Put it where vLLM would be, as it is while a model of that config is built."""
    current = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config, enforce_eager=enforce_eager),
        load_config=SimpleNamespace(load_format=load_format),
    )
    layers = "vllm.model_executor.layers"
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config": lambda: current},
        "vllm.model_executor": {},
        layers: {},
        f"{layers}.fused_moe": {"FusedMoEMethodBase": FusedMoEMethodBase, "RoutedExperts": RoutedExperts},
        f"{layers}.linear": {"LinearBase": LinearBase, "UnquantizedLinearMethod": UnquantizedLinearMethod},
        f"{layers}.quantization": {
            "QUANTIZATION_METHODS": QUANTIZATION_METHODS,
            "register_quantization_config": register_quantization_config,
            "get_quantization_config": get_quantization_config,
        },
        f"{layers}.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
        "vllm.model_executor.model_loader": {"register_model_loader": register_model_loader},
        "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": BaseModelLoader},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.utils": {"WeightsMapper": WeightsMapper},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        patch.setitem(sys.modules, name, module)
    for name in ("vllm_layers", "vllm_loader"):
        patch.delitem(sys.modules, f"moetool.serving.{name}", raising=False)
    patch.setattr(sys.modules[__name__], "CUSTOMIZED", {})
    LOADERS.clear()
    QUANTIZATION_METHODS[:] = ["awq", "fp8", "compressed-tensors"]


def load_by_modules(runner: MoERunner, prefix: str, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """As `AutoWeightsLoader` does: what begins with a module's path goes to its `load_weights`."""
    inside = ((name.removeprefix(prefix), tensor) for name, tensor in weights if name.startswith(prefix))
    return set(runner.load_weights(inside))


def load_by_paths(
    runner: MoERunner, prefix: str, weights: Iterable[tuple[str, Tensor]], mapper: WeightsMapper, names: list[str]
) -> None:
    """As models do that look parameters up by their whole paths: an expert's matrix by the family's `names` of w1, w2
    and w3, all else under its own name."""
    parameters = {f"{prefix}{name}": parameter for name, parameter in runner.named_parameters()}
    count = runner.routed_experts.moe_config.num_experts
    mapping = [
        (f"experts.routed_experts.{'w2' if shard == 'w2' else 'w13'}_", f"experts.{expert}.{name}.", expert, shard)
        for expert in range(count)
        for shard, name in zip(("w1", "w2", "w3"), names, strict=True)
    ]
    for name, tensor in mapper.apply((name, tensor) for name, tensor in weights if name.startswith(prefix)):
        for own, theirs, expert, shard in mapping:
            if theirs in name:
                parameter = parameters[mapped := name.replace(theirs, own)]
                assert parameter.weight_loader(
                    parameter, tensor, mapped, shard_id=shard, expert_id=expert, return_success=True
                )
                break
        else:
            parameter = parameters[name]
            parameter.weight_loader(parameter, tensor)
