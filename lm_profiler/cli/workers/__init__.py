"""Programs that a verb starts in a process of their own.

May use what a verb may. Never imports ``main`` or a verb: who starts a program tells it what to run.
"""
