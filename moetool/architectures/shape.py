"""One MoE layer in numbers, and what its experts' matrices are called."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# transformers' names, in the experts of a layer, of the norm of what each gives, and of the number of further ones that
# have no matrices and give back what they are given.
NORM = "post_expert_norm"
IDENTITIES = "zero_expert_num"

Role = Literal["gate", "up", "down"]
ROLES: tuple[Role, ...] = ("gate", "up", "down")


def fused_name(roles: Sequence[Role]) -> str:
    """The name in transformers of the tensor that holds all experts' matrices of these roles: `gate_up_proj`,
    `down_proj`."""
    return "_".join(roles) + "_proj"


def by_name(names: Mapping[Role, str]) -> dict[str, list[Role]]:
    """Group roles by the tensor that holds them, each group in the order in which its matrices lie in the tensor."""
    found: dict[str, list[Role]] = {}
    for role, name in names.items():
        found.setdefault(name, []).append(role)
    return found


@dataclass(frozen=True)
class MoEShape:
    """One MoE layer: `experts` of `hidden` → `intermediate` → `hidden`, `top_k` of them per token.

    Attributes:
        roles: an expert's matrices, in order; without `gate` where experts have none.
        biases: those that have a bias `[out]` beside them. Every expert keeps its own biases, however its matrices are
            stored.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    roles: tuple[Role, ...] = ROLES
    biases: tuple[Role, ...] = ()

    @property
    def entering(self) -> tuple[Role, ...]:
        """The matrices that meet an expert's input: gate and up, or up alone."""
        return self.roles[:-1]

    @property
    def groups(self) -> tuple[tuple[Role, ...], ...]:
        """Matrices that are stored alike, and lie in one tensor where experts are fused."""
        return self.entering, ("down",)

    def group(self, role: Role) -> tuple[Role, ...]:
        """The roles of the group that a matrix belongs to: those that are stored alike with it."""
        return next(roles for roles in self.groups if role in roles)

    @property
    def expert_parameters(self) -> int:
        """Number of parameters in the matrices of one expert, without biases."""
        return len(self.roles) * self.hidden * self.intermediate

    @property
    def bias_parameters(self) -> int:
        """Number of parameters in the biases of one expert, all roles together."""
        return sum(self.matrix(role)[0] for role in self.biases)

    def matrix(self, role: Role) -> tuple[int, int]:
        """Shape `[out, in]` of one expert's matrix of that role, as torch stores it."""
        if role == "down":
            return self.hidden, self.intermediate
        return self.intermediate, self.hidden
