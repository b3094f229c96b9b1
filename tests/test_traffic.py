from fedcore.traffic import watch


def test_a_plugin_that_sends_nothing_of_its_own():
    assert watch("fedprox") == {}


def test_prototypes_go_up_and_come_back():
    sent = watch("fedcd", {"fine_classes": 2})
    shapes = {"prototypes": [10, 2, 256], "counts": [10, 2]}
    assert sent == {"up": shapes, "down, before training": shapes}


def test_an_exchange_and_answers_are_seen():
    exchange = watch("fedcme")
    assert set(exchange["up, exchange"]) == set(exchange["down, exchange"]) == {"classifier.weight", "classifier.bias"}
    assert set(watch("uscc")) == {"up, answer"}
