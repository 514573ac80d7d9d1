"""Kernels of the TLX backend. Importing one imports Triton."""
