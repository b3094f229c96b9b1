"""The engine's speed next to a plain PyTorch loop: ``fedcore bench``."""
