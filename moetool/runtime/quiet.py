"""The name by which what runs models knows `moetool.checkpoint.quiet`."""

from moetool.checkpoint.quiet import quiet

__all__ = ["quiet"]
