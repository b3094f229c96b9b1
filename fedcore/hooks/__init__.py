"""Hooks: their specifications and contexts, plugins, their options, declarations and checks, the set-up of a run."""
