"""Expert kernels of others, and of ours that lost: what the benchmarks compare with."""
