"""The Triton kernels of the fused experts. Imported only where Triton is installed."""
