"""PyTorch's CUDA code on a GPU that computes nothing: it keeps time, memory and order (README.md beside this file)."""
