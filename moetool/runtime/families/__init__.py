"""Classes in the place of some of transformers' own, which it builds models of as soon as moetool is imported."""
