"""Random streams: what a number is depends on the seed and on what it is for, and on nothing else."""

import torch

from moetool.numerics.seeding import generator, uniform


def drawn(seed: int, *purpose: str | int) -> list[float]:
    return torch.rand(5, generator=generator(seed, *purpose)).tolist()


def test_the_order_of_drawing_does_not_matter() -> None:
    purposes = [("router", layer) for layer in range(4)] + [("drop", 1, 2)]
    forwards = {purpose: drawn(7, *purpose) for purpose in purposes}
    torch.rand(100)
    backwards = {purpose: drawn(7, *purpose) for purpose in reversed(purposes)}
    assert backwards == forwards


def test_the_global_stream_is_left_alone() -> None:
    before = torch.get_rng_state()
    uniform((3, 3), 1.0, generator(0, "router", 0))
    assert torch.get_rng_state().equal(before)


def test_streams_differ_by_seed_and_by_every_part_of_the_purpose() -> None:
    streams = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 1), (0, "a", 0, 1), (0, "a", 1, 0), (0, "a", "1")]
    found = {tuple(drawn(*stream)) for stream in streams}
    assert len(found) == len(streams)


def test_streams_are_those_of_earlier_versions() -> None:
    """The seed is all that a manifest keeps of them."""
    assert generator(0, "router", 3).initial_seed() == 0x660D1A0A8964569E


def test_uniform_numbers_have_the_standard_deviation_that_was_asked_for() -> None:
    found = uniform((400, 500), 0.25, generator(0, "x"))
    assert found.dtype == torch.float32
    assert found.shape == (400, 500)
    assert abs(found.std().item() / 0.25 - 1) < 0.01
    assert abs(found.mean().item()) < 0.005
    limit = 0.25 * 3**0.5
    assert 0.999 * limit < found.abs().max().item() <= limit * (1 + 1e-6)
