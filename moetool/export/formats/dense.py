"""Export to a dense model: one expert of each layer takes the place of them all."""

from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field

from moetool.checkpoint.files import patch_config
from moetool.checkpoint.manifest import Upcycling
from moetool.checkpoint.reader import Checkpoint
from moetool.costs.building_blocks import moe_size
from moetool.costs.calibration_cost import baseline
from moetool.costs.phases import rewriting_phases
from moetool.errors import InvalidInputError, UsageError
from moetool.export.unmerging import Unmerging, dense_config
from moetool.job.blueprint import imagine
from moetool.job.job import DecodedSource, Input, Job
from moetool.job.options import RunOptions
from moetool.job.plan import Plan
from moetool.job.result import Details, Sizes
from moetool.job.shards import ShardPlan
from moetool.job.stage import Stage
from moetool.job.writing import down_scale, passed_on, write_checkpoint
from moetool.runtime.dense import DenseModel


class ExportDenseOptions(RunOptions):
    """Options of `export --format dense`: which expert becomes the FFN."""

    expert: int = Field(0, ge=0, description="The expert that takes the place of all of its layer.")


class ExportDense(Stage[ExportDenseOptions]):
    """Un-merges an MoE model: of a model that was upcycled without changes, the very tensors it came from."""

    name: ClassVar[str] = "dense"
    summary: ClassVar[str] = "un-merge: one expert per layer becomes the FFN of a dense model"
    options_type: ClassVar[type[RunOptions]] = ExportDenseOptions
    source_type: ClassVar[type[Input]] = DecodedSource
    method_of: ClassVar[str | None] = "export"
    is_parallel: ClassVar[bool] = True
    continues: ClassVar[bool] = True

    @cached_property
    def _upcycled(self) -> Upcycling | None:
        """How the model came about, if moetool made it of a dense one."""
        return passed_on(self.source.checkpoint).upcycled

    @cached_property
    def _config(self) -> dict[str, object]:
        """`config.json` of the dense model. Raises `InvalidInputError` if there is no dense family for it."""
        if self._upcycled is not None:
            return self._upcycled.source_config
        config = dense_config(self.source.checkpoint.config, self.source.checkpoint.path)
        if config is None:
            raise InvalidInputError(
                f"There is no dense family with the layers of {self.source.checkpoint.config.get('model_type')}. "
                "Models that moetool upcycled itself can always be un-merged."
            )
        return config

    @cached_property
    def _dense(self) -> DenseModel:
        path = self.source.checkpoint.path
        return DenseModel(imagine(self.source.checkpoint.source, path, self._config))

    @cached_property
    def _unmerging(self) -> Unmerging:
        source, dense, expert, upcycled = self.source, self._dense, self.options.expert, self._upcycled
        granularity = 1 if upcycled is None else upcycled.granularity
        if upcycled is not None and not upcycled.whole:
            raise InvalidInputError(
                "Experts of this model are pieces of copies of an FFN, and pieces were taken out of it: its copies are "
                "no longer whole, and no dense model can be made of them."
            )
        count = source.experts.shape.experts // granularity
        if source.experts.shape.intermediate * granularity != dense.intermediate:
            raise InvalidInputError(
                f"Experts are {source.experts.shape.intermediate} wide and dense layers {dense.intermediate}: "
                "no dense model has both."
            )
        if expert >= count:
            raise UsageError(f"--expert {expert}: there are experts 0 to {count - 1}.")
        native = upcycled is None or upcycled.target != "moetool"
        tensors = dict(dense.checkpoint.tensors)
        if "lm_head.weight" in source.checkpoint.tensors:
            tensors.setdefault("lm_head.weight", source.checkpoint.tensors["lm_head.weight"])
        known = None if upcycled is None else upcycled.dtype
        original: torch.dtype = source.dtype if known is None else getattr(torch, known)
        return Unmerging(
            source.checkpoint,
            source.experts,
            dense.architecture,
            dict(sorted(tensors.items())),
            source.experts.moe_layers,
            expert=expert,
            native=native,
            granularity=granularity,
            down_scale=down_scale(source.checkpoint),
            dtype=original if original != source.dtype else None,
        )

    def _shards(self) -> ShardPlan:
        units = self._unmerging.units()
        return ShardPlan(((layer, [made.spec for made in unit]) for layer, unit in units), self.options.shard_size)

    def plan(self) -> Plan:
        matrix, output = self._dense.hidden * self._dense.intermediate, self._shards().nbytes
        return Plan(
            stage=self.name,
            input_bytes=self.source.checkpoint.weight_bytes,
            output_bytes=output,
            scratch_bytes=0,
            memory_bytes=baseline() + 8 * 4 * matrix,
            phases=rewriting_phases(moe_size(self.source.experts), output),
            details={"model_type": str(self._config["model_type"]), "expert": self.options.expert},
        )

    def run(self, job: Job) -> Details:
        shared = "none" if self._upcycled is None else self._upcycled.shared
        if shared != "none" or "shared_expert_intermediate_size" in self.source.checkpoint.settings:
            job.progress.log("The shared expert is left out: the dense model is the routed expert alone.")
        units = dict(self._unmerging.units())
        write_checkpoint(
            job,
            self._shards(),
            lambda layer: ((made.spec.name, made.make()) for made in units[layer]),
            config=patch_config(self._config),
        )
        return Details()

    def verify(self, output: Path) -> Sizes:
        made = DenseModel(Checkpoint.open(output))
        return Sizes(self.source.checkpoint.weight_bytes, made.checkpoint.weight_bytes)
