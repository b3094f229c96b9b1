"""Repositories of authors, and libraries that are no packages, from checkouts: see ``authors``."""

from __future__ import annotations

from authors import methods, niid_bench, pfllib

pfllib.write()
niid_bench.write()
methods.write()
