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


def test_a_model_without_its_head_is_not_made_whole_by_a_random_one() -> None:
    inside = "layers.0.mlp.up_proj.weight"
    advice = what_to_do([f"model.{inside}"], ["embed_tokens.weight", inside])
    assert "without its head: give the whole model. Only if its head is its embedding" in advice
    assert "'model.' before it" in advice
    assert "give the whole model" in what_to_do(["lm_head.weight"], ["model.embed_tokens.weight", f"model.{inside}"])
    assert "download it again" in what_to_do(["lm_head.weight", "model.norm.weight"], [f"model.{inside}"])
