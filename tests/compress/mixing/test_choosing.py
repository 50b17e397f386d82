"""What a hybrid tells of itself."""

from moetool.compress.mixing.choosing import summed


def test_many_small_losses_add_up() -> None:
    """To four digits at the end, not at every addition: from 1 on, 0.0004 would be lost each time."""
    losses = [((3, "up", 0), 1.0), *(((3, "up", expert), 4e-4) for expert in range(1, 1001)), ((4, "down", 0), 1 / 3)]
    assert summed(losses) == {3: {"up": 1.4}, 4: {"down": 0.3333}}
