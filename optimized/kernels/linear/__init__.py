"""GEMM, GEMV, LoRA, norms and activations, in 16 bits and quantized, and the choice among them."""
