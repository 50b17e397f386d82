"""vLLM's `--load-format moetool`: what is in few bits beside the experts is decoded while it is loaded.

vLLM builds embeddings of some families without asking a plug-in how they are stored, so that a loader is the one place
where all of them can be decoded.
"""

from pathlib import Path
from typing import Any

from torch import nn
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.source import resolve_source
from moetool.errors import UsageError
from moetool.serving.plain_tensors import plain_tensors


class MoetoolLoader(BaseModelLoader):
    """Loader of compressed checkpoints whose attention, embeddings or head are in few bits, too."""

    def download_model(self, model_config: Any) -> None:
        """Download a model of the hub, where it is one."""
        _directory(model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Fill a model that vLLM has built."""
        model.load_weights(plain_tensors(Checkpoint.open(_directory(model_config))))  # type: ignore[operator]


def _directory(model_config: Any) -> Path:
    if model_config.revision is not None and not Path(model_config.model).exists():
        raise UsageError(
            f"--load-format moetool takes the newest revision of {model_config.model}. Download the other one, and "
            "name its folder."
        )
    return resolve_source(model_config.model)
