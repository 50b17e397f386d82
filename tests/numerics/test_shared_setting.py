"""Several users of one setting."""

import pytest

from moetool.numerics.shared_setting import SharedSetting


def test_the_last_user_restores_what_was_there_before() -> None:
    value = ["before"]
    setting = SharedSetting[str](lambda: value[0], lambda new: value.__setitem__(0, new))
    first, second = setting.held_at("held"), setting.held_at("held")
    first.__enter__()
    second.__enter__()
    assert value == ["held"]
    first.__exit__(None, None, None)
    assert value == ["held"]
    second.__exit__(None, None, None)
    assert value == ["before"]
    with pytest.raises(KeyError), setting.held_at("held"):
        raise KeyError
    assert value == ["before"]
