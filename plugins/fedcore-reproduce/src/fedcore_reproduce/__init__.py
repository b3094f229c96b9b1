"""Tables and figures of papers run again (``fedcore reproduce``), and evidence of runs (``fedcore results``)."""
