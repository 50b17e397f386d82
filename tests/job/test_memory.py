"""Memory goes back to the system between the units of a job."""

import platform

import pytest
import torch

from moetool.job.memory import anonymous_bytes, return_freed_memory, return_heap

MIB = 1 << 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what is freed is the C library's business")
def test_the_heap_gives_back_what_lies_between_blocks_in_use():
    return_freed_memory()
    return_heap()
    before = anonymous_bytes()
    blocks = [torch.ones(MIB, dtype=torch.uint8) for _ in range(128)]
    assert anonymous_bytes() - before > 120 * MIB
    del blocks[::2]
    assert anonymous_bytes() - before > 110 * MIB, "the heap keeps what is free below a block in use"
    return_heap()
    assert anonymous_bytes() - before < 74 * MIB
    assert len(blocks) == 64
