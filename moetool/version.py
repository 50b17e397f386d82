"""Version number of this package, which manifests record and `--version` prints."""

__version__ = "0.1.0"
