"""vLLM's `--load-format moetool`: experts are read from the files, and what is compressed beside them is decoded.

vLLM builds embeddings of some families without asking a plug-in how they are stored, and its models take the names of
experts' tensors apart in ways of their own, so that a loader is the one place where all of them can be loaded.
"""

from pathlib import Path
from typing import Any

from torch import nn
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from moetool.checkpoint.experts import ExpertReader
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.source import resolve_source
from moetool.errors import UsageError
from moetool.format.families import architecture_of
from moetool.serving.plain_tensors import plain_tensors
from moetool.serving.vllm_layers import MoetoolExpertsMethod


class MoetoolLoader(BaseModelLoader):
    """Loader of compressed checkpoints in any form that vLLM's models can run."""

    def download_model(self, model_config: Any) -> None:
        """Download a model of the hub, where it is one."""
        _directory(model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Fill a model that vLLM has built: compressed experts from the files, all else by vLLM's own names."""
        checkpoint = Checkpoint.open(_directory(model_config))
        reader = ExpertReader(checkpoint, architecture_of(checkpoint.config))
        for module in model.modules():
            if isinstance(method := getattr(module, "quant_method", None), MoetoolExpertsMethod):
                method.fill(reader)
        model.load_weights(plain_tensors(reader))  # type: ignore[operator]


def _directory(model_config: Any) -> Path:
    if model_config.revision is not None and not Path(model_config.model).exists():
        raise UsageError(
            f"--load-format moetool takes the newest revision of {model_config.model}. Download the other one, and "
            "name its folder."
        )
    return resolve_source(model_config.model)
