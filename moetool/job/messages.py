"""Messages between processes as bytes: JSON values and tensors in the safetensors format, never pickles."""

import json
from typing import TypeAlias

import torch
from safetensors.torch import load, save
from torch import Tensor

# Of these, and of any others nested: None, bool, int, float, str, bytes, Tensor, list, tuple, set, dict.
Said: TypeAlias = object

_SAID = "said"
_PLAIN = (bool, int, float, str)


def to_bytes(said: Said) -> Tensor:
    """`[bytes]` uint8. Raises `TypeError` for what is no message: a class of ours says its fields, in a tuple."""
    tensors: dict[str, Tensor] = {}

    def noted(tensor: Tensor) -> str:
        name = str(len(tensors))
        tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()  # safetensors takes no two of one memory
        return name

    def words(said: Said) -> object:
        if said is None or type(said) in _PLAIN:
            return said
        if isinstance(said, Tensor):
            return {"tensor": noted(said), "on_card": said.is_cuda}
        if isinstance(said, bytes):
            return {"bytes": noted(torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else torch.empty(0))}
        if type(said) in (list, tuple, set):
            assert isinstance(said, list | tuple | set)
            return {type(said).__name__: [words(part) for part in said]}
        if type(said) is dict:
            return {"dict": [[words(key), words(value)] for key, value in said.items()]}
        raise TypeError(f"{type(said).__name__} is no message between processes")

    spoken = json.dumps(words(said))
    return torch.frombuffer(bytearray(save(tensors, {_SAID: spoken})), dtype=torch.uint8)


def from_bytes(content: Tensor) -> Said:
    """Inverse of `to_bytes`. A tensor that was on a card is on this process's own."""
    data = content.numpy().tobytes()
    end = 8 + int.from_bytes(data[:8], "little")
    spoken, tensors = json.loads(data[8:end])["__metadata__"][_SAID], load(data)

    def heard(words: object) -> Said:
        if not isinstance(words, dict):
            return words
        if "tensor" in words:
            tensor = tensors[words["tensor"]]
            return tensor.cuda() if words["on_card"] else tensor
        ((kind, parts),) = words.items()
        if kind == "bytes":
            return tensors[parts].to(torch.uint8).numpy().tobytes()
        if kind == "dict":
            return {heard(key): heard(value) for key, value in parts}
        found = [heard(part) for part in parts]
        return {"list": list, "tuple": tuple, "set": set}[kind](found)

    return heard(json.loads(spoken))
