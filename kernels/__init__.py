"""Accelerator kernels; they depend on JAX alone."""
