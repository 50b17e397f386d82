"""Checkpoints that other tools have quantized, decoded to the matrices that they stand for when these are read."""
