"""All but one thing is in pyproject.toml: wheels have the presets of `configs/` as `moetool/presets`."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PRESETS = sorted(str(file) for file in Path("configs").glob("*.yaml"))


class BuildWithPresets(build_py):
    """Copies the presets into wheels. In a checkout, editable installs among them, they are read where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in zip(PRESETS, self._preset_targets(), strict=True):
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *PRESETS]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._preset_targets()]

    def _preset_targets(self) -> list[str]:
        return [str(Path(self.build_lib, "moetool", "presets", Path(file).name)) for file in PRESETS]


setup(cmdclass={"build_py": BuildWithPresets})
