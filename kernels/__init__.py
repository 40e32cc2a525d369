"""Kernels for expert layers, each beside its plain torch reference."""
