"""A short way to run a federation on digits, in this process."""

from fedcore.testing import federations

go = federations("session", clients=4)
