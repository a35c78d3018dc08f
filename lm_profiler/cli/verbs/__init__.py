"""The verbs, one module each, with ``Options`` and ``run(options)``, which returns the exit code.

May use everything below ``cli`` and the modules that read and check a call. Never imports ``main``.
"""
