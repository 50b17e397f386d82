"""Public functions of Python check here that they are given a loaded model."""

from torch import nn

from moetool.errors import UsageError


def check_loaded(model: object, function: str) -> None:
    """Raise `UsageError` unless a public function was given a loaded model, rather than the path of one."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"moetool.{function} takes a loaded model, not a {type(model).__name__}: "
            "load it with AutoModelForCausalLM.from_pretrained(PATH)."
        )
