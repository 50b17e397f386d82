"""Dense checkpoints of every family, and MoE models made of them: the conversions' own tensors, written to one file."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from dense_families import build_dense
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from moetool.architectures.dense import DenseArchitecture
from moetool.architectures.shape import fused_name
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.writer import CheckpointWriter
from moetool.convert.parts import Converted, Made
from moetool.format.kinds.moe import MoESpec, Shared
from moetool.format.kinds.pesc import PescSpec
from moetool.format.kinds.simoe import SimoeSpec
from moetool.numerics.seeding import linear_std
from moetool.quiet import quiet
from moetool.runtime.dense import DenseModel
from moetool.upcycle.experts import Copies, Experts
from moetool.upcycle.methods.pesc import WithAdapterExperts
from moetool.upcycle.methods.simoe import Interpolated
from moetool.upcycle.router import random_router
from moetool.upcycle.targets import choose_target
from moetool.upcycle.upcycling import Upcycled

EXPERTS, TOP_K = 4, 2


def save_dense(path: Path, family: str, **options: Any) -> Path:
    """A checkpoint of `build_dense(family, **options)`; returns the path."""
    with quiet():
        build_dense(family, **options).save_pretrained(path)
    return path


def open_dense(path: Path) -> DenseModel:
    return DenseModel(Checkpoint.open(path))


def upcycled(
    dense: DenseModel,
    target: str = "auto",
    *,
    experts: Experts | None = None,
    shared: Shared = "none",
    layers: tuple[int, ...] | None = None,
    granularity: int = 1,
    router: Callable[[int], Tensor] | None = None,
    rest: Sequence[DenseModel] = (),
    dtype: torch.dtype | None = None,
) -> Upcycled:
    """Copies of the FFN, two of four per token, in every layer, unless something else is said."""
    spec = MoESpec(
        experts=EXPERTS * granularity,
        top_k=TOP_K * granularity,
        intermediate=dense.intermediate // granularity,
        layers=tuple(range(dense.layers)) if layers is None else layers,
        shared=shared,
        of=dense.layers,
        hidden=dense.hidden,
        roles=dense.architecture.roles,
        biases=dense.biases,
    )

    def rows(layer: int) -> Tensor:
        fresh = random_router(EXPERTS, dense.hidden, 8 * linear_std(dense.hidden), 0, layer)
        return fresh.repeat_interleave(granularity, 0)

    return Upcycled(
        dense=dense,
        target=choose_target(target, (*dense.features, *spec.features)),
        spec=spec,
        experts=experts or Copies([dense]),
        router=router or rows,
        rest=rest or [dense],
        dtype=dtype,
        seed=0,
    )


def fill_expert(experts: nn.Module, index: int, ffn: nn.Module, architecture: DenseArchitecture) -> None:
    """Give one of fused experts the weights and biases of a dense network."""
    with torch.no_grad():
        for group in (architecture.roles[:-1], architecture.roles[-1:]):
            paths = dict.fromkeys(architecture.weights[role] for role in group)  # gate and up may share a tensor
            experts.get_parameter(fused_name(group))[index] = torch.cat([ffn.get_parameter(path) for path in paths])
            biases = [path.removesuffix("weight") + "bias" for path in paths]
            if all(name in dict(ffn.named_parameters()) for name in biases):
                own = torch.cat([ffn.get_parameter(name) for name in biases])
                experts.get_parameter(f"{fused_name(group)}_bias")[index] = own


def with_adapters(dense: DenseModel, **options: Any) -> WithAdapterExperts:
    """Four adapters of width 8 on every layer's FFN, two per token, unless something else is said."""

    def rows(layer: int) -> Tensor:
        return random_router(EXPERTS, dense.hidden, 8 * linear_std(dense.hidden), 0, layer)

    layers = tuple(range(dense.layers))
    standard = {"experts": EXPERTS, "top_k": TOP_K, "layers": layers, "width": 8, "scale": 1.0, "dropout": 0.0}
    dtype, router = options.pop("dtype", None), options.pop("router", rows)
    spec = PescSpec.from_config({**standard, **options})
    return WithAdapterExperts(dense=dense, dtype=dtype, seed=0, spec=spec, router=router)


def interpolated(dense: DenseModel, **options: Any) -> Interpolated:
    """Four masks on every linear layer, unless something else is said."""
    standard = {"experts": EXPERTS, "router_width": 8, "sparsity": 0.5, "channels": None}
    dtype = options.pop("dtype", None)
    return Interpolated(dense=dense, dtype=dtype, seed=0, spec=SimoeSpec.from_config({**standard, **options}))


def write_made(path: Path, made: Sequence[Made], config: dict[str, Any]) -> Path:
    """Tensors and a config as a checkpoint in one file; returns the path."""
    path.mkdir(parents=True)
    writer = CheckpointWriter(path, [[one.spec for one in made]])
    writer.write_shard(0, ((one.spec.name, one.make()) for one in made))
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_upcycled(path: Path, model: Converted) -> Path:
    return write_made(path, [one for _, unit in model.units() for one in unit], model.config())


def load(path: Path, auto: Any = AutoModelForCausalLM, **options: Any) -> Any:
    with quiet():
        return auto.from_pretrained(path, **options).eval()


def prompt(rows: int = 2, length: int = 24) -> Tensor:
    return torch.randint(1, 288, (rows, length), generator=torch.Generator().manual_seed(0))


def logits(model: Any, tokens: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        return model(input_ids=prompt() if tokens is None else tokens, use_cache=False).logits.float()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).double().norm() / expected.double().norm()).item()
