"""The portable kernels. Importing this package imports Triton."""
