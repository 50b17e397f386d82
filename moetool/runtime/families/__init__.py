"""Classes in the place of some of transformers' own, which it builds models of as soon as moetool is imported."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def take_the_place(of: "type[nn.Module]", own: "type[nn.Module]") -> None:
    """Let transformers build one of our classes where its models have one of its own."""
    from transformers.monkey_patching import register_patch_mapping

    register_patch_mapping({f"^{of.__name__}$": own}, overwrite=True)  # a bare name is looked for in others, too
