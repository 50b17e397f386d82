"""Options of `moetool eval --tasks`, and the groups of tasks that moetool names."""

from typing import ClassVar

from pydantic import Field

from moetool.job.options import Names
from moetool.measure.options import EvaluatedOptions

# Names of ours for several tasks. The first: the seven on whose mean the D²-MoE paper compares, in its order.
GROUPS: dict[str, tuple[str, ...]] = {
    "commonsense": ("openbookqa", "arc_easy", "winogrande", "hellaswag", "arc_challenge", "piqa", "mathqa")
}


class TaskOptions(EvaluatedOptions):
    """Options of evaluation on lm-eval's tasks: which ones, how many questions, and where task files lie."""

    group: ClassVar[str] = "Tasks"

    tasks: Names = Field(
        (),
        description="Tasks of lm-eval, with commas, instead of --data or beside it; commonsense: the seven of the "
        "D²-MoE paper (pip install 'moetool[tasks]').",
    )
    tasks_dir: str | None = Field(
        None, description="A folder with task files (.yaml); paths to their data are relative to it."
    )
    limit: int | None = Field(None, ge=1, description="Ask only the first N questions of each task.")
    few_shot: int | None = Field(None, ge=0, description="Examples before each question [default: the task's].")
    batch_size: int = Field(8, ge=1, description="Questions per batch.")
    confirm_run_unsafe_code: bool = Field(
        False, description="Run the code that the model writes (humaneval, mbpp) on this machine, with your rights."
    )


def expanded(names: tuple[str, ...]) -> tuple[str, ...]:
    """The tasks of groups in the place of their names, each task once."""
    return tuple(dict.fromkeys(task for name in names for task in GROUPS.get(name, (name,))))
