"""pfl-research's accountants of privacy."""

from __future__ import annotations

import warnings

from cases import Fixture
from pfl.privacy import PLDPrivacyAccountant, RDPPrivacyAccountant

warnings.simplefilter("ignore")
C = Fixture("pfl", "pfl-research", "pfl", source="run of the library's accountants, on its test's settings")
for kind, accountant in (("pld", PLDPrivacyAccountant), ("rdp", RDPPrivacyAccountant)):
    for rounds, rate, epsilon, delta, noise in (
        (1000, 0.01, 2, None, 0.76),
        (100, 0.1, None, 1e-8, 0.5),
        (500, 0.02, None, 1e-6, 1.1),
    ):
        made = accountant(
            num_compositions=rounds,
            sampling_probability=rate,
            mechanism="gaussian",
            epsilon=epsilon,
            delta=delta,
            noise_parameter=noise,
            noise_scale=1.0,
        )
        said = f"test_privacy_accountant: q {rate}, {rounds} rounds, z {noise} ({kind})"
        C.add(
            f"{kind.upper()} epsilon",
            said,
            "epsilon",
            float(made.epsilon),
            noise=noise,
            rate=rate,
            rounds=rounds,
            delta=float(made.delta),
            accountant=kind,
            tolerance=0.02,
        )
C.write()
