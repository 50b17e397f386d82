"""Which models processes cannot train in parts."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from moetool.errors import UsageError
from moetool.format.entry import custom_entry
from moetool.format.kinds.simoe import SimoeSpec
from moetool.tune.options import TuneOptions
from moetool.tune.stage import Tune


def test_what_is_constrained_as_a_whole_is_not_shared_out() -> None:
    config: dict[str, object] = {"quantization_config": None}
    stage = SimpleNamespace(
        options=TuneOptions(data="text.txt"), source=SimpleNamespace(checkpoint=SimpleNamespace(config=config))
    )
    Tune._check_sharding(cast(Any, stage), "ZeRO 2")
    config["quantization_config"] = custom_entry(SimoeSpec(experts=2, router_width=4, sparsity=0.5, channels=None))
    with pytest.raises(UsageError, match="SIMoE's masks are constrained as a whole, and ZeRO 2 has them in parts"):
        Tune._check_sharding(cast(Any, stage), "ZeRO 2")
