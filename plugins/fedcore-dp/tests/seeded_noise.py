"""fedcore-dp's plugins with noise from the run's seed, for checks that need the same bits twice."""

from fedcore_dp import CentralDP, CentralDPOptions, ExampleDP, ExampleDPOptions, LocalDP, LocalDPOptions


class SeededOptions(CentralDPOptions):
    seed_noise: bool = True


class SeededLocalOptions(LocalDPOptions):
    seed_noise: bool = True


class SeededExampleOptions(ExampleDPOptions):
    seed_noise: bool = True


class SeededDP(CentralDP):
    Options = SeededOptions


class SeededLocalDP(LocalDP):
    Options = SeededLocalOptions


class SeededDPSGD(ExampleDP):
    Options = SeededExampleOptions
