"""Assignment of a layer's deltas to the processes that encode them."""

from moetool.architectures import Role
from moetool.calibration.peers import Owned, Peers
from moetool.costs.matrix_work import factorize
from moetool.format.layout import LayerLayout, delta_name, shared_name
from moetool.numerics.work import Work
from moetool.representations import Representation


def encoding_owners(layout: LayerLayout, peers: Peers, *, whole_experts: bool = False) -> Owned:
    """By what each delta takes to encode on a text; the first all of them where they have something in common. With
    `whole_experts` all matrices of an expert in one hand."""
    if any(layout.shared_tensors(role) for role in layout.shape.roles):
        return Owned.by_first(layout.shape, peers)
    if whole_experts:
        return Owned.by_expert(layout.shape, peers)
    costs: dict[tuple[Role, int], float] = {}
    for expert, role, form in layout.deltas():
        costs[role, expert] = _effort(_work(form, layout.shape.matrix(role)))
    return Owned(layout.shape, peers, costs)


def encoded_names(layout: LayerLayout, owned: Owned) -> set[str]:
    """The tensors that this process encodes, relative to the experts: those of its deltas."""
    names = {
        delta_name(expert, role, name)
        for expert, role, form in layout.deltas()
        if owned.has(role, expert)
        for name in form.tensors(layout.shape.matrix(role))
    }
    return names | {
        shared_name(role, name)
        for role in layout.shape.roles
        if owned.has(role, 0)
        for name in layout.shared_tensors(role)
    }


def _work(form: Representation, matrix: tuple[int, int]) -> Work:
    if form.is_whole:
        return Work(moved=8.0 * matrix[0] * matrix[1])
    return form.work(matrix, fed_back=True) + (factorize(matrix, form.directions) if form.directions else Work())


def _effort(work: Work) -> float:
    """About how many multiply-adds of a product would take as long."""
    decomposed = sum(9.0 * n**3 * count for n, count in work.eigen.items())
    decomposed += sum(n**3 / 3 * count for n, count in work.cholesky.items())
    return decomposed + sum(work.products.values()) + work.moved
