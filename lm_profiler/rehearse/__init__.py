"""Rehearses a step on fake tensors in Lightning's own loop, in a child process.

This package may import ``callbacks``, whose marks observe the step, and everything below. It never imports ``cli``,
which hands over the parsed options. An instrument that sends an observed step names the function that counts it
(``sent.count``).
"""
