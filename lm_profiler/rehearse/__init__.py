"""A step rehearsed on tensors without data, by Lightning's own loop, in a child process.

May use ``callbacks``, whose marks observe it, and everything below. Never imports ``cli``, which hands over what a
call says. A step that ran is sent by an instrument, which starts the process by the name of what counts it.
"""
