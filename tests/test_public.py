"""What `import moetool` gives."""

import pytest

import moetool
from moetool.runtime.synthesis import synthesize


@pytest.mark.parametrize("name", moetool.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(moetool, name)


def test_synthesize_is_imported_when_it_is_asked_for() -> None:
    assert moetool.synthesize is synthesize


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'synthesis'"):
        moetool.synthesis  # noqa: B018
