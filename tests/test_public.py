"""What `import moetool` gives."""

import pytest

import moetool
from moetool.runtime.synthesis import synthesize


@pytest.mark.parametrize("name", moetool.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(moetool, name)


def test_synthesize_keeps_its_old_name() -> None:
    assert moetool.synthesize is moetool.synthesise is synthesize


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'synthesis'"):
        moetool.synthesis  # noqa: B018
