"""What each verb does: a module a verb, with ``Options`` and ``run(options)``, which returns the exit code.

May use everything below, what reads and checks a call, and what asks ``workers``. Never imports ``main``.
"""
