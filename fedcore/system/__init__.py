"""Simulated system heterogeneity: who is there, who is lost, who does less and who is slow, drawn from the seed."""
