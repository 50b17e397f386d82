"""The only use of lm-eval: its tasks are opened before any model is loaded, and asked of one that is."""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moetool.checkpoint.source import first_line, local_path
from moetool.errors import InvalidInputError, UsageError, did_you_mean
from moetool.job.progress import Progress
from moetool.kernels.rounding import exact_products
from moetool.measure.tasks.bars import told_to
from moetool.measure.tasks.options import GROUPS, TaskOptions, expanded

# Tasks whose metric is `code_eval`, which asks again whether generated code may be run.
_CODE_ALLOWED = "HF_ALLOW_CODE_EVAL"
_FILE_FORMATS = {"json", "csv", "parquet", "arrow", "text", "xml", "webdataset", "imagefolder", "audiofolder"}


@dataclass(frozen=True)
class OpenTasks:
    """Tasks of lm-eval whose data could be opened.

    Attributes:
        tasks: tasks and groups as lm-eval has them.
        manager: that opened them.
        library: its version.
    """

    tasks: tuple[Any, ...]
    manager: Any
    library: str


def open_tasks(options: TaskOptions) -> OpenTasks:
    """Find the tasks, and read or download what they ask.

    Raises:
        UsageError: lm-eval is not installed, there is no such task or folder, or a task runs code and that was not
            allowed.
        InvalidInputError: a task file or its data cannot be used or downloaded.
    """
    try:
        import lm_eval
    except ImportError as error:
        raise UsageError("--tasks needs lm-eval: pip install 'moetool[tasks]'.") from error
    names = expanded(options.tasks)
    folder = None if options.tasks_dir is None else _folder(options.tasks_dir)
    with exact_products(), _calm(), _code_allowed(options.confirm_run_unsafe_code):
        manager = _manager(names, folder)
        opened: dict[str, Any] = {}
        for name in names:
            for task in _opened(manager, name, folder, options.confirm_run_unsafe_code):
                opened.setdefault(getattr(task, "task_name", None) or task.name, task)
    return OpenTasks(tuple(opened.values()), manager, str(lm_eval.__version__))


def asked(opened: OpenTasks, model: Any, tokenizer: Any, options: TaskOptions, progress: Progress) -> Mapping[str, Any]:
    """Scores that lm-eval finds for a loaded model on the tasks; `progress` shows how many it was asked.

    Raises:
        InvalidInputError: a task cannot be asked of it.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with _calm(), told_to(progress), _code_allowed(options.confirm_run_unsafe_code):
        try:
            found = simple_evaluate(
                model=HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=options.batch_size),
                tasks=list(opened.tasks),
                task_manager=opened.manager,
                num_fewshot=options.few_shot,
                limit=options.limit,
                log_samples=False,
                confirm_run_unsafe_code=options.confirm_run_unsafe_code,
            )
        except (torch.OutOfMemoryError, MemoryError, OSError):
            raise
        except Exception as error:  # of tasks, each of which brings code of its own
            raise InvalidInputError(
                f"lm-eval cannot ask {', '.join(options.tasks)}: {type(error).__name__}: {first_line(error)}."
            ) from error
    assert isinstance(found, Mapping)  # `None` only for processes beside the first
    return found


def _folder(name: str) -> Path:
    folder = local_path(name).absolute()
    if not folder.is_dir():
        raise UsageError(f"--tasks-dir {name}: no such folder.")
    if next(folder.rglob("*.yaml"), None) is None:
        raise UsageError(f"--tasks-dir {name}: there is no task file (.yaml) in it.")
    return folder


def _manager(names: tuple[str, ...], folder: Path | None) -> Any:
    """lm-eval's index of tasks. Its own are thousands of files, which are not read where the folder has all names."""
    from lm_eval.tasks import TaskManager

    if folder is not None:
        local = TaskManager(include_path=str(folder), include_defaults=False)
        if set(names) <= set(local.all_tasks):
            return local
    manager = TaskManager(include_path=None if folder is None else str(folder))
    known = manager.all_tasks
    if unknown := [name for name in names if name not in known]:
        where = "lm-eval has no task" if folder is None else f"neither lm-eval nor {folder} has a task"
        meant = did_you_mean(unknown[0], [*GROUPS, *known])
        raise UsageError(f"--tasks: {where} {unknown[0]!r}.{meant} `lm-eval ls tasks` lists all.")
    return manager


def _opened(manager: Any, name: str, folder: Path | None, may_run_code: bool) -> list[Any]:
    """One task, its data read; of a group, that; of a tag, all that have it."""
    config = manager.task_index[name].cfg or {}
    _refuse_code(name, bool(config.get("unsafe_code")), may_run_code)
    try:
        with contextlib.chdir(folder) if folder is not None else contextlib.nullcontext():
            found = manager.load([name])
    except Exception as error:  # of the hub, of three libraries, and of the code that tasks bring
        raise InvalidInputError(_closed(name, config, error)) from error
    for task, own in found["tasks"].items():
        _refuse_code(task, bool(getattr(own, "UNSAFE_CODE", False)), may_run_code)
    groups = found.get("groups", {})
    return [groups[name]] if name in groups else list(found["tasks"].values())


def _refuse_code(task: str, runs_code: bool, may_run_code: bool) -> None:
    if runs_code and not may_run_code:
        raise UsageError(
            f"--tasks {task} runs code that the model writes, on this machine and with your rights. If that may be, in "
            "a container for instance, say --confirm-run-unsafe-code."
        )


def _closed(name: str, config: Mapping[str, Any], error: Exception) -> str:
    """Why a task cannot be opened, and what to do."""
    reason = f"{type(error).__name__}: {first_line(error)}"
    data = str(config.get("dataset_path", ""))
    if not data or data in _FILE_FORMATS:
        return f"Task {name} cannot be opened ({reason}). Mend its file or its data."
    return (
        f"Task {name} cannot be opened: it needs {data} of the hub ({reason}). Run it once where the hub can be "
        "reached, and its data stays in HF_HOME; or write the task as a file with local data (--tasks-dir)."
    )


@contextlib.contextmanager
def _calm() -> Iterator[None]:
    """Silence lm-eval's log below errors for the time of the `with` block."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _code_allowed(confirmed: bool) -> Iterator[None]:
    """Whoever has said that code may be run is not asked again."""
    before = os.environ.get(_CODE_ALLOWED)
    if confirmed:
        os.environ[_CODE_ALLOWED] = "1"
    try:
        yield
    finally:
        if confirmed and before is None:
            del os.environ[_CODE_ALLOWED]
        elif confirmed and before is not None:
            os.environ[_CODE_ALLOWED] = before
