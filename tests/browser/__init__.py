"""A package, so that pytest ends Chromium and TensorBoard when the last test of a worker that needs them is over."""
