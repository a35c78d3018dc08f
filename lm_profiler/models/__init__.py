"""Decoder-only language models.

This package may import torch and einops. It never imports Lightning, or anything else of ours. ``config`` does not
import torch, so that commands answer quickly.
"""
