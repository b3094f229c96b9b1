"""Defaults that are themselves plugins, so that replacing them uses the same door as any method."""
