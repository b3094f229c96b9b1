"""Graphs from files to batches: against torch_geometric's own loader and collation, and bad files."""

import os
from pathlib import Path

import pytest
import torch

from fedcore import DataError
from fedcore.data import load_dataset, numbered_as
from fedcore_testing import check_dataset, check_model
from tests.sentences import raises

REAL = Path(os.environ.get("FEDCORE_TEST_DATA", "/nonexistent"))


@pytest.fixture
def package():
    """Return the package; with torch_geometric it takes seconds to import, in each process that collects tests."""
    import fedcore_graph

    return fedcore_graph


@pytest.fixture
def rings(package, tmp_path, tu):
    return package.read_tudataset(tu.write(tmp_path, "RINGS", tu.rings_and_stars(30)), "RINGS")


def test_a_batch_is_what_torch_geometric_collates(rings, tu):
    from torch_geometric.data import Batch, Data

    graphs = []
    for graph in tu.rings_and_stars(30):
        x = torch.nn.functional.one_hot(torch.tensor(graph.node_labels), 3).float()
        edges = sorted([*graph.edges, *((b, a) for a, b in graph.edges)])
        graphs.append(Data(x=x, edge_index=torch.tensor(edges).t(), y=torch.tensor([graph.label > 0]).long()))
    for chosen in ([3], [29, 0, 0, 7], list(range(30))):
        ours, theirs = rings.gather(torch.tensor(chosen)), Batch.from_data_list([graphs[i] for i in chosen])
        for name in ("x", "edge_index", "batch", "ptr"):
            assert torch.equal(ours[name], theirs[name]), name
        assert ours.num_graphs == theirs.num_graphs == len(chosen)
        assert torch.equal(rings.labels[chosen], theirs.y)


def test_the_kit_is_content(package, tmp_path, tu):
    tu.write(tmp_path, "MUTAG", tu.rings_and_stars(40))
    check_dataset(lambda data_dir: package.mutag(tmp_path))
    dataset = package.mutag(tmp_path)
    assert (len(dataset.train), len(dataset.test), dataset.input_shape, dataset.kind) == (36, 4, (3,), "graphs")
    assert torch.bincount(dataset.test.labels).tolist() == [2, 2]
    check_model(package.gin, num_classes=2, input_shape=(3,), samples=dataset.train)


def test_classes_have_the_names_of_the_file_s_labels(package, tmp_path, tu):
    """Labels are numbered per file: at a site without stars, rings are class 0."""
    whole, rings = tu.rings_and_stars(40), [tu.ring(5) for _ in range(20)]
    for read, folder, names in (
        (package.mutag, "MUTAG", ("not mutagenic", "mutagenic")),
        (package.proteins, "PROTEINS", ("-1", "1")),
    ):
        assert read(tu.write(tmp_path / "whole", folder, whole)).class_names == names
        site = read(tu.write(tmp_path / "site", folder, rings))
        assert (site.class_names, site.num_classes) == (names[1:], 1)
        known = numbered_as(site.train.labels, site.class_names, names, "site")
        assert known.unique().tolist() == [1]


def test_selected_graphs_batch_as_before(rings):
    chosen = torch.tensor([4, 2, 9])
    part = rings.select(chosen)
    again, before = part.gather(torch.tensor([2, 0])), rings.gather(torch.tensor([9, 4]))
    assert torch.equal(again.edge_index, before.edge_index)
    assert torch.equal(again.x, before.x)
    assert torch.equal(part.labels, rings.labels[chosen])


def test_graphs_without_node_features_get_their_degree(package, tmp_path, tu):
    tu.write(tmp_path, "IMDB-BINARY", tu.rings_and_stars(40, node_labels=False))
    dataset = package.imdb_binary(tmp_path)
    widest = max(graph.nodes for graph in tu.rings_and_stars(40)) - 1  # a star's centre
    assert dataset.input_shape == (widest + 1,)
    graphs = dataset.train.gather(torch.arange(len(dataset.train)))
    assert torch.equal(graphs.x.sum(dim=1), torch.ones(graphs.num_nodes))
    degrees = torch.bincount(graphs.edge_index[0], minlength=graphs.num_nodes)
    assert torch.equal(graphs.x.argmax(dim=1), degrees)


def test_very_large_degrees_are_one_number(package, tmp_path, monkeypatch, tu):
    monkeypatch.setattr("fedcore_graph.tudataset.MAX_ONE_HOT_DEGREE", 5)
    tu.write(tmp_path, "IMDB-BINARY", tu.rings_and_stars(40, node_labels=False))
    x = package.read_tudataset(tmp_path, "IMDB-BINARY").x
    assert x.shape[1] == 1
    assert (float(x.mean()), float(x.std())) == pytest.approx((0, 1), abs=1e-5)


@pytest.mark.parametrize("position", [0, 2, 4])
def test_graphs_without_edges_are_graphs(package, tmp_path, position, tu):
    graphs = tu.rings_and_stars(4)
    graphs.insert(position, tu.Graph(2, [], 1, [0, 2]))
    samples = package.read_tudataset(tu.write(tmp_path, "SOME", graphs), "SOME")
    alone = samples.gather(torch.tensor([position]))
    assert (alone.num_nodes, alone.num_edges, alone.num_graphs) == (2, 0, 1)
    assert alone.x.argmax(dim=1).tolist() == [0, 2]
    model = package.gin(2, (3,)).eval()
    together = samples.gather(torch.arange(5))
    torch.testing.assert_close(model(together).logits[position : position + 1], model(alone).logits)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda raw: (raw / "SOME_A.txt").unlink(), ("SOME_A.txt",)),
        (lambda raw: (raw / "SOME_A.txt").write_text("1, x\n"), ()),
        (lambda raw: (raw / "SOME_A.txt").write_text("1, 6\n6, 1\n"), ()),
        (lambda raw: (raw / "SOME_A.txt").write_text("1, 99\n99, 1\n"), ()),
        (lambda raw: (raw / "SOME_graph_labels.txt").write_text("1\n1\n"), ("2", "4")),
        (lambda raw: (raw / "SOME_graph_indicator.txt").write_text("2\n1\n" * 9), ()),
    ],
    ids=["missing", "text", "astray", "beyond", "labels", "order"],
)
def test_files_that_cannot_be_used_are_named(package, tmp_path, change, named, tu):
    tu.write(tmp_path, "SOME", [tu.ring(4), tu.star(5), tu.ring(4), tu.ring(5)])
    change(tmp_path / "SOME" / "raw")
    with raises(DataError, *named) as error:
        package.read_tudataset(tmp_path, "SOME")
    assert str(tmp_path / "SOME" / "raw") in str(error.value)


def test_a_graph_without_nodes_is_refused_by_number(package, tmp_path, tu):
    graphs = [tu.ring(4), tu.Graph(0, [], 1, []), tu.ring(5)]
    with raises(DataError, "1"):
        package.read_tudataset(tu.write(tmp_path, "SOME", graphs), "SOME")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": torch.zeros(30)}, ("node_offsets", "0", "30")),
        ({"x": torch.zeros(4, 2, dtype=torch.float64)}, ()),
        ({"x": torch.full((4, 2), float("nan"))}, ()),
        ({"edge_index": torch.zeros(2, 2)}, ("edge_index",)),
        ({"edge_index": torch.tensor([[0, 2], [1, 0]])}, ("1", "2", "0")),
        ({"edge_offsets": torch.tensor([0, 2])}, ("2", "1")),
        ({"labels": torch.tensor([0])}, ("2",)),
        ({"edge_attr": torch.zeros(3, 1)}, ("edge_attr", "3", "2")),
    ],
)
def test_tensors_that_are_no_graphs_are_refused(package, change, named):
    good = {
        "x": torch.zeros(4, 2),
        "edge_index": torch.tensor([[0, 1], [1, 0]]),
        "node_offsets": torch.tensor([0, 2, 4]),
        "edge_offsets": torch.tensor([0, 1, 2]),
        "labels": torch.tensor([0, 1]),
    }
    assert len(package.GraphSamples(**good)) == 2
    with raises(DataError, *named):
        package.GraphSamples(**{**good, **change})


def test_features_of_edges_come_along(package):
    edges = torch.tensor([[0, 1, 0, 2], [1, 0, 2, 0]])
    attributes = torch.arange(4.0).unsqueeze(1)
    samples = package.GraphSamples(
        torch.zeros(5, 1), edges, torch.tensor([0, 2, 5]), torch.tensor([0, 2, 4]), torch.tensor([0, 1]), attributes
    )
    batch = samples.gather(torch.tensor([1, 0]))
    assert batch.edge_attr.flatten().tolist() == [2, 3, 0, 1]
    assert batch.edge_index.tolist() == [[0, 2, 3, 4], [2, 0, 4, 3]]


def test_the_real_mutag(package):
    if not (REAL / "MUTAG" / "raw").is_dir():
        pytest.skip("FEDCORE_TEST_DATA does not have it")
    from torch_geometric.io import read_tu_data

    dataset = load_dataset("mutag", REAL)
    graphs = package.read_tudataset(REAL, "MUTAG")
    assert (len(dataset.train), len(dataset.test), dataset.input_shape) == (169, 19, (7,))
    # Of the 188 compounds 125 are mutagenic (Debnath et al. 1991).
    assert torch.bincount(graphs.labels).tolist() == [63, 125]
    assert (len(graphs.x), graphs.edge_index.shape[1], graphs.edge_attr.shape[1]) == (3371, 7442, 4)
    data, slices, _ = read_tu_data(str(REAL / "MUTAG" / "raw"), "MUTAG")
    for graph in (0, 100, 187):
        alone = graphs.gather(torch.tensor([graph]))
        nodes, edges = (slice(*slices[name][graph : graph + 2].tolist()) for name in ("x", "edge_index"))
        assert torch.equal(alone.x, data.x[nodes])
        assert torch.equal(alone.edge_index, data.edge_index[:, edges])
