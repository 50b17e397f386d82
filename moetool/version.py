"""The version of this package, for manifests and `--version`."""

__version__ = "0.1.0"
