"""Kernels that need a CUDA GPU, registered as operations that torch.compile does not trace."""
