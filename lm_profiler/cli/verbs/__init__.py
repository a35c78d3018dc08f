"""The verbs, one module each, with ``Options`` and ``run(options)``, which returns the exit code.

They may use everything below ``cli`` and the modules that read and check a call. They never import ``main``.
"""
