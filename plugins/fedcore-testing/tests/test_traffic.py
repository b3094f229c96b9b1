from fedcore_testing.traffic import watch


def test_a_plugin_that_sends_nothing_of_its_own():
    assert watch("fedprox") == ({}, {"down": 0, "up": 0})


def test_prototypes_go_up_and_come_back():
    sent, counted = watch("fedcd", {"fine_classes": 2})
    shapes = {"prototypes": [10, 2, 256], "counts": [10, 2]}
    assert sent == {"up": shapes, "down, before training": shapes}
    each = 10 * 2 * (256 * 4 + 8)  # float32 and int64
    assert counted == {"down": 2 * each, "up": 2 * 2 * each}  # two clients; down in the second round only


def test_an_exchange_and_answers_are_seen():
    exchange = watch("fedcme").tensors
    assert set(exchange["up, exchange"]) == set(exchange["down, exchange"]) == {"classifier.weight", "classifier.bias"}
    assert set(watch("uscc").tensors) == {"up, answer"}
