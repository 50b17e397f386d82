"""Products with stored matrices as they lie in memory: on a CPU by C++ that is compiled when it is needed first, on a
card by Triton.

Few tokens are multiplied while codes are decoded in registers (`routed`); for many, a part of a matrix is unpacked at a
time and handed to torch's own product (`unpack`). Where neither can run, the modules' eager form does.
"""
