"""Conversion of an MoE model to a dense model: one expert of each layer takes the place of them all."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.architectures.base import Settings, whole_number
from moetool.architectures.dense import DENSE_SIBLINGS, DenseArchitecture
from moetool.architectures.shape import by_name
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.header import TensorInfo
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import settings_of
from moetool.checkpoint.writer import InParts, TensorSpec
from moetool.convert.parts import REST, Made
from moetool.errors import InvalidInputError
from moetool.format.kinds.moe import SHARED
from moetool.upcycle.upcycling import QKV

Parts = list[Callable[[], Iterator[Tensor]]]


class Unmerging:
    """The tensors of the dense model that an MoE model holds.

    Args:
        checkpoint: the MoE model.
        experts: reads its experts.
        architecture: the dense family to write.
        native: whether the MoE model is of another family, and has its norms.
        tensors: headers of the dense checkpoint that is wanted.
        layers: which of its layers are MoE layers.
        expert: which expert to take; a whole copy where experts are pieces.
        granularity: pieces per copy.
        down_scale: what the experts' down matrices were multiplied by beyond that.
        dtype: to store in; `None` keeps each tensor's own.

    Raises:
        InvalidInputError: a tensor of the dense model is nowhere in the MoE model.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        experts: ExpertReader,
        architecture: DenseArchitecture,
        tensors: Mapping[str, TensorInfo],
        layers: tuple[int, ...],
        *,
        expert: int,
        native: bool = True,
        granularity: int = 1,
        down_scale: float = 1.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._checkpoint, self._experts, self._dense = checkpoint, experts, architecture
        self._expert, self._granularity, self._down_scale = expert, granularity, down_scale
        self._native = native
        ffn = {name: (layer, role, bias) for layer in layers for name, role, bias in _parts(architecture, layer)}
        self._made: dict[str, Made] = {}
        for name, info in tensors.items():
            own, parts = self._ffn_part(*ffn[name]) if name in ffn else self._passed(name, info)
            stored = own if dtype is None else dtype
            self._made[name] = Made(TensorSpec(name, stored, info.shape), partial(_in_parts, stored, info.shape, parts))

    def units(self) -> list[tuple[int, list[Made]]]:
        """List the tensors of the dense model by their decoder layer; those outside of all layers come first."""
        found: dict[int, list[Made]] = {layer: [] for layer in range(REST, self._dense.layers)}
        for name, made in self._made.items():
            found[self._dense.layer_of(name)].append(made)
        return [(layer, unit) for layer, unit in found.items() if unit]

    def _passed(self, name: str, info: TensorInfo) -> tuple[torch.dtype, Parts]:
        """What is not a feed-forward network that became an MoE layer."""
        there = self._checkpoint.tensors
        name = self._place(name)
        if name in there and there[name].shape == info.shape:
            if self._native and self._dense.norm_offset and name.endswith("norm.weight"):
                return there[name].dtype, [partial(self._shifted, name)]
            return there[name].dtype, [partial(self._checkpoint.blocks, name)]
        if self._dense.joined_qkv and name.endswith(self._dense.joined_qkv):
            apart = [name.replace("qkv_proj", projection) for projection in QKV]
        elif "gate_up_proj" in name:
            apart = [name.replace("gate_up_proj", f"{role}_proj") for role in ("gate", "up")]
        else:
            apart = []
        if not apart or not all(part in there for part in apart):
            raise InvalidInputError(
                f"{self._checkpoint.source} has no tensor {name} of shape {list(info.shape)}: it does not hold this "
                "dense model."
            )
        return there[apart[0]].dtype, [partial(self._checkpoint.blocks, part) for part in apart]

    def _shifted(self, name: str) -> Iterator[Tensor]:
        weight = self._checkpoint.read(name)
        yield (weight.double() - self._dense.norm_offset).to(weight.dtype)

    def _place(self, name: str) -> str:
        """Where the numbers of an activation lie, which a shared expert may have taken along."""
        for kept in self._dense.kept:
            start = name.removesuffix(kept)
            if name.endswith(f".{kept}") and f"{start}{SHARED}.{kept}" in self._checkpoint.tensors:
                return f"{start}{SHARED}.{kept}"
        return name

    def _ffn_part(self, layer: int, roles: tuple[Role, ...], bias: bool) -> tuple[torch.dtype, Parts]:
        return self._experts.dtype, [partial(self._role, layer, role, bias) for role in roles]

    def _role(self, layer: int, role: Role, bias: bool) -> Iterator[Tensor]:
        """One matrix or bias of the chosen expert as the dense model has it, put together from its pieces."""
        if bias or not self._dense.is_transposed:
            yield from self._whole(layer, role, bias)
        else:
            yield torch.cat([*self._whole(layer, role, bias)]).t().contiguous()

    def _whole(self, layer: int, role: Role, bias: bool) -> Iterator[Tensor]:
        first = self._expert * self._granularity
        pieces = [self._piece(layer, expert, role, bias) for expert in range(first, first + self._granularity)]
        if bias:
            yield pieces[0] if role == "down" else torch.cat(pieces)
        elif role == "down":
            whole = torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]
            scale = 1.0 / (self._granularity * self._down_scale)
            yield (whole.double() * scale).to(whole.dtype) if scale != 1.0 else whole
        else:
            yield from pieces

    def _piece(self, layer: int, expert: int, role: Role, bias: bool) -> Tensor:
        if bias:
            return self._experts.bias(layer, expert, role)
        return self._experts.dense(layer, expert, role).to(self._experts.dtype)


def _parts(architecture: DenseArchitecture, layer: int) -> Iterator[tuple[str, tuple[Role, ...], bool]]:
    """The tensors of one layer's network: name, roles of the matrices that it holds, and whether it is their bias."""
    for roles in by_name(architecture.weights).values():
        yield architecture.weight_name(layer, roles[0]), tuple(roles), False
        yield architecture.bias_name(layer, roles[0]), tuple(roles), True


def _in_parts(dtype: torch.dtype, shape: tuple[int, ...], parts: Parts) -> InParts:
    return InParts(dtype, shape, (block.to(dtype) for part in parts for block in part()))


def dense_config(config: Mapping[str, object], path: Path) -> dict[str, object] | None:
    """The config of the dense model beside an MoE model that moetool did not make, where its family has a dense sibling
    with the same layers; else `None`. What the MoE model's leaves out is written where the families differ in it.

    Args:
        config: the MoE model's `config.json`.
        path: where that lies.

    Raises:
        InvalidInputError: transformers refuses an entry.
    """
    sibling = DENSE_SIBLINGS.get(str(config.get("model_type")))
    if sibling is None:
        return None
    model_type, model_class = sibling
    settings = settings_of(config, path)
    kept = {key: value for key, value in config.items() if key not in _MOE_KEYS}
    width = settings.get("moe_intermediate_size", settings.get("intermediate_size"))
    made = {**kept, "model_type": model_type, "architectures": [model_class], "intermediate_size": width}
    ours, theirs = _computed(settings), settings_of(made, path)
    return made | {key: ours[key] for key in theirs if key in ours and key not in made and ours[key] != theirs[key]}


def _computed(settings: Settings) -> dict[str, object]:
    """Settings with those that some families have none of: they compute with what follows from others."""
    found = dict(settings)
    if settings.get("head_dim") is None:
        hidden, heads = (whole_number(settings, key) for key in ("hidden_size", "num_attention_heads"))
        found["head_dim"] = (hidden or 0) // (heads or 1)
    if settings.get("sliding_window") and "layer_types" not in settings:
        found["layer_types"] = ["sliding_attention"] * (whole_number(settings, "num_hidden_layers") or 0)
    return found


_MOE_KEYS = {
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "quantization_config",
}
