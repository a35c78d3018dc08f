"""The tab: a plugin that answers what a browser asks; its pages are those of ``report.page``.

May use werkzeug, and what ``tensorboard`` may. Never computes a figure, and never loads anything from the network.
"""
