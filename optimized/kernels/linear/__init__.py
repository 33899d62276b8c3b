"""GEMM, GEMV and norms, in 16 bits and quantized, and the choice among them."""
