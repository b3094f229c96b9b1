"""A short way to run a federation on digits, in this process."""

from fedcore_testing import federations

go = federations("session", clients=4)
