"""C++ kernels for processors, compiled on the machine where they run."""
