"""Tensors that a GGUF file has in other tensors or numbers than a checkpoint, and how each becomes the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Config = Mapping[str, object]
Recast = Callable[[Config, Tensor], Tensor]


def head_norms(queries: str, keys: str) -> dict[str, str]:
    """Names of the norms of each head's queries and keys, which are these modules of a layer's attention."""
    return {f"self_attn.{queries}.weight": "attn_q_norm.weight", f"self_attn.{keys}.weight": "attn_k_norm.weight"}


HEAD_NORMS: Mapping[str, str] = head_norms("q_norm", "k_norm")


def whole_numbers(config: Config, *keys: str) -> list[int]:
    """These entries of a config, which all have to be there as whole numbers."""
    found = [number for key in keys if isinstance(number := config[key], int)]
    assert len(found) == len(keys)
    return found


@dataclass(frozen=True)
class Change:
    """A tensor that a file has in other tensors, or with other numbers.

    Attributes:
        names: of the file's tensors, without their layer.
        apart: makes these of the checkpoint's tensor, given the model's config.
        together: makes the checkpoint's tensor of these.
        keeps_inputs: whether only rows lie otherwise, so that `apart` also takes numbers `[rows]`.
        is_transposed: whether the checkpoint has the file's matrix as `[in, out]`, with rows in the same order.
    """

    names: tuple[str, ...]
    apart: Callable[[Config, Tensor], Sequence[Tensor]]
    together: Callable[[Config, Sequence[Tensor]], Tensor]
    keeps_inputs: bool = False
    is_transposed: bool = False


def changed(name: str, there: Recast, back: Recast) -> Change:
    """The change of a tensor into one tensor of this name, and back."""
    return Change((name,), lambda config, given: [there(config, given)], lambda config, given: back(config, given[0]))


def plus_one(name: str) -> Change:
    """The weight of a norm that multiplies by one more than it says."""
    return changed(name, lambda _, given: given.float() + 1, lambda _, given: given - 1)


def norms_plus_one(behind_attention: str) -> dict[str, Change]:
    """The changes of a Llama's norms that multiply by one more than they say; that before the experts has this name."""
    names = {
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": behind_attention,
        "model.norm.weight": "output_norm.weight",
        **HEAD_NORMS,
    }
    return {name: plus_one(own) for name, own in names.items()}


def transposed(name: str) -> Change:
    """The change of a matrix `[in, out]`, as GPT-2 has them."""
    return replace(
        changed(name, lambda _, given: given.t(), lambda _, given: given.t()), keeps_inputs=True, is_transposed=True
    )


def gate_and_up(gate: str, up: str) -> Change:
    """The change of a matrix with the rows of gate above those of up into two matrices of these names, and back."""
    return Change(
        (gate, up), lambda _, joined: joined.chunk(2), lambda _, parts: torch.cat([*parts]), keeps_inputs=True
    )


def nearest(name: str) -> Change:
    """A matrix that is the same in a file, and has the nearest codes of 8 bits: an indexer's, which gives places in a
    text and so no gradient, one whose inputs come apart, for a group of heads each, or several modules in one."""
    return changed(name, lambda _, given: given, lambda _, given: given)
