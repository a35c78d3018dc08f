"""Decoder-only language models.

May use torch and einops. Never Lightning, or anything else of ours. ``config`` stays free of torch, for commands that a
person waits for.
"""
