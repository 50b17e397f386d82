"""Dense models of every family that is asked for."""

from collections.abc import Callable

import pytest
from upcycled import open_dense, save_dense

from moetool.runtime.dense import DenseModel


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], DenseModel]:
    """A function from a family to a tiny model of it, made once."""
    directory, found = tmp_path_factory.mktemp("dense"), {}

    def get(family: str) -> DenseModel:
        if family not in found:
            found[family] = open_dense(save_dense(directory / family, family))
        return found[family]

    return get
