"""Result records of changes to an upcycled model."""

from collections.abc import Sequence
from dataclasses import dataclass

from moetool.job.result import Details


@dataclass(frozen=True, kw_only=True)
class AddedResult(Details):
    """Result of adding an expert.

    Attributes:
        experts, top_k: routed experts per layer, and of them per token.
        added: number of the new expert.
        router: what its row of the router is: `random`, or `text`.
        rest_difference: ‖difference‖ / ‖·‖ between the source's attention, norms and embeddings, which are left out,
            and the model's.
        sources: by number, the model that each expert came from; `None` where nothing says so.
        notes: what a user of the result has to know.
    """

    experts: int
    top_k: int
    added: int
    router: str
    rest_difference: float
    sources: Sequence[str | None]
    notes: Sequence[str]
