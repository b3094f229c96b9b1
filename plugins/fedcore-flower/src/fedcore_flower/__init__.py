"""Federations across organisations: fedcore's rounds on Flower's SuperLink and SuperNodes.

This file imports nothing, because small processes that need no torch also import the package.
"""
