"""A tab of its own in TensorBoard."""
