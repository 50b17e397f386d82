"""The tensors of an upcycled model: an MoE model of some family."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor

from moetool.architectures import Architecture, MoEShape, Role, find_architecture
from moetool.architectures.shape import by_name
from moetool.checkpoint.files import patch_config
from moetool.checkpoint.promises import check_shape
from moetool.checkpoint.writer import TensorSpec
from moetool.convert.parts import REST, Converted, Made, mean
from moetool.format.entry import format_entry
from moetool.format.kinds.base import PLACEHOLDER, Counts
from moetool.format.kinds.moe import ROUTER, SHARED, MoESpec, fused_names, routed_scale
from moetool.format.layout import LayerLayout, delta_name
from moetool.numerics.seeding import generator, linear_std, uniform
from moetool.upcycle.experts import Experts
from moetool.upcycle.targets import Target
from moetool.upcycle.targets.qwen2_moe import IDLE_WIDTH

# Of a shared expert's gate, whose sigmoid is to be one half. Exact zeros make NaNs in a popular GGUF runtime; these are
# representable in every dtype, fp16 among them, and far too small to matter.
_TINY = 2.0**-24
QKV = ("q_proj", "k_proj", "v_proj")
# Entries of dense configs that mean nothing, or something else, in an MoE family; `auto_map` names code.
_DROPPED = ("auto_map", "pretraining_tp", "mlp_bias", "attention_bias", "hidden_activation", "query_pre_attn_scalar",
            "layer_types", "use_sliding_window", "max_window_layers", "sliding_window", "use_bidirectional_attention",
            "resid_pdrop", "embd_pdrop", "rope_scaling", "rope_theta", "partial_rotary_factor", "head_dim")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Upcycled(Converted):
    """An upcycled model, tensor by tensor.

    Attributes:
        target: the family it is written as.
        spec: its shape.
        experts: what every expert starts as.
        router: rows `[experts, hidden]` for a layer.
        layouts: by layer, how experts are stored if they are deltas to one base, the dense FFN.
    """

    target: Target
    spec: MoESpec
    experts: Experts
    router: Callable[[int], Tensor]
    layouts: Mapping[int, LayerLayout] = field(default_factory=dict)

    def config(self) -> dict[str, object]:
        source = self.dense.checkpoint.config
        entries: dict[str, object] = {**self.target.entries(self.dense, self.spec), **self.dtype_entry()}
        if self.layouts:
            spec = None if self.target.is_native else self.spec
            entries["quantization_config"] = format_entry(self.layouts, spec)
        if not self.target.is_native:
            return patch_config(source, entries)
        entries = {"model_type": self.target.name, "architectures": [self.target.model_class], **entries}
        return patch_config(source, entries, remove=[key for key in _DROPPED if key not in entries])

    @cached_property
    def family(self) -> Architecture | None:
        """Names on disk of the family that is written; `None` for moetool's own module, which keeps the source's."""
        return find_architecture(self.config()) if self.target.is_native else None

    def units(self) -> list[tuple[int, list[Made]]]:
        gone: set[str] = set()
        for layer in range(self.dense.layers):
            if layer in self.spec.layers or self._is_unjoined:
                gone |= self.dense.ffn_names(layer)
        return [
            (layer, [*self._passed(layer, [name for name in names if name not in gone]), *self._ffn(layer)])
            for layer, names in self.names().items()
        ]

    def parameters(self) -> Counts:
        placeholders = 0 if self.target.is_native else len(self.spec.layers)
        total = sum(math.prod(made.spec.shape) for _, unit in self.units() for made in unit) - placeholders
        shape, unused = self.shape, self.spec.experts - self.spec.top_k
        idle = len(self.spec.layers) * unused * (shape.expert_parameters + shape.bias_parameters)
        if self.layouts:
            routed = range(self.spec.experts)
            own = sum(layout.expert_parameters(expert) for layout in self.layouts.values() for expert in routed)
            idle = round(own * unused / self.spec.experts)
        return Counts(total, total - idle, total - self.dense.parameters)

    @property
    def _is_unjoined(self) -> bool:
        """Whether dense layers have gate and up apart although the source has them in one tensor."""
        return self.target.is_native and self.dense.architecture.is_joined

    @property
    def shape(self) -> MoEShape:
        """Number and widths of the experts, and their roles, alike in every MoE layer."""
        return self.spec.shape

    @property
    def _names(self) -> Mapping[Role, str]:
        """The experts' matrices on disk, relative to the block."""
        family = self.family
        return fused_names(self.dense.architecture.roles) if family is None else family.weights

    def _block_prefix(self, layer: int) -> str:
        family = self.family
        return self.dense.architecture.ffn_prefix(layer) if family is None else family.block_prefix(layer)

    @property
    def _routed_scale(self) -> float:
        return routed_scale(self.spec.shared, native=self.target.is_native)

    # What is not a feed-forward network.

    def _passed(self, layer: int, names: list[str]) -> Iterator[Made]:
        native = self.target.is_native
        architecture = self.dense.architecture
        prefix = architecture.layer_prefix(layer) if layer != REST else ""
        for name in names:
            if native and layer != REST and name == prefix + str(architecture.joined_qkv):
                yield from self._split_qkv(name)
            elif native and architecture.norm_offset and name.endswith("norm.weight"):
                yield self._shifted(name, architecture.norm_offset)
            else:
                yield self.copied(name, self._place(layer, name))
        if layer == REST or not native:
            return
        completed = self.target.completed_biases if "qkv_bias" in self.dense.features else ()
        for projection in (*self.target.biases, *completed):
            bias, weight = f"{prefix}self_attn.{projection}.bias", f"{prefix}self_attn.{projection}.weight"
            if bias not in names:
                rows = (
                    dict(self._heads())[projection]
                    if architecture.joined_qkv
                    else self.dense.checkpoint.info(weight).shape[0]
                )
                yield self.zeros(bias, (rows,))

    def _place(self, layer: int, name: str) -> str | None:
        """Where numbers of an activation lie that a shared expert has; `None` where they lay."""
        dense = self.dense.architecture
        if layer not in self.spec.layers or self.spec.shared == "none" or not dense.kept:
            return None
        inside = name.removeprefix(dense.ffn_prefix(layer))
        return f"{dense.ffn_prefix(layer)}{SHARED}.{inside}" if inside in dense.kept else None

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        parts = [model.checkpoint.read_rows(name, start, stop) for model in self.rest]
        return mean(parts).to(self.stored(self.dense.checkpoint.info(name).dtype))

    def _heads(self) -> list[tuple[str, int]]:
        """Rows of queries, keys and values."""
        config, width = self.dense.config, self.dense.head_dim
        counts = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        return [(projection, count * width) for projection, count in zip(QKV, counts, strict=True)]

    def _split_qkv(self, name: str) -> Iterator[Made]:
        info, start = self.dense.checkpoint.info(name), 0
        for projection, rows in self._heads():
            spec = TensorSpec(name.replace("qkv_proj", projection), self.stored(info.dtype), (rows, *info.shape[1:]))
            yield Made(spec, partial(self._rows, name, start, start + rows))
            start += rows
        check_shape(self.dense.checkpoint.source, name, info.shape, (start, *info.shape[1:]))

    def _shifted(self, name: str, offset: float) -> Made:
        info = self.dense.checkpoint.info(name)
        spec = TensorSpec(name, self.stored(info.dtype), info.shape)

        return Made(spec, lambda: (self._rows(name, 0, info.shape[0]).double() + offset).to(spec.dtype))

    # Feed-forward networks.

    def _ffn(self, layer: int) -> Iterator[Made]:
        if layer == REST:
            return
        if layer not in self.spec.layers:
            if self._is_unjoined:
                yield from self._dense_ffn(layer)
            return
        yield from self._deltas(layer) if layer in self.layouts else self._experts(layer)
        yield from self._biases(layer)
        yield self._routing(layer)
        if self.spec.shared != "none":
            yield from self._shared(layer)
        elif self.target.has_idle_shared:
            yield from self._idle_shared(layer)
        if not self.target.is_native:
            yield self.zeros(self.dense.architecture.weight_name(layer, "up"), PLACEHOLDER)

    def _dense_ffn(self, layer: int) -> Iterator[Made]:
        prefix = self.dense.architecture.ffn_prefix(layer)
        for role in self.dense.architecture.roles:
            yield self.joined(
                f"{prefix}{role}_proj.weight", self.dense.shape(role), [partial(self._averaged, layer, role)]
            )

    def _averaged(self, layer: int, role: Role) -> Tensor:
        return mean([model.matrix(layer, role) for model in self.rest])

    def _averaged_bias(self, layer: int, role: Role) -> Tensor:
        return mean([model.bias(layer, role) for model in self.rest])

    def _experts(self, layer: int) -> Iterator[Made]:
        spec, scale, prefix = self.spec, self._routed_scale, self._block_prefix(layer)
        for template, roles in by_name(self._names).items():
            rows, columns = sum(self.shape.matrix(role)[0] for role in roles), self.shape.matrix(roles[0])[1]

            def parts(*experts: int, roles: list[Role] = roles) -> list[Callable[[], Tensor]]:
                return [partial(self._expert, layer, expert, role, scale) for expert in experts for role in roles]

            if "{expert}" in template:
                for expert in range(spec.experts):
                    yield self.joined(prefix + template.format(expert=expert), (rows, columns), parts(expert))
            else:
                yield self.joined(prefix + template, (spec.experts, rows, columns), parts(*range(spec.experts)))

    def _biases(self, layer: int) -> Iterator[Made]:
        """Every expert's own, however its matrices are stored."""
        for template, roles in by_name(self._names).items():
            if roles[0] in self.dense.biases:
                experts = range(self.spec.experts)
                parts = [partial(self.experts.bias, layer, expert, role) for expert in experts for role in roles]
                shape = (self.spec.experts, sum(self.shape.matrix(role)[0] for role in roles))
                yield self.joined(f"{self._block_prefix(layer)}{template}_bias", shape, parts)

    def _deltas(self, layer: int) -> Iterator[Made]:
        """The dense FFN as the base of all experts, and deltas that are zero (DeRS, arXiv:2503.01359, §3.3)."""
        scale, prefix = self._routed_scale, self._block_prefix(layer)
        for template, roles in by_name(self._names).items():
            rows, columns = sum(self.shape.matrix(role)[0] for role in roles), self.shape.matrix(roles[0])[1]
            shape = (rows, columns) if "{expert}" in template else (1, rows, columns)
            parts = [partial(self._expert, layer, 0, role, scale) for role in roles]
            yield self.joined(prefix + template.format(expert=0), shape, parts)
        for expert, role, form in self.layouts[layer].deltas():
            for tensor, stored in form.tensors(self.shape.matrix(role)).items():
                name = f"{prefix}experts.{delta_name(expert, role, tensor)}"
                make = partial(self._delta, layer, expert, role, tensor, stored.shape)
                yield self.joined(name, stored.shape, [make])

    def _delta(self, layer: int, expert: int, role: Role, tensor: str, shape: tuple[int, ...]) -> Tensor:
        """Zeros, but for the factor that meets the input: that of a fresh LoRA (Kaiming, a = √5), or nothing could ever
        leave zero."""
        if tensor != "v":
            return torch.zeros(shape)
        return uniform(shape, linear_std(shape[1]), generator(self.seed, "difference", layer, expert, role))

    def _expert(self, layer: int, expert: int, role: Role, scale: float) -> Tensor:
        matrix = self.experts.matrix(layer, expert, role)
        return matrix * scale if role == "down" and scale != 1.0 else matrix

    def _routing(self, layer: int) -> Made:
        family = self.family
        name = self.dense.architecture.ffn_prefix(layer) + ROUTER if family is None else family.router_name(layer)
        return self.joined(name, (self.spec.experts, self.dense.hidden), [partial(self.router, layer)])

    def _shared(self, layer: int) -> Iterator[Made]:
        """The original FFN, scaled so that with the routed experts it gives what the MoE layer is to give."""
        dense, native = self.dense.architecture, self.target.is_native
        scale = 1.0
        if native:
            scale = (2.0 if self.target.shared_gate else 1.0) * (0.5 if self.spec.shared == "half" else 1.0)
        prefix = "" if native else f"{dense.ffn_prefix(layer)}{SHARED}."

        turned = not native and dense.is_transposed  # it is the dense network itself

        def part(role: Role) -> Tensor:
            matrix = self._averaged(layer, role)
            matrix = matrix.t() if turned else matrix
            return matrix * scale if role == "down" else matrix

        own: dict[Role, str] = {role: f"{path}.weight" for role, path in dense.linear_paths.items()}
        on_base = layer in self.layouts and self.layouts[layer].is_extended
        for name, roles in by_name(self._native_shared(layer) or own).items() if not on_base else ():
            shape = sum(self.dense.shape(role)[0] for role in roles), self.dense.shape(roles[0])[1]
            shape = shape[::-1] if turned else shape
            yield self.joined(prefix + name, shape, [partial(part, role) for role in roles])
        for role in self.dense.biases:
            name = f"{prefix}{dense.linear_paths[role]}.bias"
            yield self.joined(name, (self.dense.shape(role)[0],), [partial(self._averaged_bias, layer, role)])
        yield from self._shared_gate(layer)

    def _native_shared(self, layer: int) -> dict[Role, str]:
        """The shared expert's matrices, in a family that has one."""
        return {} if self.family is None else self.family.shared_expert_names(layer)

    def _idle_rows(self, layer: int, role: Role) -> Tensor:
        stream = generator(self.seed, "idle", layer, role)
        return uniform((IDLE_WIDTH, self.dense.hidden), linear_std(self.dense.hidden), stream)

    def _shared_gate(self, layer: int) -> Iterator[Made]:
        if self.target.shared_gate:
            name = self.dense.architecture.layer_prefix(layer) + self.target.shared_gate
            signs = torch.randint(0, 2, (1, self.dense.hidden), generator=generator(self.seed, "gate", layer))
            yield self.joined(name, (1, self.dense.hidden), [lambda: (2.0 * signs - 1) * _TINY])

    def _idle_shared(self, layer: int) -> Iterator[Made]:
        """A shared expert whose output is zero until it is trained."""
        for role, name in self._native_shared(layer).items():
            shape = (self.dense.hidden, IDLE_WIDTH) if role == "down" else (IDLE_WIDTH, self.dense.hidden)
            if role == "down":
                yield self.zeros(name, shape)
            else:
                yield self.joined(name, shape, [partial(self._idle_rows, layer, role)])
        yield from self._shared_gate(layer)
