"""What each verb does: a module a verb, with ``Options`` and ``run(options)``, which returns the exit code.

May use everything below, and what reads and checks a call. Never imports ``main``, and ``workers`` only by name.
"""
