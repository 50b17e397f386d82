"""Stored forms of matrices in C++ that are one header each, named after the kind of their operands.

`fp8.h` has a struct `fp8` with two functions: `decode(m, row, column)`, 16 columns of a row before they are scaled, and
`number(m, row, column)`, one. `matrices.h` has the rest.
"""
