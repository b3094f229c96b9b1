"""Federations across organisations: fedcore's rounds on Flower's SuperLink and SuperNodes.

Imports nothing: it is the package of small processes, too.
"""
