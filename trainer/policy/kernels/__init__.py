"""What runs on a CUDA card only: kernels as operations that torch.compile takes as they are."""
