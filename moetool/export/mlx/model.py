"""An MoE model as the tensors of an export to MLX: which go into codes, and where their numbers are."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from torch import Tensor, nn

from moetool.architectures import Role
from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.writer import TensorSpec
from moetool.export.choosing.menu import Menu
from moetool.export.choosing.written import WatchedModule
from moetool.format.beside import weight_of
from moetool.format.blocks import AffineCodes
from moetool.format.mlx import AFFINE_BITS, AFFINE_GROUPS, CODES, stacked_name
from moetool.job.job import Source

_TABLE_BITS = tuple(bits for bits in AFFINE_BITS if bits > 2)  # of embeddings and head, whose tokens a text has in part
# What mlx-lm cuts by heads and rounds once more as it loads: it has 8 bits, and the nearest codes.
_ROUNDED_AGAIN = re.compile(r"\.kv_b_proj\.weight$")
ROUNDED_AGAIN_BITS = 8


@dataclass(frozen=True)
class MlxTensor:
    """A tensor of the result, or of one in codes the three that hold it: a `WrittenTensor`.

    Attributes:
        name: of the tensor with its codes, if it is in codes.
        layer: that it is of, −1 for none.
        shape: `[out, in]`, or `[experts, out, in]` of a layer's experts.
        nbytes: that it takes unless bits are chosen for it.
        parts: reads its rows: of experts, a matrix at a time.
        is_experts: whether it holds the matrices of all experts of a layer in a role.
    """

    name: str
    layer: int
    shape: tuple[int, ...]
    nbytes: int
    parts: Callable[[], Iterator[Tensor]]
    is_experts: bool = False

    @property
    def numbers(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


class MlxModel:
    """The matrices of a model that go into codes, under mlx-lm's names: a `WrittenModel`.

    Args:
        source: the model.
        group: inputs that share a scale and a bias.
        specs: by layer, −1 for none, the tensors of the model that are no experts'.
    """

    def __init__(self, source: Source, group: int, specs: Mapping[int, list[TensorSpec]]) -> None:
        self._source, self._group, self._specs = source, group, specs

    @property
    def experts(self) -> ExpertReader:
        return self._source.experts

    @property
    def layers(self) -> int:
        return self._source.architecture.layers

    @property
    def embeddings(self) -> str:
        return weight_of(self._source.architecture.embeddings[0])

    @property
    def head(self) -> str | None:
        name = weight_of(self._source.architecture.embeddings[1])
        return name if any(name == spec.name for spec in self._specs[-1]) else None

    def expert_tensor(self, layer: int, role: Role) -> str:
        kind = str(self._source.checkpoint.config.get("model_type"))
        return stacked_name(self._source.architecture.block_prefix(layer), kind, role)

    def counted_embeddings(self, rows: Tensor) -> Tensor:
        return rows

    def watched(self, layer: int, module: nn.Module) -> dict[str, WatchedModule]:
        prefix, found = self._source.architecture.layer_prefix(layer), {}
        for name in self.seen(layer):
            path = name.removeprefix(prefix).removesuffix(f".{CODES}")
            own = module.get_submodule(path)
            assert isinstance(own, nn.Linear), f"{path} of layer {layer} is {type(own).__name__}"
            found[path] = WatchedModule(own, {name: (own.out_features, own.in_features)})
        return found

    def coded(self, layer: int) -> list[str]:
        """Names of the matrices of a layer, or outside of all (−1), that can be in codes, without experts."""
        return [spec.name for spec in self._specs.get(layer, ()) if self.is_coded(spec)]

    def seen(self, layer: int) -> list[str]:
        """Those of them that a text tells the inputs of, and whose codes are read as they are written."""
        return [name for name in self.coded(layer) if not _ROUNDED_AGAIN.search(name)]

    def is_coded(self, spec: TensorSpec) -> bool:
        """Whether a tensor is a matrix that mlx-lm may hold in codes: of a linear layer, or an embedding."""
        architecture = self._source.architecture
        return (
            len(spec.shape) == 2
            and spec.name.endswith(f".{CODES}")
            and spec.dtype.is_floating_point
            and spec.shape[0] >= AFFINE_GROUPS[0]
            and spec.shape[1] % self._group == 0
            and not any(architecture.is_router(layer, spec.name) for layer in architecture.moe_layers)
        )

    def read(self, name: str) -> Tensor:
        """A tensor that is none of the routed experts', by its name in the model; a shared expert may be stored on the
        base of the others."""
        reader = self.experts
        layer = self._source.architecture.layer_of(name)
        if name not in self._source.checkpoint.tensors and reader.has(layer):
            last = reader.shape.experts
            own = reader.shared_expert_tensors(layer, lambda role: reader.dense(layer, last, role).to(reader.dtype))
            return dict(own)[name]
        return self._source.checkpoint.read(name)

    def kind(self, bits: int) -> AffineCodes:
        """The layout of codes of so many bits."""
        return AffineCodes.of(bits, self._group, self.experts.dtype)

    @cached_property
    def menu(self) -> Menu[AffineCodes]:
        """The bits on offer for the experts of each layer and role, and for each matrix beside them."""
        open_ = {*self.tables, *(name for layer in range(self.layers) for name in self.seen(layer))}
        types = dict[str, tuple[AffineCodes, ...]]()
        for tensor in self.tensors:
            if tensor.is_experts or tensor.name in open_:
                types[tensor.name] = tuple(map(self.kind, AFFINE_BITS if tensor.layer >= 0 else _TABLE_BITS))
        return Menu(self.tensors, types, "MLX", "embeddings and head have at least 3 bits there, norms and routers 16")

    def with_fixed(self, chosen: Mapping[str, AffineCodes]) -> dict[str, int]:
        """Bits by name where these kinds are chosen, those of matrices without a choice among them."""
        return dict.fromkeys(self.all_coded, ROUNDED_AGAIN_BITS) | {name: kind.bits for name, kind in chosen.items()}

    @cached_property
    def all_coded(self) -> list[str]:
        """Names of all matrices that can be in codes, without experts."""
        return [name for layer in range(-1, self.layers) for name in self.coded(layer)]

    @cached_property
    def tables(self) -> set[str]:
        """Those of the embeddings and the head that can be in codes."""
        return {name for name in self.coded(-1) if name in (self.embeddings, self.head)}

    def matrix(self, name: str) -> tuple[int, int]:
        """Shape `[out, in]` of a matrix that is none of the experts'."""
        rows, columns = self.by_name[name].shape
        return rows, columns

    def shapes(self, layer: int) -> list[tuple[int, int]]:
        """Shapes `[out, in]` of the matrices of a layer that a text tells the inputs of."""
        return [self.matrix(name) for name in self.seen(layer)]

    @cached_property
    def tensors(self) -> list[MlxTensor]:
        """All tensors of the result, in its order."""
        found, reader = list[MlxTensor](), self.experts
        for layer, specs in self._specs.items():
            for spec in specs:
                numbers = math.prod(spec.shape)
                own = self.kind(ROUNDED_AGAIN_BITS).size(numbers) if self.is_coded(spec) else spec.nbytes
                found.append(MlxTensor(spec.name, layer, spec.shape, own, partial(self._rows, spec.name)))
            for role in reader.shape.roles if reader.has(layer) else ():
                whole = (reader.shape.experts, *reader.shape.matrix(role))
                nbytes = math.prod(whole) * reader.dtype.itemsize
                name = self.expert_tensor(layer, role)
                found.append(
                    MlxTensor(name, layer, whole, nbytes, partial(self._matrices, layer, role), is_experts=True)
                )
                if role in reader.shape.biases:
                    rows = whole[:2]
                    nbytes = math.prod(rows) * reader.dtype.itemsize
                    found.append(MlxTensor(f"{name}.bias", layer, rows, nbytes, lambda: iter(())))
        return found

    @cached_property
    def by_name(self) -> dict[str, MlxTensor]:
        """The tensors of the result by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    def _rows(self, name: str) -> Iterator[Tensor]:
        yield self.read(name)

    def _matrices(self, layer: int, role: Role) -> Iterator[Tensor]:
        for expert in range(self.experts.shape.experts):
            yield self.experts.dense(layer, expert, role).to(self.experts.dtype)
