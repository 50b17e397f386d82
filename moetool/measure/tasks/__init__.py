"""Evaluation on lm-eval's tasks of models that moetool loads."""
