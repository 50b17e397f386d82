"""Codes of what a job stores in few bits beside its experts, which make good for each other's errors on its text.

In 8 bits the nearest codes of attention, embeddings and head can lose as much as experts in 3 bits do; on a small
Mixtral these codes lose .4 of that (docs/findings.md). What each matrix is given is seen on the text that gradients
are taken on: attention on the way forward, head and embeddings at its turn and at its end (`TableMoments`). Rows that
make good for each other's errors gain nothing at this many bits.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from moetool.calibration.projection_grams import ProjectionGrams
from moetool.calibration.sweep import Sweep
from moetool.calibration.table_moments import TableMoments, mean_metric
from moetool.checkpoint.files import place, save_tensors
from moetool.format.beside import weight_of
from moetool.job.including import encoded, included_path
from moetool.job.job import Job, Source
from moetool.representations.measured import Measured


class IncludedCodes:
    """Chooses the codes of what a job includes while its text goes through the model and back."""

    def __init__(self, job: Job[Source], sweep: Sweep) -> None:
        """Take a job whose source says what is included, and the text that gradients are taken on."""
        self._job, self._sweep = job, sweep
        self._tables = [name for name in job.source.architecture.embeddings if name in job.source.included]
        self._moments = TableMoments(sweep, job.work) if self._tables and self._can_be_seen else None

    @property
    def _can_be_seen(self) -> bool:
        """Whether the head is a product with a matrix, and hidden states begin as rows of the embedding."""
        model = self._sweep.model
        embedding, head = model.model.get_input_embeddings(), model.model.get_output_embeddings()
        return isinstance(head, nn.Linear) and math.prod(model.state_shape) % embedding.weight.shape[1] == 0

    @property
    def sees_embeddings(self) -> bool:
        """Whether gradients have to come back to where the text is embedded."""
        return self._moments is not None

    def forward(self, layer: int, module: nn.Module) -> list[Path]:
        """Run the text through a loaded layer, and choose the codes of what is included of it. Returns the files that
        they wait in, of the first process."""
        prefix = self._job.source.architecture.layer_prefix(layer)
        names = [name for name in self._job.source.included if name.startswith(prefix)]
        modules = {name: module.get_submodule(name.removeprefix(prefix)) for name in names}
        grams = ProjectionGrams(layer, modules, self._sweep, self._job.device)
        with grams.watching():
            self._sweep.forward(layer, module)
        if not names:
            return []
        grams.reduce(self._sweep.peers)
        return [path for owner, same in grams.shared().items() for path in self._chosen(same, grams[owner])]

    def head(self) -> float:
        """Take the text through the head and back. Returns the loss per token."""
        return self._sweep.head() if self._moments is None else self._moments.see_head()

    def tables(self) -> list[Path]:
        """Choose the codes of embeddings and head, when gradients have come back to the first layer. Returns the files
        that they wait in, of the first process."""
        if self._moments is None or not self._sweep.peers.is_first:
            return []
        parts = [self._moments.embedded, self._moments.head]
        if self._sweep.model.is_tied:
            return self._chosen(self._tables, mean_metric(parts))
        metrics = dict(zip(self._job.source.architecture.embeddings, parts, strict=True))
        return [path for name in self._tables for path in self._chosen([name], metrics[name].metric)]

    def _chosen(self, modules: Sequence[str], gram: Tensor) -> list[Path]:
        """Write the codes of modules on the same inputs, in the first process."""
        if not self._sweep.peers.is_first:
            return []
        measured, paths = Measured.on_inputs(gram), []
        for module in modules:
            form = self._job.source.included[module]
            path = included_path(self._job.work, module)
            save_tensors(path, encoded(self._job.source.checkpoint, weight_of(module), form, measured))
            paths.append(path)
        return paths


def hand_on(work: Path, part: Path) -> None:
    """Let a part of a job, which has a work directory of its own, find the codes that were chosen for the whole."""
    for path in work.glob(included_path(work, "*").name):
        place(path, part / path.name)
