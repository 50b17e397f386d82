"""Compressed experts in vLLM: which layers are moetool's, how their tensors are loaded, and how they run.

vLLM keeps routing, attention and everything else; a layer's routed experts are `SharedBaseExperts`, which run on the
kernels that transformers' models run on. Written against the main branch of vLLM after 0.28: `layers/fused_moe/` there,
`routed_experts.py` (002d607), `fused_moe_method_base.py` (02a0c2c) and `runner/moe_runner.py` (01cb308), and
`layers/quantization/base_config.py` (026bb17).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.utils import WeightsMapper

from moetool.architectures import Role
from moetool.architectures.base import Settings
from moetool.architectures.described import empty_model_of
from moetool.architectures.entries import entries_of
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.settings import filled_in
from moetool.errors import UsageError
from moetool.format.entry import check_format_version
from moetool.format.layout import BASE_CHANNELS, LayerLayout
from moetool.format.marker import METHOD
from moetool.serving.filling import FilledExperts, layer_of, served_layouts

_SHARDS: Mapping[str, Role] = {"w1": "gate", "w3": "up", "w2": "down"}
_INNER = "routed_experts"  # where vLLM keeps the parameters of `experts`


class MoetoolServing(QuantizationConfig):
    """The `quantization_config` of a moetool checkpoint, as vLLM asks it for methods."""

    def __init__(self, entry: Mapping[str, object]) -> None:
        super().__init__()
        check_format_version(entry)
        self._entry = dict(entry)

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "MoetoolServing":
        return cls(config)

    @staticmethod
    def get_cache_scale_mapper() -> Any:
        """Names of the file → names in vLLM, for models that look parameters up by their whole path."""
        inner = {re.compile(rf"\.experts\.({re.escape(METHOD)}\.|{BASE_CHANNELS}$)"): rf".experts.{_INNER}.\1"}
        return QuantizationConfig.get_cache_scale_mapper() | WeightsMapper(orig_to_new_regex=inner)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Ours for the experts that the config lists; all else is as its family stores it."""
        layouts = self._layouts  # before anything is built of a model that cannot be served
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        if not isinstance(layer, RoutedExperts) or (index := layer_of(prefix)) not in layouts:
            return None
        return MoetoolExpertsMethod(layer.moe_config, self._model, self._checkpoint, index, layouts[index])

    @cached_property
    def _checkpoint(self) -> Settings:
        config = get_current_vllm_config().model_config.hf_config
        return filled_in(config, {"quantization_config": {**self._entry, "quant_method": METHOD}})

    @cached_property
    def _model(self) -> Any:
        """transformers' own model on the meta device, whose experts say what lies between their matrices."""
        return empty_model_of(json.loads(entries_of(self._checkpoint)))

    @cached_property
    def _layouts(self) -> dict[int, LayerLayout]:
        return served_layouts(self._checkpoint, decodes=_loads_itself())


def _loads_itself() -> bool:
    """Whether moetool's loader is to load the model, not one of vLLM's."""
    return str(get_current_vllm_config().load_config.load_format) == METHOD


class MoetoolExpertsMethod(FusedMoEMethodBase):
    """vLLM's method for the compressed experts of one layer: makes room for their tensors, loads and runs them."""

    def __init__(self, moe: Any, model: Any, checkpoint: Settings, index: int, layout: LayerLayout) -> None:
        super().__init__(moe)
        self._model, self._checkpoint, self._index, self._layout = model, checkpoint, index, layout
        self._experts: FilledExperts | None = None
        self._numbers: Tensor | None = None  # of all experts here; those elsewhere have the first number that none has

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: object,
    ) -> None:
        shape, device = self._layout.shape, torch.get_default_device()
        experts = self._place(layer.expert_map)
        given = {"experts": num_experts, "inputs": hidden_size, "channels": intermediate_size_per_partition}
        whole = {"experts": len(experts), "inputs": shape.hidden, "channels": shape.intermediate}
        if wrong := [f"{given[what]} of {whole[what]} {what}" for what in whole if given[what] != whole[what]]:
            raise UsageError(
                f"moetool's experts are not cut up or padded, and this process is to hold {' and '.join(wrong)}: with "
                "--tensor-parallel-size, run vLLM with --enable-expert-parallel, too."
            )
        if getattr(layer, "apply_router_weight_on_input", False):
            raise UsageError("moetool's experts are weighted at their outputs, and this model weights their inputs.")
        if device.type != "cpu" and not get_current_vllm_config().model_config.enforce_eager:
            raise UsageError(
                "moetool's experts look at what was routed where tokens are many, which no CUDA graph can hold: run "
                "vLLM with --enforce-eager."
            )
        held = FilledExperts(self._model, self._checkpoint, self._index, params_dtype, device, experts)
        self._experts = held
        for name, parameter in (("w13_weight", held.fused["up"]), ("w2_weight", held.fused["down"])):
            layer.register_parameter(name, parameter)
            parameter.weight_loader = self._load_native  # type: ignore[attr-defined]
        for name, parameter in held.own.items():
            parameter.weight_loader = partial(self._load_own, name)  # type: ignore[attr-defined]
        layer.add_module(METHOD, held.module.moetool)
        if BASE_CHANNELS in held.own:
            layer.register_parameter(BASE_CHANNELS, held.own[BASE_CHANNELS])
        layer.load_weights = self._load_all

    def _place(self, expert_map: Tensor | None) -> list[int]:
        """The experts that this process holds, in the order of their numbers here; `expert_map` [experts] has these,
        and -1 for all others."""
        count = self._layout.shape.experts
        if expert_map is None:
            return list(range(count))
        if not _loads_itself():
            raise UsageError(
                f"With expert parallelism every process reads its own experts: run vLLM with --load-format {METHOD}."
            )
        if self._layout.dynamic_channels:
            raise UsageError(
                "Channels of the base are skipped by what all experts of a batch give it, which are in several "
                "processes: run vLLM without expert parallelism."
            )
        here = sorted((number, expert) for expert, number in enumerate(expert_map.tolist()) if number >= 0)
        self._numbers = expert_map.where(expert_map >= 0, len(here)).long()
        return [expert for _, expert in here]

    def fill(self, reader: ExpertReader) -> None:
        """Read the experts from the files of their checkpoint."""
        self._filled.fill(reader)

    @property
    def _filled(self) -> FilledExperts:
        assert self._experts is not None, "vLLM makes room before it loads or runs"
        return self._experts

    def _load_all(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """In place of `RoutedExperts.load_weights`: by names relative to `experts`."""
        for name, tensor in weights:
            self._filled.load(name.removeprefix(f"{_INNER}."), tensor)
            yield name

    def _load_own(self, name: str, param: nn.Parameter, loaded_weight: Tensor) -> None:
        self._filled.load(name, loaded_weight)

    def _load_native(
        self,
        param: nn.Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """In place of `RoutedExperts.weight_loader`."""
        self._filled.load_native(expert_id, _SHARDS[shard_id], loaded_weight)
        return True if return_success else None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self._filled.finish()

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        return None

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """What the routed experts of this process give, `[tokens, hidden]`; vLLM runs shared experts itself where no
        kernel of its own does."""
        chosen = topk_ids.long() if self._numbers is None else self._numbers[topk_ids.long()]
        with torch.no_grad():
            output: Tensor = self._filled.module(x, chosen, topk_weights)
        return output
