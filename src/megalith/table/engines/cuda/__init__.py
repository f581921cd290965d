"""The cuda engine: tables in GPU memory, kernels in Triton. `import megalith` does not load it."""
