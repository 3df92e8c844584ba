"""Triton kernels of the ops, file by file as in `taut.ops`; imported when a CUDA tensor comes."""
