"""Decoder-only language models.

May use torch and einops. Never Lightning, or anything else of ours. ``config`` does not import torch, so that commands
answer quickly.
"""
