"""Advice on weight files that lack tensors which `config.json` promises."""

from moetool.checkpoint.promises import what_to_do

OF_TOWER = "vision_tower.encoder.layers.0.self_attn.q_proj.weight"
OF_MODEL = "language_model.model.layers.{}.self_attn.q_proj.weight"


def test_a_tensor_of_another_tower_is_not_the_one_that_is_missing() -> None:
    """Layers of both are called alike, and renamed ones would be of another shape, or of none that is promised."""
    advice = what_to_do([OF_MODEL.format(0)], [OF_TOWER, OF_MODEL.format(1)])
    assert "download it again" in advice
    assert "rename" not in advice
    assert "'model.', not 'language_model.model.'" in what_to_do(
        ["model.layers.0.self_attn.q_proj.weight"], [OF_MODEL.format(0), OF_MODEL.format(1)]
    )
