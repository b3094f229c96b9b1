"""Graph classification for fedcore: data sets and models on torch_geometric."""

from fedcore_graph.datasets import imdb_binary, mutag, proteins
from fedcore_graph.models import GraphEncoder, gin
from fedcore_graph.samples import GraphSamples
from fedcore_graph.tudataset import read_tudataset

__all__ = ["GraphEncoder", "GraphSamples", "gin", "imdb_binary", "mutag", "proteins", "read_tudataset"]
