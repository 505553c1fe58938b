"""Measures the recorded GPU results again that are missing, incomplete, or of earlier kernels."""
