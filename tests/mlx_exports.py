"""What `export --format mlx` wrote, read by its format alone."""

from pathlib import Path
from typing import Any

import torch
from checkpoints import WEIGHTS, change_tensors, config_of, copy_of
from safetensors.torch import load_file
from torch import Tensor


def export(run_cli: Any, source: Path, target: Path, *options: object) -> Any:
    return run_cli("export", source, target, "--format", "mlx", "--group-size", 32, *options)


def decoded(path: Path, module: str) -> Tensor:
    """A matrix, or all experts' of a layer, from the three tensors of the format alone."""
    stored, entry = load_file(path / WEIGHTS), config_of(path)["quantization"]
    own = entry.get(module, entry)
    words, scales, biases = (stored[f"{module}.{part}"] for part in ("weight", "scales", "biases"))
    assert words.dtype == torch.uint32
    spread = (words.view(torch.int32).unsqueeze(-1) >> torch.arange(32)) & 1
    codes = (spread.flatten(-2).unflatten(-1, (-1, own["bits"])) * 2 ** torch.arange(own["bits"])).sum(-1).float()
    return codes * scales.float().repeat_interleave(32, -1) + biases.float().repeat_interleave(32, -1)


def put_back(original: Path, exported: Path, target: Path) -> Path:
    """The Mixtral that an export was made of, with what its codes stand for."""
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    packed = {name.removesuffix(".scales") for name in load_file(exported / WEIGHTS) if name.endswith(".scales")}

    def change(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight")
            if ".experts." in name:
                block, _, rest = name.partition("experts.")
                expert, role, _ = rest.split(".")
                own = decoded(exported, f"{block}switch_mlp.{names[role]}")[int(expert)]
            elif module in packed:
                own = decoded(exported, module)
            else:
                continue
            tensors[name] = own.to(tensor)

    copy_of(original, target)
    change_tensors(target, change)
    return target
