"""The tab: a plugin that answers a browser's requests; its pages come from ``report.page``.

May use werkzeug, and what ``tensorboard`` may. Never computes a figure, and never loads anything from the network.
"""
