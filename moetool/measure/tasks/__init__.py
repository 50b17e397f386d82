"""Tasks of lm-eval on models that moetool loads."""
