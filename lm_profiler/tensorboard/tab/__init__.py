"""The tab: a plugin that answers a browser's requests; its pages come from ``report.page``.

This package may import werkzeug, and whatever ``tensorboard`` may import. It never computes a figure, and never loads
anything from the network.
"""
