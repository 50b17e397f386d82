"""The weight of a quantized module as other code sees it: `module.weight` reads as the matrix that the codes stand for.

Adapters, their merging and the resizing of embeddings read a module's `weight` and write to it. Reading decodes;
writing makes the module an ordinary one. Only writing to a part that was read before, as `weight[3].zero_()`, is lost.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from moetool.errors import UsageError
from moetool.format.kinds.base import PLACEHOLDER

_SEEN = ("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "stride", "get_device",
         "data_ptr", "is_contiguous", "__hash__", "__len__")  # fmt: skip
_COMPUTED = tuple(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real"))
_ALIASES = (Tensor.data.__get__, Tensor.detach)  # type: ignore[attr-defined]
_ASSIGN = Tensor.data.__set__  # type: ignore[attr-defined]
_FREEZE = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class HoldsCodes(Protocol):
    """Protocol of a module that stores its matrix as codes and decodes it when it is needed."""

    @property
    def weight(self) -> Any:
        """A stand-in for the decoded matrix `[out, in]`, for code that reads `module.weight`."""

    def matrix_shape(self) -> tuple[int, int]:
        """Return the shape `[out, in]` of the matrix, without decoding it."""

    def decoded(self) -> Tensor:
        """Decode the matrix `[out, in]`."""

    def become_dense(self, matrix: nn.Parameter) -> None:
        """Drop the codes and become an ordinary module with this matrix `[out, in]`."""


class Placeholder(nn.Parameter):
    """The parameter `[1, 1]` that a module of codes registers as `weight`, as in its file.

    accelerate moves what it reads as `weight`, which is the matrix, and registers it as an object of the class of what
    was registered. Made of a matrix, this is a placeholder all the same.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = False) -> "Placeholder":
        """Make a placeholder of another, whose memory it shares, or of a matrix, of which it keeps nothing."""
        own = data.detach()
        own = own if (*own.shape,) == PLACEHOLDER else torch.zeros(PLACEHOLDER, dtype=own.dtype, device=own.device)
        return super().__new__(cls, own, requires_grad)

    @classmethod
    def become(cls, parameter: nn.Parameter | None) -> None:
        """Make one of an ordinary parameter of that shape, in place: other modules may have it, too."""
        if type(parameter) is nn.Parameter and (*parameter.shape,) == PLACEHOLDER:
            parameter.__class__ = cls


class CodedWeight(nn.Parameter):
    """The matrix `[out, in]` of a module of codes, decoded when it is computed with. Made when it is read, and anew if
    nobody holds it any more; tied modules give the same one."""

    module: HoldsCodes
    placeholder: nn.Parameter

    @classmethod
    def of(cls, module: HoldsCodes, placeholder: nn.Parameter) -> "CodedWeight":
        """The weight of a module, in the dtype and on the device of its placeholder, which tied modules share."""
        with torch.no_grad():
            made = placeholder.detach().expand(module.matrix_shape()).as_subclass(cls)
        with torch._C.DisableTorchFunctionSubclass():
            held = _HELD.get(id(placeholder))
            if held is not None and held.placeholder is placeholder and held.is_set_to(made):
                return held
        made.module, made.placeholder = module, placeholder
        _HELD[id(placeholder)] = made
        return made

    def assign(self, matrix: Tensor) -> None:
        """Make its module, or what that has become since, an ordinary one of this matrix."""
        if (become_dense := getattr(self.module, "become_dense", None)) is None:
            self.module.weight.data = matrix
        else:
            become_dense(nn.Parameter(matrix, self.placeholder.requires_grad))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if args and isinstance(own := args[0], CodedWeight):
            if func in _ALIASES:
                return own
            if func in _FREEZE and False in (*args[1:], *kwargs.values()):
                return own
            if name == "to":
                moved = own.placeholder.to(*_plain(args[1:]), **_plain(dict(kwargs)))
                if moved is own.placeholder:
                    return own
                if moved.is_meta:
                    return moved.detach().expand(own.shape)
            if func == _ASSIGN:
                return own.assign(_plain(args[1]))
            if name in _SEEN or (name == "__get__" and func not in _COMPUTED):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(own, *args[1:], **kwargs)
            if name in ("__set__", "__delete__", "requires_grad_"):
                raise UsageError(
                    f"A matrix {list(own.shape)} that is stored as codes takes no gradients. Train its scales, or make "
                    "the model dense first: moetool.synthesize(model)."
                )
            if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
                with torch.no_grad():
                    matrix = own.module.weight.clone()
                    func(matrix, *_plain(args[1:]), **_plain(dict(kwargs)))
                own.assign(matrix)
                return matrix
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_plain(args), **_plain(dict(kwargs)))


_HELD: WeakValueDictionary[int, CodedWeight] = WeakValueDictionary()  # by their placeholders


def _plain(value: Any) -> Any:
    """A value with decoded matrices in the place of those in it."""
    if isinstance(value, CodedWeight):
        return value.module.decoded()
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    return {key: _plain(own) for key, own in value.items()} if isinstance(value, dict) else value


def placeholder_of(parameter: nn.Parameter | None) -> nn.Parameter | None:
    """What a module may keep: the placeholder of a decoded view, any other parameter itself.

    accelerate keeps a view, too, as what it read as `weight`, until it ties what was tied.
    """
    return parameter.placeholder if isinstance(parameter, CodedWeight) else parameter
