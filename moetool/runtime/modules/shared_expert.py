"""A family's shared expert that is stored on the base of the routed experts, as the last of them."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures import Role
from moetool.runtime.modules.experts import SharedBaseExperts
from moetool.runtime.modules.networks import dropout_of
from moetool.runtime.modules.offloading import below, loaded


class SharedExpertOnBase(nn.Module):
    """Stands where the family has its shared expert; the routed experts, whose base it shares, compute it.

    Holds no more than the biases, under their native names: both modules are kept in a tuple, so that neither is
    registered a second time.
    """

    def __init__(self, experts: SharedBaseExperts, native: nn.Module, names: Mapping[Role, str]) -> None:
        """`native` is the module this one replaces; `names` are those of its matrices, by role."""
        super().__init__()
        self._modules_elsewhere = experts, native
        self.names = dict(names)
        for role in experts.layout.shape.biases:
            path = names[role].removesuffix(".weight")
            holder = nn.Module()
            holder.bias = native.get_submodule(path).bias
            self.add_module(path, holder)

    @property
    def experts(self) -> SharedBaseExperts:
        """The routed experts, and this one as the last of them."""
        return self._modules_elsewhere[0]

    @property
    def native(self) -> nn.Module:
        """What was here, without weights."""
        return self._modules_elsewhere[1]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[…, hidden]` → the same."""
        with loaded(*below(self)):
            biases: dict[Role, Tensor] = {role: self.bias(role) for role in self.experts.layout.shape.biases}
            output = self.experts.shared_expert(hidden_states, biases)
        return F.dropout(output, dropout_of(self.native), self.training)

    def bias(self, role: Role) -> nn.Parameter:
        """The shared expert's own, beside one of its matrices."""
        return self.get_parameter(self.names[role].removesuffix("weight") + "bias")
