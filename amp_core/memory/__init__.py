"""The same bits in less memory or time: recomputation, torch.compile, CUDA graphs."""
