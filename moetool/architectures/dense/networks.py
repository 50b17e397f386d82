"""Recognition of feed-forward networks among transformers' modules: `down(act(up))` or `down(act(gate) · up)`.

The module's own forward is traced (`torch.fx`): nothing is computed, so that it may be on the meta device.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from moetool.architectures.shape import Role
from moetool.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.fx import Graph

    Node = Any  # torch.fx's, whose arguments may be anything

_MOST = 3  # linear layers of a network
# Modules with activations of one neuron at a time, and functions and methods that such are made of.
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "truediv", "neg", "pow", "square", "exp", "tanh", "sigmoid", "erf", "sqrt", "clamp", "float"}
    | {"relu", "relu_", "silu", "gelu", "softplus", "relu6", "hardtanh", "to", "type_as", "contiguous"}
)


@dataclass(frozen=True)
class Network:
    """Description of a feed-forward network: its linear layers by role, activation, dropout and residual.

    Attributes:
        linear: path of the linear layer of every role, relative to the module. Gate and up may be one layer, the gate's
            rows first.
        is_transposed: the layers' weights are `[in, out]` (GPT-2's `Conv1D`).
        activation: what is computed of every neuron's gate, or of up in a network without a gate.
        dropout: probability of dropout on the output.
        factor: what the output is multiplied by.
        adds: the network has a second argument, which it adds to its output: the residual.
    """

    linear: Mapping[Role, str]
    is_transposed: bool
    activation: "Callable[[Tensor], Tensor]"
    dropout: float = 0.0
    factor: float = 1.0
    adds: bool = False


def is_linear(module: object) -> "TypeGuard[nn.Module]":
    """Whether a module is a linear layer: torch's, or GPT-2's `Conv1D`, whose weight is `[in, out]`."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def size_of(linear: "nn.Module") -> tuple[int, int]:
    """Number of outputs and of inputs of a linear layer, `nn.Linear` or transformers' transposed `Conv1D`."""
    from torch import nn

    rows, columns = linear.get_parameter("weight").shape
    return (rows, columns) if isinstance(linear, nn.Linear) else (columns, rows)


def may_be_network(module: "nn.Module", hidden: int) -> bool:
    """Whether a module has the linear layers of a feed-forward network, by their sizes."""
    sizes = [size_of(child) for child in module.modules() if child is not module and is_linear(child)]
    if not 2 <= len(sizes) <= _MOST:
        return False
    ends = [(width, sizes[:at] + sizes[at + 1 :]) for at, (rows, width) in enumerate(sizes) if rows == hidden]
    return any(all(size in ((width, hidden), (2 * width, hidden)) for size in others) for width, others in ends)


def network_in(module: "nn.Module") -> Network:
    """The feed-forward network that a module computes.

    Raises:
        InvalidInputError: it computes something else; the message is a clause that says what.
    """
    return _Trace(module).network()


class _Trace:
    """The graph of a module's forward, read from its output back to its input."""

    def __init__(self, module: "nn.Module") -> None:
        from torch import fx

        class Tracer(fx.Tracer):
            def is_leaf_module(self, m: "nn.Module", module_qualified_name: str) -> bool:
                return is_linear(m) or not any(map(is_linear, m.modules()))

            def to_bool(self, obj: fx.Proxy) -> bool:
                return False  # nothing that a network computes depends on numbers

            def keys(self, obj: fx.Proxy) -> Any:
                return iter(())  # of `**kwargs`

        self.module = module
        try:
            self.graph: Graph = Tracer().trace(module)
        except Exception as error:  # whatever a forward raises of placeholders
            raise self._refusal("computes in a way that cannot be followed") from error
        self.inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.linears = [node for node in self.graph.nodes if self._module(node, is_linear)]

    def _refusal(self, how: str) -> InvalidInputError:
        return InvalidInputError(f"{type(self.module).__name__} {how}")

    def _module(self, node: "Node", of: Callable[[object], bool]) -> bool:
        return node.op == "call_module" and of(self.module.get_submodule(str(node.target)))

    def network(self) -> Network:
        returned = next(node for node in self.graph.nodes if node.op == "output").args[0]
        down, dropout, factor, adds = self._exit(returned)
        value = self._without_dropout(down.args[0])[0]
        pieces = self._pieces(value)
        roles: list[Node]
        if len(pieces) == 1:
            roles, activated = [pieces[0], down], value
            names: tuple[Role, ...] = ("up", "down")
        else:
            gate, up, activated = self._gated(value, pieces)
            roles, names = [gate, up, down], ("gate", "up", "down")
        linear = {role: self._linear_of(node) for role, node in zip(names, roles, strict=True)}
        entering = {*linear.values()} - {linear["down"]}
        if any(self._linear_node(path).args != (self.inputs[0],) for path in entering):
            raise self._refusal("multiplies something else than its input with its matrices")
        if {str(node.target) for node in self.linears} != {*linear.values()}:
            raise self._refusal("has more matrices than a feed-forward network")
        transposed = {not _is_torch(self.module.get_submodule(path)) for path in linear.values()}
        if len(transposed) > 1:
            raise self._refusal("has matrices of two kinds")
        activation = self._function(roles[0], activated)
        return Network(linear, transposed.pop(), activation, dropout, factor, adds)

    def _exit(self, node: "Node") -> tuple["Node", float, float, bool]:
        """The last matrix's node, and what is done with what it gives."""
        dropout, factor, adds = 0.0, 1.0, False
        while not (hasattr(node, "op") and node in self.linears):
            if not hasattr(node, "op"):
                raise self._refusal("gives something else than one tensor")
            inner, share = self._without_dropout(node)
            kind, operands = _name(node), list(node.args[:2])
            if inner is not node:
                node, dropout = inner, share
            elif kind == "mul" and any(isinstance(one, int | float) for one in operands):
                factor *= next(one for one in operands if isinstance(one, int | float))
                node = next(one for one in operands if not isinstance(one, int | float))
            elif kind == "add" and len(self.inputs) > 1 and self.inputs[1] in operands and not adds:
                adds, node = True, next(one for one in operands if one is not self.inputs[1])
            else:
                raise self._refusal(f"does more with its output than a feed-forward network ({kind})")
        return node, dropout, factor, adds

    def _without_dropout(self, node: "Node") -> tuple["Node", float]:
        """What a dropout is given, and its probability; the node itself where it is none."""
        from torch import nn

        if node.op == "call_module" and isinstance(own := self.module.get_submodule(str(node.target)), nn.Dropout):
            return node.args[0], own.p
        if _name(node) == "dropout":
            return node.args[0], float(node.kwargs.get("p", node.args[1] if len(node.args) > 1 else 0.5))
        return node, 0.0

    def _pieces(self, value: "Node") -> "list[Node]":
        """What a value is computed of: what matrices give, or halves of it."""
        found: dict[Node, None] = {}
        due, seen = [value], set[object]()
        while due:
            node = due.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self.linears or self._half(node) is not None:
                found[node] = None
            elif node.op == "placeholder":
                raise self._refusal("mixes its input with its neurons")
            elif node.op != "get_attr":
                due += reversed(node.all_input_nodes)
            if self._is_mixing(node) and node not in found:
                raise self._refusal(f"computes one neuron of others ({_name(node)})")
        if not 1 <= len(found) <= 2:
            raise self._refusal(f"computes its neurons of {len(found)} things")
        return list(found)

    def _is_mixing(self, node: "Node") -> bool:
        if node.op == "call_module":
            module = self.module.get_submodule(str(node.target))
            return not type(module).__module__.startswith(_ACTIVATIONS) and not self._is_plain(module)
        return node.op in ("call_function", "call_method") and _name(node) not in _ELEMENTWISE | {"dropout"}

    def _is_plain(self, module: "nn.Module") -> bool:
        """Whether a module of another kind computes every neuron from itself alone."""
        from torch import nn

        if isinstance(module, nn.Dropout | nn.Identity):
            return True
        if any(True for _ in module.parameters()):
            return False
        try:
            inner = _Trace(module)
        except InvalidInputError:
            return False
        calls = [node for node in inner.graph.nodes if node.op in ("call_function", "call_method", "call_module")]
        return not any(map(inner._is_mixing, calls))

    def _half(self, node: "Node") -> int | None:
        """The half of a joined matrix's output that a node takes: 0, 1, or `None` if it takes no half of one."""
        if _name(node) != "getitem":
            return None
        source, at = node.args
        if isinstance(at, int) and _name(source) in ("chunk", "split", "tensor_split"):
            return at if source.args[0] in self.linears else None
        if source not in self.linears or not isinstance(at, tuple) or at[0] is not Ellipsis or len(at) != 2:
            return None
        width = size_of(self.module.get_submodule(str(source.target)))[0] // 2
        return {(None, width, None): 0, (width, None, None): 1}.get((at[1].start, at[1].stop, at[1].step))

    def _linear_of(self, node: "Node") -> str:
        """The module path of the linear layer whose output a node is, or is a part of."""
        while node not in self.linears:
            node = node.args[0]
        return str(node.target)

    def _linear_node(self, path: str) -> "Node":
        found = [node for node in self.linears if node.target == path]
        if len(found) != 1:
            raise self._refusal("uses a matrix twice")
        return found[0]

    def _gated(self, value: "Node", pieces: "list[Node]") -> "tuple[Node, Node, Node]":
        """Find the nodes of gate, up and act(gate) in the product that the down projection is given."""
        operands = [self._without_dropout(one)[0] for one in value.args[:2] if hasattr(one, "op")]
        if _name(value) == "mul" and len(operands) == 2:
            for activated, up in (operands, operands[::-1]):
                gate = next(piece for piece in pieces if piece is not up)
                if up in pieces and self._pieces(activated) == [gate]:
                    if self._linear_of(gate) == self._linear_of(up) and (self._half(gate), self._half(up)) != (0, 1):
                        raise self._refusal("has the rows of its gate below those of up")
                    return gate, up, activated
        raise self._refusal(f"combines gate and up in another way than by a product ({_name(value)})")

    def _function(self, start: "Node", end: "Node") -> "Callable[[Tensor], Tensor]":
        """What is computed between two nodes, of the first alone."""
        from torch import fx, nn

        if start is end:
            return nn.Identity()
        if end.args == (start,) and end.op == "call_module":
            return self.module.get_submodule(str(end.target))
        if end.args == (start,) and end.op == "call_function" and not end.all_input_nodes[1:]:
            function = end.target
            return functools.partial(function, **end.kwargs) if end.kwargs else function
        graph = fx.Graph()
        made = {start: graph.placeholder("rows")}
        for node in self.graph.nodes:
            inputs = node.all_input_nodes
            if node not in made and inputs and all(one in made for one in inputs):
                made[node] = graph.node_copy(node, lambda one: made[one])
            if node is end:
                break
        graph.output(made[end])
        made_of = fx.GraphModule(self.module, graph)
        made_of.graph.eliminate_dead_code()
        made_of.recompile()
        return made_of


def _is_torch(module: object) -> bool:
    from torch import nn

    return isinstance(module, nn.Linear)


def _name(node: object) -> str:
    """The name of the function, method or module that a node of the graph calls."""
    target = getattr(node, "target", "")
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))
