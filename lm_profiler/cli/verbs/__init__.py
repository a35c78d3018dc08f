"""The verbs, one module each, with ``Options`` and ``run(options)``, which returns the exit code.

This package may import everything below ``cli`` and the modules that read and check a call. It never imports ``main``.
"""
